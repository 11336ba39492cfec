"""Budget planning: any two of target success, tokens and per-token budget give the third, rounded to the safe side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from paclm.config import ChargeName
from paclm.errors import InvalidInput
from paclm.privacy.accounting import check_charge, check_per_token, nats_down, nats_up, units_down, units_up
from paclm.privacy.belief import check_num_worlds
from paclm.privacy.bounds import nats_for, success_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A budget that fits, and the bounds it proves."""

    tokens: int
    """Tokens the total affords; under `dissent` an expectation at the given rate, not a promise."""
    per_token_nats: float
    total_nats: float
    """The total to commit; the bounds are stated at this value."""
    mia_bound: float
    """Bound on any attack on whether a record was in the secretly drawn half."""
    world_id_bound: float
    """Bound on any attack on the identity of the realized world."""
    charge: ChargeName
    days: float | None
    """How long the tokens last at the given rate."""


def plan(
    *,
    mia: float | None = None,
    tokens: int | None = None,
    per_token: float | None = None,
    prior: float = 0.5,
    num_worlds: int = 128,
    charge: ChargeName = "every-token",
    dissent_rate: float = 1.0,
    tokens_per_day: float | None = None,
) -> Plan:
    """Compute the missing one of target success, tokens and per-token budget.

    `dissent_rate` is the share of tokens on which worlds differ; for the charge `dissent` only. 1 is the worst case.
    """
    num_worlds = check_num_worlds(num_worlds)
    rate = _charged_share(charge, dissent_rate)
    if tokens is not None and tokens < 1:
        raise InvalidInput(f"The number of tokens must be at least 1, not {tokens!r}.")
    if tokens_per_day is not None and not tokens_per_day > 0:
        raise InvalidInput(f"The rate must be a positive number of tokens per day, not {tokens_per_day!r}.")

    if mia is None and tokens is not None and per_token is not None:
        charge_units = units_up(check_per_token(per_token))
        charged = math.ceil(tokens * rate)
    elif per_token is None and mia is not None and tokens is not None:
        charged = math.ceil(tokens * rate)
        per_token = _largest_per_token(mia, prior, charged)
        charge_units = units_up(per_token)
    elif tokens is None and mia is not None and per_token is not None:
        charge_units = units_up(check_per_token(per_token))
        charged = _units_for(mia, prior) // charge_units
        if charged == 0:
            raise InvalidInput(
                f"No token fits: {per_token!r} nats is more than a success of {mia!r} allows. Lower the per-token "
                "budget, or allow a larger success."
            )
        tokens = math.floor(charged / rate)
    else:
        raise InvalidInput(
            "A plan needs exactly two of: the target success (mia), the tokens, the per-token budget. For example: "
            "paclm plan --mia 51% --tokens 1000000"
        )
    total = nats_up(charged * charge_units)
    return Plan(
        tokens=tokens,
        per_token_nats=per_token,
        total_nats=total,
        mia_bound=success_bound(total, prior),
        world_id_bound=success_bound(total, 1.0 / num_worlds),
        charge=charge,
        days=None if tokens_per_day is None else tokens / tokens_per_day,
    )


def _charged_share(charge: ChargeName, dissent_rate: float) -> Fraction:
    check_charge(charge)
    if not 0.0 < dissent_rate <= 1.0:
        raise InvalidInput(f"The dissent rate must be above 0 and at most 1, not {dissent_rate!r}.")
    return Fraction(dissent_rate) if charge == "dissent" else Fraction(1)


def _largest_per_token(mia: float, prior: float, charged: int) -> float:
    units = _units_for(mia, prior) // charged
    if units == 0:
        raise InvalidInput(
            f"{charged:,} charges at a success of {mia!r} are below 2^-60 nats each. Plan for fewer tokens."
        )
    return nats_down(units)


def _units_for(mia: float, prior: float) -> int:
    nats = nats_for(mia, prior)
    if nats <= 0.0:
        raise InvalidInput(
            f"A target success of {mia!r} equals the prior: no budget is left to spend. Choose a larger target."
        )
    return units_down(nats)
