"""Completions, chat, responses and plans: from a body to curator requests."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from paclm.config import MIN_TEMPERATURE
from paclm.curator.grammar import Grammar
from paclm.curator.streams import Request as CuratorRequest
from paclm.curator.streams import Tokenizer, encode_prompt
from paclm.errors import ContextExceeded, EngineError, InvalidInput
from paclm.privacy.accounting import nats_up
from paclm.server.access import AnyCaller, Caller, TheHalfService, TheService
from paclm.server.answer import Answer
from paclm.server.chat_schemas import Ask, ChatAsk
from paclm.server.curator_client import CuratorClient
from paclm.server.messages import CuratorState
from paclm.server.openai_format import Reply, reply_for
from paclm.server.openapi import ANSWER_ERRORS, ChatCompletion, Completion, RequestPlan, described
from paclm.server.refusals import Refused, invalid
from paclm.server.responses_format import ResponseReply
from paclm.server.responses_openapi import ResponseObject
from paclm.server.responses_schemas import ResponseAsk
from paclm.server.schemas import CompletionAsk, Prompt, check, is_large, parse_object, read_body
from paclm.server.service import Service
from paclm.server.structured import field_of, forced_choice_of, grammar_of
from paclm.server.tool_calls import conversation
from paclm.server.tool_reply import ToolReply

router, half_router = APIRouter(), APIRouter()

AnyAsk = Ask | ResponseAsk
BODIES = (CompletionAsk, ChatAsk, ResponseAsk)
OR_BODIES = ("ChatAsk", "ResponseAsk")
"""Bodies that a plan takes besides CompletionAsk."""
NO_LOGPROBS = "is not offered: probabilities leak more about the private records than one token does"
_IN_RESPONSES: dict[str | None, str] = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What fields of a chat are called in `/v1/responses`."""
_FORCED_CHOICE = (
    "Such a forced choice can say more about the private records than free text does, so this server refuses it. Its "
    "operator can allow it: forced_choice = true in [server]."
)
_SHORT_BYTES = 4096
"""A body up to this length is tokenized at once: that takes less time than the way to a thread and back."""


