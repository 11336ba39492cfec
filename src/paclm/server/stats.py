"""The state of the budget, for callers and for the admin, with the sentences that explain it.

Bounds are at the committed total, never at the spend. Belief and leak estimate are for the admin, to three digits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from paclm import __version__
from paclm.config import format_budget, format_duration
from paclm.curator.streams import BudgetFigures, UsageFigures
from paclm.ledger.events import Usage
from paclm.privacy.accounting import nats_up, units_up
from paclm.privacy.bounds import format_bound
from paclm.server.access import Admin, AnyCaller, TheHalfService
from paclm.server.api_keys import KeyInfo
from paclm.server.completions import has_chat_template
from paclm.server.openapi import History, Overview, Privacy, described
from paclm.server.service import Service
from paclm.server.telemetry import BIN_SECONDS, CONTENT_TYPE, Standing

router = APIRouter()

_MOST_POINTS = 500
NOT_PROMISED = (
    "The bound is about which half of the corpus was used, against someone who knows nothing of that beforehand. "
    "Whether a record is in the corpus at all is not hidden. A text that the model has memorized may be emitted."
)
MIXED = (
    "Nothing is promised about the corpus: it was served under both promises, and `half` does not hide whether a "
    "record is in the corpus."
)


@router.get("/v1/privacy", **described(Privacy, set()))
async def privacy(caller: AnyCaller, service: TheHalfService) -> Response:
    """What was spent so far, what is left, and what is promised."""
    curator, key = service.curator, caller.key
    used = key.used_tokens if key else _tokens_of(caller.name, await curator.ask_usage())
    state = await curator.ask_state()
    figures = curator.figures(is_admin=caller.is_admin)
    own = {"quota_tokens": key.quota_tokens if key else None, "used_tokens": used}
    return JSONResponse(
        {
            "object": "privacy",
            **figures,
            "as_of": None if caller.is_admin else state["coarse"]["as_of"],
            "per_token_nats": curator.config.per_token,
            "is_exhausted": figures["remaining_tokens"] == 0,
            "on_exhausted": curator.config.on_exhausted,
            "charge": curator.config.charge,
            "release": curator.config.release,
            "promise": "half",
            "are_promises_mixed": curator.are_promises_mixed,
            "sentence": guarantee(figures, service.setup.unit),
            "not_promised": not_promised(is_mixed=curator.are_promises_mixed),
            "key": {"name": caller.name, **own},
        }
    )


@router.get("/v1/admin/overview", **described(Overview, {403}))
async def overview(_: Admin, service: TheHalfService) -> Response:
    """Everything for the operator's dashboard."""
    curator, setup = service.curator, service.setup
    usage, leak, state = await asyncio.gather(curator.ask_usage(), curator.ask_leak(), curator.ask_state())
    keys = await service.read(service.keys.list)
    figures = curator.figures(is_admin=True)
    tokens_per_second = service.recent.rates()[0]
    most = math.log(curator.num_worlds)
    per_token = units_up(curator.config.per_token)
    content = {
        "model": setup.model_id,
        "has_chat_template": has_chat_template(service.tokenizer),
        "version": __version__,
        "state": service.state,
        "uptime_seconds": round(service.uptime_seconds, 1),
        "budget": {
            **figures,
            "per_token_nats": curator.config.per_token,
            "total_tokens": state["total_units"] // per_token,
            "held_tokens": state["reserved_units"] // per_token,
            "is_exhausted": figures["remaining_tokens"] == 0,
            "on_exhausted": curator.config.on_exhausted,
        },
        "sentences": {
            "guarantee": guarantee(figures, setup.unit),
            "unit": setup.unit,
            "spent": spent(figures),
            "left": left(figures, curator.config.on_exhausted, tokens_per_second),
            "not_promised": not_promised(is_mixed=curator.are_promises_mixed),
        },
        "tokens": {
            "private": state["tokens"],
            "public": sum(entry.public_tokens for entry in usage.by_tag.values()),
            "dissent": state["dissent_tokens"],
            "charged": state["charged_tokens"],
            "dissent_rate": state["dissent_tokens"] / state["tokens"] if state["tokens"] else None,
        },
        "belief": {
            "leak_estimate_nats": leak,
            "entropy_nats": float(f"{most - leak:.3g}"),
            "max_entropy_nats": float(f"{most:.3g}"),
            "num_worlds": curator.num_worlds,
        },
        "load": load_of(service),
        "keys": _by_key(keys, usage, service),
        "settings": {
            "mechanism": dataclasses.asdict(curator.config),
            "runtime": {
                **setup.runtime,  # automatic ones as they are in force
                "context": curator.limits.context,
                "max_sequences": curator.num_places,
            },
            "server": dataclasses.asdict(setup.settings) | {"model_id": setup.model_id},
        },
        "cautions": curator.cautions,
    }
    return JSONResponse(content)


@router.get("/v1/admin/history", **described(History, {403}))
async def history(_: Admin, service: TheHalfService) -> Response:
    """Spending over time from the ledger, and the last minutes from memory."""
    usage = await service.curator.ask_usage()
    return JSONResponse({**_points(usage.by_hour), "recent": recent_points(service)})


def load_of(service: Service) -> dict[str, float]:
    """How busy the server is."""
    tokens_per_second, steps_per_second = service.recent.rates()
    return {
        "tokens_per_second": tokens_per_second,
        "steps_per_second": steps_per_second,
        "running": service.curator.state["running"],
        "waiting": service.curator.state["waiting"],
        "places": service.curator.num_places,
        "max_waiting": service.setup.settings.max_waiting,
    }


