"""`/v1/completions`, `/v1/chat/completions` and `/v1/privacy/plan`: what a request gets, and what it would cost."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from paclm.curator.curator import Curator
from paclm.curator.streams import Request as CuratorRequest
from paclm.privacy.accounting import nats_up
from paclm.server.access import AnyCaller, TheService
from paclm.server.bodies import check, parse_object, read_body
from paclm.server.jobs import Caller
from paclm.server.openai_format import reply_for
from paclm.server.openapi import ANSWER_ERRORS, described
from paclm.server.prompts import requests_for
from paclm.server.responses import EventStream, Production, begin_once, send_whole
from paclm.server.schemas import Ask, ChatAsk, CompletionAsk
from paclm.server.service import Service
from paclm.server.shapes import ChatCompletion, Completion, Plan

router = APIRouter()


@router.post("/v1/completions", **described(Completion, ANSWER_ERRORS, body="CompletionAsk", streams=True))
async def completions(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """Continue one or more prompts privately."""
    body = await read_body(request, service.setup.settings)
    return await _answer(request, caller, service, body, check(CompletionAsk, parse_object(body)))


@router.post("/v1/chat/completions", **described(ChatCompletion, ANSWER_ERRORS, body="ChatAsk", streams=True))
async def chat_completions(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """Answer a conversation privately; for models with a chat template."""
    body = await read_body(request, service.setup.settings)
    return await _answer(request, caller, service, body, check(ChatAsk, parse_object(body)))


@router.post("/v1/privacy/plan", **described(Plan, {400, 404, 408, 413, 415}, body="CompletionAsk", or_body="ChatAsk"))
async def plan(request: Request, caller: AnyCaller, service: TheService) -> Response:
    """What a request would cost at most; changes nothing and charges nothing."""
    fields = parse_object(await read_body(request, service.setup.settings))
    ask: Ask = check(ChatAsk, fields) if "messages" in fields else check(CompletionAsk, fields)
    requests = await _requests_for(ask, caller, service)
    return JSONResponse(await service.ask(lambda curator: _plan(curator, caller, requests)))


async def _answer(request: Request, caller: Caller, service: Service, body: bytes, ask: Ask) -> Response:
    requests = await _requests_for(ask, caller, service)
    # Made before anything is held: what fails here must not leave anything on hold.
    reply = reply_for(ask, service.setup.model_id, is_admin=caller.is_admin, tokenizer=service.curator.tokenizer)
    ticket, repeated = await begin_once(service, caller, request, body)
    if repeated is not None:
        return repeated
    try:
        job = await service.admit(caller, requests)
    except Exception:
        if ticket is not None:  # nothing was charged, so the key may be used again
            await service.book(partial(service.replies.abandon, ticket))
        raise
    except asyncio.CancelledError:
        if ticket is not None:  # it may have been admitted, and a token charged
            service.spawn(service.book(partial(service.replies.lose, ticket)))
        raise
    production = Production(service, job, reply, ticket, request)
    return EventStream(service, production) if ask.stream else await send_whole(service, production, request)


async def _requests_for(ask: Ask, caller: Caller, service: Service) -> list[CuratorRequest]:
    setup = service.setup
    return await asyncio.to_thread(requests_for, ask, service.curator, setup.settings, setup.model_id, tag=caller.name)


def _plan(curator: Curator, caller: Caller, requests: list[CuratorRequest]) -> dict[str, Any]:
    """In the stepping thread: what is held for others is exact."""
    quota = None if caller.key is None else caller.key.remaining_tokens
    config, account, price = curator.config, curator.account, curator.worst_price
    tokens = sum(request.max_new_tokens for request in requests)
    figures = curator.figures()
    return {
        "object": "privacy.plan",
        "answers": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "max_tokens": tokens,
        "per_token_nats": config.per_token,
        "max_nats": nats_up(tokens * price),
        "charge": config.charge,
        "fits": account.affords(tokens * price + curator.reserved_units) and (quota is None or tokens <= quota),
        "on_exhausted": config.on_exhausted,
        "remaining_tokens": figures["remaining_tokens"],
        "remaining_quota_tokens": quota,
        "mia_bound": figures["mia_bound"],
        "world_id_bound": figures["world_id_bound"],
    }
