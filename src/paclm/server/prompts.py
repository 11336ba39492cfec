"""From what a client asks to what the curator is asked: texts and conversations become token ids, limits are applied.

Runs in a thread of its own, because a long text takes long to encode. Costs nothing and repeats nothing it read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from paclm.config import ServerConfig
from paclm.curator.curator import Curator
from paclm.curator.streams import Request
from paclm.curator.text import encode_prompt
from paclm.errors import EngineError, InvalidInput
from paclm.server.refusals import Refused, invalid
from paclm.server.schemas import Ask, ChatAsk, Prompt


def requests_for(ask: Ask, curator: Curator, settings: ServerConfig, model_id: str, tag: str) -> list[Request]:
    """One request per answer, all answers of a prompt together; a refusal if any of them cannot be served."""
    if ask.model != model_id:
        raise Refused(404, f"This server has one model, {model_id}.", param="model", code="model_not_found")
    if ask.temperature is not None and ask.temperature > settings.max_temperature:
        raise invalid(f"temperature: must lie between 0 and {settings.max_temperature:g}.", "temperature")
    prompts = [_conversation(ask, curator.tokenizer)] if isinstance(ask, ChatAsk) else ask.prompt
    wanted = len(prompts) * ask.answers_each
    if wanted > settings.max_answers:
        raise invalid(
            f"The request asks for {wanted} answers (prompts times n), and {settings.max_answers} is the most at "
            "a time. Send several requests.",
            "n" if ask.answers_each > 1 else "prompt",
        )
    encoded = [_encode(prompt, curator) for prompt in prompts]
    limits = [_limit(tokens, ask.limit, curator.context, settings) for tokens in encoded]
    try:
        return [
            curator.request(
                tokens,
                limit,
                temperature=ask.temperature or None,
                greedy=True if ask.temperature == 0 else None,
                stop=ask.stop,
                coins_seed=_coins_seed(ask.seed, number),
                tag=tag,
            )
            for tokens, limit in zip(encoded, limits, strict=True)
            for number in range(ask.answers_each)
        ]
    except InvalidInput as error:  # ids beyond the vocabulary, all else was checked; no sentence repeats a text
        raise invalid(str(error), "prompt") from None


def _encode(prompt: Prompt, curator: Curator) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return encode_prompt(curator.tokenizer, prompt)
    except EngineError as error:
        raise invalid(str(error), "prompt") from None


def _limit(tokens: Sequence[int], asked: int | None, context: int, settings: ServerConfig) -> int:
    """How many tokens an answer may have; without a wish, what the context still holds."""
    room = context - len(tokens)
    if room < (asked or 1):
        raise invalid(
            f"The prompt has {len(tokens):,} tokens and {asked or 1:,} more are wanted; the context holds {context:,}. "
            "Shorten the prompt or ask for fewer tokens.",
            "prompt" if room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    return asked or min(room, settings.default_max_tokens)


def _coins_seed(seed: int | None, number: int) -> int | None:
    """The first answer has the coins of the seed itself; with the same coins the others would be its twins."""
    if seed is None:
        return None
    if number == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"paclm coins {seed} {number}".encode()).digest()[:16], "big")


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model knows conversations."""
    return getattr(tokenizer, "chat_template", None) is not None


def _conversation(ask: ChatAsk, tokenizer: Any) -> Prompt:
    """The conversation as the model's own template writes it, up to where the answer begins."""
    if not has_chat_template(tokenizer):
        raise invalid(
            "This model has no chat template: it continues texts. Use /v1/completions.", "messages", "no_chat_template"
        )
    from jinja2 import TemplateError  # transformers needs it for templates, too

    roles = {"developer": "system"}
    messages = [{"role": roles.get(message.role, message.role), "content": message.text} for message in ask.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError):  # what a template raises may quote the messages
        raise invalid(
            "The model's chat template does not take this conversation. Usual: an optional system message first, then "
            "user and assistant in turns, the last one of the user.",
            "messages",
            "chat_template_refused",
        ) from None
    return str(text)
