"""The promise `corpus` over HTTP: no secret, no budget, nothing charged. What its endpoints say.

All of it comes from the DP adapter's account and from what callers did: no count, hash or loss of the records gets into
this process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from paclm import __version__
from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up
from paclm.server.access import Admin, AnyCaller, the_service
from paclm.server.completions import OR_BODIES, has_chat_template, prepare
from paclm.server.curator_client import DecoderClient, Transcript
from paclm.server.messages import CorpusState
from paclm.server.openai_format import Figures
from paclm.server.openapi import CorpusOverview, CorpusPlan, CorpusPrivacy, History, described
from paclm.server.service import Service
from paclm.server.stats import MIXED, load_of, recent_points, scraped

router = APIRouter()

NO_BUDGET = (
    "Nothing is charged: the promise is the same after any number of requests; it weakens only if the operator trains "
    "again or mixes promises. Only a key's own quota limits what it may ask."
)
NOT_PROMISED = (
    "The bound is about one unit, whatever else is known. What many records have in common is learnt: that is what "
    "training is for. A text that stands in several units is hidden less, and any text may be emitted."
)
_BOUNDS = ("epsilon", "delta", "mia_bound", "tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")
_IN_REPLIES = ("promise", "epsilon", "delta", "unit", "mia_bound", "is_promised")


class CorpusClient(DecoderClient):
    """Of the promise `corpus`."""

    state: CorpusState

    def __init__(self, hello: Mapping[str, Any]) -> None:
        super().__init__(hello)
        self.voting: dict[str, Any] = hello["voting"]
        """How tokens are drawn; to be shown."""

    async def ask_state(self) -> CorpusState:
        """The state between two steps."""
        self.state = await self._ask("figures")
        return self.state

    def figures(self) -> Figures:
        """The promise and what it bounds; null where nothing is promised."""
        figures = {name: value for name, value in self.state.items() if name not in ("running", "waiting")}
        return figures if figures["is_promised"] else {**figures, **dict.fromkeys(_BOUNDS)}


class CorpusService(Service):
    """Of the promise `corpus`: the DP adapter answers, and `logprobs` are post-processing."""

    promise = "corpus"
    has_logprobs = True
    curator: CorpusClient

    def cost_of(self, streams: Sequence[Transcript] = (), *, is_admin: bool = False) -> Figures:
        """The promise: the same whatever was asked, and for everybody."""
        return {name: value for name, value in self.curator.figures().items() if name in _IN_REPLIES}


TheCorpusService = Annotated[CorpusService, Depends(the_service)]


@router.get("/v1/privacy", **described(CorpusPrivacy, set()))
async def privacy(caller: AnyCaller, service: TheCorpusService) -> Response:
    """What is promised, and what that bounds."""
    await service.curator.ask_state()
    figures, key = service.curator.figures(), caller.key
    used = key.used_tokens if key else service.num_tokens[caller.name]
    return JSONResponse(
        {
            "object": "privacy",
            **figures,
            "sentence": guarantee(figures, service.setup.unit),
            "budget": NO_BUDGET,
            "not_promised": NOT_PROMISED,
            "key": {"name": caller.name, "quota_tokens": key.quota_tokens if key else None, "used_tokens": used},
        }
    )


@router.post(
    "/v1/privacy/plan", **described(CorpusPlan, {400, 404, 408, 413, 415}, body="CompletionAsk", or_bodies=OR_BODIES)
)
async def plan(request: Request, caller: AnyCaller, service: TheCorpusService) -> Response:
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
            "budget": NO_BUDGET,
        }
    )


@router.get("/v1/admin/overview", **described(CorpusOverview, {403}))
async def overview(_: Admin, service: TheCorpusService) -> Response:
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
            "guarantee": guarantee(figures, setup.unit),
            "unit": setup.unit,
            "budget": NO_BUDGET,
            "not_promised": NOT_PROMISED,
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


@router.get("/v1/admin/history", **described(History, {403}))
async def history(_: Admin, service: TheCorpusService) -> Response:
    """The last minutes from memory; there is no ledger of tokens, so nothing older."""
    return JSONResponse({"bin": "hour", "points": [], "recent": recent_points(service)})


@router.get("/metrics", include_in_schema=False)
async def metrics(_: Admin, service: TheCorpusService) -> Response:
    """Metrics for Prometheus."""
    await service.curator.ask_state()
    figures = service.curator.figures()
    promised = {
        f"paclm_promise_{name}": math.nan if (value := figures[name]) is None else value
        for name in ("epsilon", "delta")
    }
    return await scraped(service, {**promised, "paclm_promise_kept": figures["is_promised"]})


def guarantee(figures: Figures, unit: str = "a record was") -> str:
    """The promise in two sentences, for a record or for the group that it belongs to."""
    if not figures["is_promised"]:
        return MIXED
    low, high = (format_bound(figures[f"tpr_at_fpr_{rate}_percent"]) for rate in ("0_1", "1"))
    return (
        f"No attack on whether {unit} in the corpus succeeds more than {format_bound(figures['mia_bound'])} of the "
        "time, whatever is asked and however often; guessing succeeds 50% of the time. One that is wrong about 0.1% of "
        f"those outside finds at most {low} of those inside, at 1% at most {high} (ε = "
        f"{format_up(figures['epsilon'])}, δ = {format_up(figures['delta'])})."
    )


async def _by_key(service: CorpusService) -> list[dict[str, Any]]:
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