def recent_points(service: Service) -> dict[str, Any]:
    """The last minutes."""
    counts = ("private_tokens", "public_tokens", "dissent_tokens", "steps")
    recent = [{"at": _iso(bin_.at), **{name: getattr(bin_, name) for name in counts}} for bin_ in service.recent.bins()]
    return {"seconds": BIN_SECONDS, "points": recent}


@router.get("/metrics", include_in_schema=False)
async def metrics(_: Admin, service: TheHalfService) -> Response:
    """Metrics for Prometheus."""
    figures = service.curator.figures(is_admin=True)
    spent, total = figures["spent_nats"], figures["total_nats"]
    return await scraped(
        service,
        {
            "paclm_budget_spent_nats": spent,
            "paclm_budget_total_nats": total,
            "paclm_budget_remaining_nats": max(0.0, total - spent),
            "paclm_budget_remaining_tokens": figures["remaining_tokens"],
        },
    )


async def scraped(service: Service, promise: Mapping[str, float]) -> Response:
    """All metrics, with these of the promise."""
    standing = Standing(
        promise=promise,
        running=service.curator.state["running"],
        queued=service.curator.state["waiting"],
        workers_lost=service.curator.num_workers_lost,
        is_serving=service.state in ("serving", "restoring"),
        keys=await service.read(service.keys.list),
    )
    return Response(service.metrics.render(standing), headers={"content-type": CONTENT_TYPE})


def not_promised(*, is_mixed: bool) -> str:
    """What the promise `half` does not cover."""
    return f"{MIXED} {NOT_PROMISED}" if is_mixed else NOT_PROMISED


def guarantee(figures: BudgetFigures, unit: str = "a record was") -> str:
    """The guarantee in one sentence, for a record or for the group that it belongs to."""
    bound = (
        f"No attack on whether {unit} in the half of the corpus that was used succeeds more than "
        f"{format_bound(figures['mia_bound'])} of the time"
    )
    guess = "guessing succeeds 50% of the time."
    if figures["remaining_tokens"]:
        return f"{bound}, whatever is asked until the budget is spent; {guess}"
    return f"{bound}; {guess} {_gone(figures)}. The guarantee holds as committed; nothing more is charged."


def spent(figures: BudgetFigures) -> str:
    """What was spent so far; not a guarantee."""
    share = figures["spent_nats"] / figures["total_nats"] if figures["total_nats"] else 1.0
    return (
        f"{format_bound(share, decimals=2)} of the budget is spent so far: {format_budget(figures['spent_nats'])} of "
        f"{format_budget(figures['total_nats'])} nats."
    )


def left(figures: BudgetFigures, on_exhausted: str, tokens_per_second: float = 0.0) -> str:
    """What is left and for how long, or what happens after the budget is spent."""
    tokens = figures["remaining_tokens"]
    if not tokens:
        answers = "the public model answers, marked" if on_exhausted == "public" else "requests are refused (429)"
        return f"{_gone(figures)}: there are no more private tokens, and {answers}."
    if not tokens_per_second:
        return f"{tokens:,} tokens are left."
    return f"{tokens:,} tokens are left: {format_duration(tokens / tokens_per_second)} at the rate of the last seconds."


def _gone(figures: BudgetFigures) -> str:
    """Why no more tokens can be charged: after per_token was raised much of a budget may be left."""
    if figures["spent_nats"] < figures["total_nats"]:
        return "One token costs more than is left of the budget"
    return "The budget is spent"


def _tokens_of(name: str, usage: UsageFigures) -> int:
    """Private tokens in the ledger, for a name that is not in the key store."""
    return usage.by_tag.get(name, Usage(name)).tokens


def _by_key(keys: list[KeyInfo], usage: UsageFigures, service: Service) -> list[dict[str, Any]]:
    """Keys of the store, and names that only the ledger or this process has."""
    stored = {key.name: key for key in keys}
    names = [*stored, *sorted((set(usage.by_tag) | set(service.num_requests)) - set(stored))]
    return [_key_row(name, stored.get(name), usage.by_tag.get(name, Usage(name)), service) for name in names]


def _key_row(name: str, key: KeyInfo | None, usage: Usage, service: Service) -> dict[str, Any]:
    return {
        "name": name,
        "is_admin": key is not None and key.is_admin,
        "is_revoked": key is not None and key.revoked_at is not None,
        "quota_tokens": key.quota_tokens if key else None,
        "used_tokens": key.used_tokens if key else usage.tokens,
        "requests": service.num_requests[name],
        "private_tokens": usage.tokens,
        "public_tokens": usage.public_tokens,
        "charged_nats": nats_up(usage.units),
    }


def _points(by_hour: dict[str, Usage]) -> dict[str, Any]:
    """Bins with tokens, oldest first, with running sums; by day if there are too many hours."""
    name, length, rest = ("hour", 13, ":00:00Z") if len(by_hour) <= _MOST_POINTS else ("day", 10, "T00:00:00Z")
    bins: dict[str, list[int]] = {}
    for hour, usage in by_hour.items():
        counts = [usage.tokens, usage.public_tokens, usage.dissent_tokens, usage.units]
        old = bins.get(hour[:length], [0] * len(counts))
        bins[hour[:length]] = [a + b for a, b in zip(old, counts, strict=True)]
    points, units_so_far = [], 0
    for start, (private, public, dissent, units) in bins.items():
        units_so_far += units
        points.append(
            {
                "at": start + rest,
                "private_tokens": private,
                "public_tokens": public,
                "dissent_tokens": dissent,
                "charged_nats": nats_up(units),
                "spent_nats": nats_up(units_so_far),
            }
        )
    return {"bin": name, "points": points[-_MOST_POINTS:]}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