@router.post("/v1/completions", **described(Completion, ANSWER_ERRORS, body="CompletionAsk", streams=True))
async def completions(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """Continue one or more prompts privately."""
    return await _answer(request, caller, service, CompletionAsk)


@router.post("/v1/chat/completions", **described(ChatCompletion, ANSWER_ERRORS, body="ChatAsk", streams=True))
async def chat_completions(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """Answer a conversation privately; for models with a chat template."""
    return await _answer(request, caller, service, ChatAsk)


@router.post("/v1/responses", **described(ResponseObject, ANSWER_ERRORS, body="ResponseAsk", streams=True))
async def responses(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """Answer a conversation privately, in the format of OpenAI's responses; nothing is stored between requests."""
    return await _answer(request, caller, service, ResponseAsk)


@half_router.post(
    "/v1/privacy/plan", **described(RequestPlan, {400, 404, 408, 413, 415}, body="CompletionAsk", or_bodies=OR_BODIES)
)
async def plan(request: Request, caller: AnyCaller, service: TheHalfService) -> Response:
    """What a request would cost at most; changes nothing and charges nothing."""
    _, _, requests = await prepare(request, caller, service, None)
    return JSONResponse(_plan(service.curator, await service.curator.ask_state(), caller, requests))


async def _answer(request: Request, caller: Caller, service: Service, shape: type[AnyAsk]) -> Response:
    body, ask, requests = await prepare(request, caller, service, shape)
    model_id, is_admin = service.setup.model_id, caller.is_admin
    if isinstance(ask, ResponseAsk):
        reply: Reply = ResponseReply(ask, model_id, is_admin=is_admin)
    elif isinstance(ask, ChatAsk) and ask.callable_tools:
        reply = ToolReply(ask, model_id, is_admin=is_admin, tokenizer=service.tokenizer)
    else:
        reply = reply_for(ask, model_id, is_admin=is_admin, tokenizer=service.tokenizer)
    return await Answer(service, caller, requests, reply, is_stream=bool(ask.stream)).respond(request, body)


async def prepare(
    request: Request, caller: Caller, service: Service, shape: type[AnyAsk] | None
) -> tuple[bytes, AnyAsk, list[CuratorRequest]]:
    """Body, fields and requests; without a shape the fields tell it. A key prepares few large bodies at a time."""
    async with service.large_bodies[caller.name] if is_large(request) else nullcontext():
        body = await read_body(request, service.setup.settings)
        fields = parse_object(body)
        ask: AnyAsk = check(shape or _shape_of(fields), fields)
        if not isinstance(ask, ResponseAsk):
            return body, ask, await _requests(ask, caller, service, len(body))
        try:
            return body, ask, await _requests(ask.as_chat(), caller, service, len(body))
        except Refused as refusal:
            refusal.param = _IN_RESPONSES.get(refusal.param, refusal.param)
            raise


async def _requests(ask: Ask, caller: Caller, service: Service, num_bytes: int) -> list[CuratorRequest]:
    is_short = num_bytes <= _SHORT_BYTES and ask.answers_each == 1
    grammar = await _checked_grammar(ask, service, caller.name, is_short=is_short) if ask.is_structured else None
    if is_short:
        return requests_for(ask, service, caller.name, grammar)
    return await service.tokenizing.run(caller.name, requests_for, ask, service, caller.name, grammar)


async def _checked_grammar(ask: Ask, service: Service, owner: str, *, is_short: bool) -> Grammar | None:
    """What the answers must look like, tried out before the curator sees it."""
    allows = service.allows_forced_choice
    run = service.tokenizing.run
    grammar, forced = _grammar(ask, allows) if is_short else await run(owner, _grammar, ask, allows)
    if grammar is not None:
        try:
            await service.grammars.check(grammar, owner)
        except Refused as refusal:
            refusal.param = field_of(ask)
            raise
    if forced is not None:  # last: what cannot be built is refused for that, also where choices are allowed
        raise invalid(f"{forced} {_FORCED_CHOICE}", field_of(ask), "forced_choice")
    return grammar


def _grammar(ask: Ask, allows_forced_choice: bool) -> tuple[Grammar | None, str | None]:
    """The grammar, and why it is a forced choice that is not allowed."""
    grammar = grammar_of(ask)  # first: it limits the size, and the time to look for choices grows with that
    return grammar, None if allows_forced_choice else forced_choice_of(ask)


def _shape_of(fields: dict[str, Any]) -> type[AnyAsk]:
    if "messages" in fields:
        return ChatAsk
    return ResponseAsk if "input" in fields else CompletionAsk


def _plan(
    curator: CuratorClient, state: CuratorState, caller: Caller, requests: list[CuratorRequest]
) -> dict[str, Any]:
    quota = None if caller.key is None else caller.key.remaining_tokens
    config, price = curator.config, curator.worst_price
    tokens = sum(request.max_new_tokens for request in requests)
    left = curator.figures(is_admin=caller.is_admin)["remaining_tokens"]
    if caller.is_admin:
        fits = tokens * price + state["reserved_units"] <= state["remaining_units"]
    else:
        fits = tokens <= left or price == 0
    return {
        "object": "privacy.plan",
        "answers": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "max_tokens": tokens,
        "per_token_nats": config.per_token,
        "max_nats": nats_up(tokens * price),
        "charge": config.charge,
        "fits": fits and (quota is None or tokens <= quota),
        "on_exhausted": config.on_exhausted,
        "remaining_tokens": left,
        "as_of": None if caller.is_admin else state["coarse"]["as_of"],
        "remaining_quota_tokens": quota,
        "mia_bound": state["mia_bound"],
        "world_id_bound": state["world_id_bound"],
    }


def requests_for(ask: Ask, service: Service, tag: str, grammar: Grammar | None = None) -> list[CuratorRequest]:
    """One request per answer, all answers of a prompt together, or a refusal. Costs nothing; repeats no text."""
    tokenizer, curator, limits = service.tokenizer, service.curator, service.curator.limits
    settings, model_id = service.setup.settings, service.setup.model_id
    if ask.model != model_id:
        raise Refused(404, f"This server has one model, {model_id}.", param="model", code="model_not_found")
    if ask.temperature and not MIN_TEMPERATURE <= ask.temperature <= settings.max_temperature:
        least, most = MIN_TEMPERATURE, settings.max_temperature
        raise invalid(f"temperature: must be 0 or lie between {least:g} and {most:g}.", "temperature")
    if ask.num_logprobs is not None and not service.has_logprobs:
        raise invalid(f"logprobs: {NO_LOGPROBS}. They are answered under the promise corpus.", "logprobs")
    prompts = [_conversation(ask, tokenizer)] if isinstance(ask, ChatAsk) else ask.prompt
    asked = "messages" if isinstance(ask, ChatAsk) else "prompt"
    num_answers = len(prompts) * ask.answers_each
    if num_answers > settings.max_answers:
        raise invalid(
            f"The request asks for {num_answers} answers (prompts times n); at most {settings.max_answers} are "
            "allowed. Send several requests.",
            "n" if ask.answers_each > 1 else asked,
        )
    try:
        least = max((service.prompt_length.least_tokens(p) for p in prompts if isinstance(p, str)), default=0)
        wanted = ask.limit or 1
        if least + wanted > limits.context:
            raise ContextExceeded(prompt_tokens=least, max_new_tokens=wanted, context=limits.context, is_least=True)
        encoded = [encode_prompt(tokenizer, p) if isinstance(p, str) else p for p in prompts]
        return [
            CuratorRequest(
                prompt=tuple(tokens),
                max_new_tokens=ask.limit or max(1, min(limits.context - len(tokens), settings.default_max_tokens)),
                temperature=curator.default_temperature if ask.temperature is None else float(ask.temperature),
                stop=ask.stop,
                coins_seed=_coins_seed(ask.seed, number),
                tag=tag,
                num_logprobs=ask.num_logprobs,
                grammar=grammar,
                limits=limits,
            )
            for tokens in encoded
            for number in range(ask.answers_each)
        ]
    except ContextExceeded as error:
        param = asked if error.prompt_tokens >= error.context else "max_tokens"
        raise invalid(str(error), param, "context_length_exceeded") from None
    except (EngineError, InvalidInput) as error:  # ids beyond the vocabulary, text that cannot be encoded
        raise invalid(str(error), asked) from None


def _coins_seed(seed: int | None, number: int) -> int | None:
    """The first answer has the coins of the seed itself; the others differ, or all n answers would be equal."""
    if seed is None:
        return None
    if number == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"paclm coins {seed} {number}".encode()).digest()[:16], "big")


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the model takes conversations."""
    return tokenizer.chat_template is not None


def _conversation(ask: ChatAsk, tokenizer: Tokenizer) -> Prompt:
    """The conversation in the model's own template, up to where the answer begins."""
    if not has_chat_template(tokenizer):
        raise invalid(
            "This model has no chat template: it continues texts. Use /v1/completions.", "messages", "no_chat_template"
        )
    from jinja2 import TemplateError  # transformers needs it for templates, too

    messages: list[dict[str, Any]]
    options: dict[str, Any] = {}
    if ask.has_tools:
        messages, options = conversation(ask, tokenizer.chat_template)
    else:
        messages = [{"role": message.template_role, "content": message.text} for message in ask.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError):  # a template's error may quote the messages
        raise invalid(
            "The model's chat template does not accept this conversation. Usual: an optional system message first, "
            "then user and assistant alternating, the last one from the user.",
            "messages",
            "chat_template_refused",
        ) from None
    return str(text)
