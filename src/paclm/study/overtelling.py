"""Whether a release tells more than it may: than it was charged for, than it declares, or its world too often.

Meant for releases of one's own: those that may be deployed are proven, and stay silent here. Four looks at what is
left of independent secrets; if nothing is wrong, any of them raises an alarm at most once in 10,000 runs (RATE). Sees
beliefs and tokens, no code: a release that tells little and hides it from its own belief may go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import rel_entr

from paclm.privacy.arrays import FloatArray, IntArray
from paclm.study.violations import ENOUGH, is_violation, p_of_hits, p_of_mean

RATE = 1e-4
LOOKS = 4
_ROUNDING = 1e-9

_HEADS = {
    "budget": "tells more than it was charged for",
    "declared": "tells more than its steps declare",
    "world_id_bound": "lets its world be named more often than its bound allows",
}
"""What can be broken, by the name that figures have for it."""


class Told(NamedTuple):
    """What is left of n secrets; in nats, each about one of them."""

    leaked: FloatArray  # (n,) by the belief's entropy
    declared: FloatArray  # (n,) Σ of what the steps say of themselves
    budget: FloatArray  # (n,) b for every token on which worlds differ: where they agree, nothing can be told
    named: FloatArray  # (n,) the chance that the belief's most likely world is the secret
    agreeing: FloatArray  # (n,) the same of the world that agreed most often with the released tokens
    num_worlds: int
    world_id_bound: float

    @property
    def world_id_rate(self) -> float:
        """Of the better of both attacks."""
        return float(max(self.named.mean(), self.agreeing.mean()))


def broken_bounds(told: Told) -> list[str]:
    """Which of `budget`, `declared` and `world_id_bound` the release exceeds by more than chance; mostly none."""
    if not np.isfinite(told.budget).all():  # without noise there is no bound to break
        return []
    most = math.log(told.num_worlds)  # no belief tells more: excesses below are shares of it
    n, found = told.leaked.size, []
    admits = told.declared.mean() > told.budget.mean() * (1.0 + _ROUNDING)
    if admits or _is_alarm(_p_of_leak(told.leaked / most, told.budget / most)):
        found.append("budget")
    # What is declared follows the noise, so that only its own spread, paired, says how much chance does.
    is_paired = n >= ENOUGH and bool(np.isfinite(told.declared).all())
    if is_paired and _is_alarm(p_of_mean((told.leaked - told.declared) / most, 0.0)):
        found.append("declared")
    hits = (math.floor(chances.sum()) for chances in (told.named, told.agreeing))
    if any(_is_alarm(p_of_hits(count, n, told.world_id_bound)) for count in hits):
        found.append("world_id_bound")
    return found


def _p_of_leak(shares: FloatArray, allowed: FloatArray) -> float:
    """How likely such leaks are when each is expected within what is allowed, which no noise moves; (n,) of log m.

    Too few to believe their spread: Hoeffding's exp(−n·KL(mean ‖ allowed)), sharp where little is allowed.
    """
    if shares.size >= ENOUGH:
        return p_of_mean(shares - allowed, 0.0)
    mean, bound = min(1.0, float(shares.mean())), float(allowed.mean()) + _ROUNDING
    if mean <= bound:
        return 1.0
    return math.exp(-shares.size * float(rel_entr(mean, bound) + rel_entr(1.0 - mean, 1.0 - bound)))


def chance_by_agreement(votes: IntArray, released: IntArray, secret: int) -> float:
    """Whether the world that agreed most often is the realized one; votes (t, m), tokens (t,); ties as a fair guess.

    Reads tokens alone: it finds a world whose own belief was never told of it.
    """
    agreement = (votes == released[:, None]).sum(axis=0)  # (m,)
    is_top = agreement == agreement.max()
    return float(is_top[secret] / is_top.sum())


def describe_overtelling(
    name: str,
    broken: Sequence[str],
    *,
    leaked: float,
    stderr: float | None,
    declared: float,
    budget: float,
    rate: float,
    bound: float,
    unit: str,
) -> str:
    """What is wrong with a release, in nats per unit, and what of it."""
    error = "" if stderr is None or math.isnan(stderr) else f" ± {stderr:.2g}"
    return (
        f"The release {name} {_and([_HEADS[what] for what in broken])}: an estimated {leaked:.4g}{error} nats "
        f"{unit}, where its budget allows {budget:.4g} and its steps declare {declared:.4g}; its world is named in "
        f"{rate:.4f}, where {bound:.4f} is the bound. Chance says so at most once in {1.0 / RATE:,.0f} runs: it tells "
        "too much, declares too little, or its belief is not exact Bayes for what it releases. Trust no bound of it."
    )


def _and(phrases: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))


def _is_alarm(p: float) -> bool:
    return is_violation(p, LOOKS, RATE)
