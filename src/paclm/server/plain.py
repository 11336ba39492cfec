"""Servers whose tokens cost nothing: no secret, no budget. The DP adapter, or a student, answers.

All that their endpoints say comes from what the adapter's promise is and from what callers did: no count, hash or loss
of the records gets into this process.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from paclm import __version__
from paclm.server.access import Admin, AnyCaller, the_service
from paclm.server.completions import OR_BODIES, has_chat_template, prepare
from paclm.server.curator_client import DecoderClient, Transcript
from paclm.server.messages import DecoderState
from paclm.server.openai_format import Figures
from paclm.server.openapi import History, PlainOverview, described
from paclm.server.service import Service
from paclm.server.stats import load_of, recent_points, scraped


class PlainClient(DecoderClient):
    """Of a decoder that charges nothing."""

    def __init__(self, hello: Mapping[str, Any]) -> None:
        super().__init__(hello)
        self.voting: dict[str, Any] = hello["voting"]
        """How tokens are drawn; to be shown."""

    async def ask_state(self) -> DecoderState:
        """The state between two steps."""
        self.state = await self._ask("figures")
        return self.state

    def figures(self) -> Figures:
        """The promise and what it bounds."""
        return {name: value for name, value in self.state.items() if name not in ("running", "waiting")}


class PlainService(Service):
    """One adapter answers, and `logprobs` are post-processing."""

    has_logprobs = True
    curator: PlainClient
    in_replies: ClassVar[tuple[str, ...]]
    """Which figures every reply carries."""
    budget: ClassVar[str]
    """That there is none, in a sentence."""

    @abstractmethod
    def guarantee(self, figures: Figures) -> str:
        """The promise in words."""

    @abstractmethod
    def not_promised(self, figures: Figures) -> str:
        """What it does not cover."""

    @abstractmethod
    def gauges(self, figures: Figures) -> Mapping[str, float]:
        """The promise in metrics."""

    def cost_of(self, streams: Sequence[Transcript] = (), *, is_admin: bool = False) -> Figures:
        """The promise: the same whatever was asked, and for everybody."""
        return {name: value for name, value in self.curator.figures().items() if name in self.in_replies}


ThePlainService = Annotated[PlainService, Depends(the_service)]


def router_of(privacy_shape: type[BaseModel], plan_shape: type[BaseModel]) -> APIRouter:
    """The endpoints that depend on the promise; the shapes are those of `/v1/privacy` and its plan."""
    router = APIRouter()
    router.get("/v1/privacy", **described(privacy_shape, set()))(privacy)
    planning = described(plan_shape, {400, 404, 408, 413, 415}, body="CompletionAsk", or_bodies=OR_BODIES)
    router.post("/v1/privacy/plan", **planning)(plan)
    router.get("/v1/admin/overview", **described(PlainOverview, {403}))(overview)
    router.get("/v1/admin/history", **described(History, {403}))(history)
    router.get("/metrics", include_in_schema=False)(metrics)
    return router


async def privacy(caller: AnyCaller, service: ThePlainService) -> Response:
    """What is promised, and what that bounds."""
    await service.curator.ask_state()
    figures, key = service.curator.figures(), caller.key
    used = key.used_tokens if key else service.num_tokens[caller.name]
    return JSONResponse(
        {
            "object": "privacy",
            **figures,
            "sentence": service.guarantee(figures),
            "budget": service.budget,
            "not_promised": service.not_promised(figures),
            "key": {"name": caller.name, "quota_tokens": key.quota_tokens if key else None, "used_tokens": used},
        }
    )


async def plan(request: Request, caller: AnyCaller, service: ThePlainService) -> Response:
    """How many tokens a request may take of the key's quota; nothing is charged to the promise."""
    _, _, requests = await prepare(request, caller, service, None)
    quota = None if caller.key is None else caller.key.remaining_tokens
    tokens = sum(asked.max_new_tokens for asked in requests)
    return JSONResponse(
        {
            "object": "privacy.plan",
            "answers": len(requests),
            "prompt_tokens": sum(len(asked.prompt) for asked in requests),
            "max_tokens": tokens,
            "fits": quota is None or tokens <= quota,
            "remaining_quota_tokens": quota,
            **service.cost_of(),
            "budget": service.budget,
        }
    )


async def overview(_: Admin, service: ThePlainService) -> Response:
    """Everything for the operator's dashboard."""
    curator, setup = service.curator, service.setup
    await curator.ask_state()
    figures = curator.figures()
    content = {
        "model": setup.model_id,
        "has_chat_template": has_chat_template(service.tokenizer),
        "version": __version__,
        "state": service.state,
        "uptime_seconds": round(service.uptime_seconds, 1),
        "promise": figures,
        "sentences": {
            "guarantee": service.guarantee(figures),
            "unit": setup.unit,
            "budget": service.budget,
            "not_promised": service.not_promised(figures),
        },
        "load": load_of(service),
        "keys": await _by_key(service),
        "settings": {
            "decoding": curator.voting,
            "runtime": {**setup.runtime, "context": curator.limits.context, "max_sequences": curator.num_places},
            "server": dataclasses.asdict(setup.settings) | {"model_id": setup.model_id},
        },
        "cautions": curator.cautions,
    }
    return JSONResponse(content)


async def history(_: Admin, service: ThePlainService) -> Response:
    """The last minutes from memory; there is no ledger of tokens, so nothing older."""
    return JSONResponse({"bin": "hour", "points": [], "recent": recent_points(service)})


async def metrics(_: Admin, service: ThePlainService) -> Response:
    """Metrics for Prometheus."""
    await service.curator.ask_state()
    return await scraped(service, service.gauges(service.curator.figures()))


async def _by_key(service: PlainService) -> list[dict[str, Any]]:
    """Keys of the store, and names that only this process has seen. Requests and tokens are since the start."""
    stored = {key.name: key for key in await service.read(service.keys.list)}
    names = [*stored, *sorted(set(service.num_requests) - set(stored))]
    return [
        {
            "name": name,
            "is_admin": (key := stored.get(name)) is not None and key.is_admin,
            "is_revoked": key is not None and key.revoked_at is not None,
            "quota_tokens": key.quota_tokens if key else None,
            "used_tokens": key.used_tokens if key else service.num_tokens[name],
            "requests": service.num_requests[name],
            "tokens": service.num_tokens[name],
        }
        for name in names
    ]
