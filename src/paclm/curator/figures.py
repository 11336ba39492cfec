"""What a curator says about budget and use, to whoever shows it. Counts and public bounds: no secret and no belief."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from paclm.ledger.events import Usage


class BudgetFigures(TypedDict):
    """Where the budget stands, in the names of the command line's JSON."""

    spent_nats: float
    """So far, by everyone; never a guarantee."""
    total_nats: float
    """Committed."""
    remaining_tokens: int
    """At the price of one that is disputed."""
    mia_bound: float
    """At the committed total, as `world_id_bound`."""
    world_id_bound: float


class UsageFigures(NamedTuple):
    """What was had, all time; a tag's own spend bounds nothing: all share one belief."""

    by_tag: dict[str, Usage]
    """Tags of requests; behind a server, the names of API keys."""
    by_hour: dict[str, Usage]
    """Hours (UTC) as 2026-11-20T14, oldest first."""
