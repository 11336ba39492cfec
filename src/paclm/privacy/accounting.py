"""The budget: what a token costs, what was spent, and when to stop. Integers throughout, so sums are exact.

One unit is 2^-60 nat. Charges round up, totals round down, and the stop rule is `spent + charge ≤ total`, so that an
account never overspends by a unit. Knows no votes and no secret: callers pass whether the worlds dissent.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from paclm.config import CHARGES, SMALLEST_PER_TOKEN, ChargeName, format_budget
from paclm.errors import BudgetExceeded, InvalidInput

UNITS_PER_NAT = 2**60


@lru_cache(maxsize=64, typed=True)
def units_up(nats: float) -> int:
    """Nats as a whole number of units, rounded up: for charges."""
    return math.ceil(_exact(nats) * UNITS_PER_NAT)


def units_down(nats: float) -> int:
    """Nats as a whole number of units, rounded down: for totals."""
    return math.floor(_exact(nats) * UNITS_PER_NAT)


@lru_cache(maxsize=64)
def nats_up(units: int) -> float:
    """The smallest float64 in nats that is at least this many units: for amounts spent or committed."""
    value = units / UNITS_PER_NAT
    return value if Fraction(value) * UNITS_PER_NAT >= units else math.nextafter(value, math.inf)


def nats_down(units: int) -> float:
    """The largest float64 in nats that is at most this many units: for per-token budgets that must fit."""
    value = units / UNITS_PER_NAT
    return value if Fraction(value) * UNITS_PER_NAT <= units else math.nextafter(value, 0.0)


def check_charge(charge: ChargeName) -> None:
    """Refuse an unknown charge rule."""
    if charge not in CHARGES:
        raise InvalidInput(f"Unknown charge {charge!r}. Choose one of: {', '.join(CHARGES)}.")


def check_per_token(per_token: float) -> float:
    """Return the per-token budget as a float: positive nats, or inf for no noise at all."""
    if isinstance(per_token, bool | str) or not float(per_token) >= SMALLEST_PER_TOKEN:
        raise InvalidInput(
            f"The per-token budget must be a positive number of nats, at least 2^-60, or inf, not {per_token!r}."
        )
    return float(per_token)


def charge_units(charge: ChargeName, per_token: float, *, reads_secret: bool, is_dissent: bool) -> int:
    """The price of one token. Known before the release: it depends on votes and settings, never on the secret.

    `every-token` always charges b. `dissent` charges only where the votes differ: elsewhere nothing can leak. A release
    that never reads the secret leaks nothing and costs nothing.
    """
    check_charge(charge)
    if not reads_secret or (charge == "dissent" and not is_dissent):
        return 0
    return units_up(per_token)


@dataclass(frozen=True, slots=True)
class Account:
    """The state of a budget. Immutable: charging returns the next state.

    Formal guarantee: on every path of charges `spent_units ≤ total_units`; so when each step's conditional information
    is at most its charge, I(S; H) ≤ E[Σ charges] ≤ total, also at a stopping time.
    """

    total_units: int
    spent_units: int = 0
    tokens: int = 0
    """Tokens released under this account."""
    dissent_tokens: int = 0
    """Of these, those on which the votes differed."""
    charged_tokens: int = 0
    """Of these, those that cost more than zero."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInput(f"{name} of an account must be an integer ≥ 0, not {value!r}.")
        if self.spent_units > self.total_units:
            raise InvalidInput(f"An account cannot have spent {self.spent_units} of {self.total_units} units.")
        if not max(self.dissent_tokens, self.charged_tokens) <= self.tokens:
            raise InvalidInput(
                f"An account of {self.tokens} tokens cannot have {self.dissent_tokens} dissenting and "
                f"{self.charged_tokens} charged ones."
            )

    @classmethod
    def open(cls, total: float) -> Account:
        """A new account over a committed total in nats, rounded down."""
        return cls(units_down(total))

    @property
    def spent_nats(self) -> float:
        """Nats charged so far, rounded up. Not a guarantee: bounds are stated at the total."""
        return nats_up(self.spent_units)

    @property
    def total_nats(self) -> float:
        """Nats committed, rounded up."""
        return nats_up(self.total_units)

    @property
    def remaining_units(self) -> int:
        """Units left."""
        return self.total_units - self.spent_units

    def remaining_tokens(self, per_token: float) -> int:
        """How many more tokens fit at this per-token budget."""
        return self.remaining_units // units_up(per_token)

    def coarse(self, parts: int) -> Account:
        """The spend alone, rounded up to so many parts of the total."""
        part = -(-self.spent_units * parts // self.total_units) if self.total_units else 0
        return Account(self.total_units, -(-part * self.total_units // parts))

    def affords(self, units: int) -> bool:
        """The stop rule: spent + charge ≤ total."""
        return self.spent_units + units <= self.total_units

    def charge(self, units: int, *, is_dissent: bool) -> Account:
        """The account after one more token; raises `BudgetExceeded` rather than overspend."""
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise InvalidInput(f"A charge must be an integer number of units ≥ 0, not {units!r}.")
        if not self.affords(units):
            raise BudgetExceeded(
                f"The next token costs {format_budget(nats_up(units))} nats, and after {self.tokens:,} tokens "
                f"{format_budget(nats_up(self.remaining_units))} of {format_budget(self.total_nats)} are left. "
                "Extend the total, lower the per-token budget, or fall back to the public model."
            )
        return dataclasses.replace(
            self,
            spent_units=self.spent_units + units,
            tokens=self.tokens + 1,
            dissent_tokens=self.dissent_tokens + is_dissent,
            charged_tokens=self.charged_tokens + (units > 0),
        )


def _exact(nats: float) -> Fraction:
    if isinstance(nats, bool | str) or not 0.0 < nats < math.inf:
        raise InvalidInput(f"A budget must be a positive, finite number of nats, not {nats!r}.")
    return Fraction(nats)
