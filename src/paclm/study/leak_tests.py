"""Whether a release tells more than it may: than it was charged for, declares or believes, or its world too often.

Meant for releases of one's own: those that may be deployed are proven, and stay silent here. Six looks at what is
left of independent secrets; if nothing is wrong, the chance that any of them raises an alarm is at most RATE. Each
p-value is a bound that holds for any number of secrets and any spread of what they tell; no normal law is assumed, so
small excesses of few secrets go unnoticed. Sees beliefs and tokens, no code: what a release hides from its own belief
is found only where its tokens agree with its world more often than with others; a code of another kind goes unnoticed.
Of single tokens (`fresh`) only the sum of what they declare is known, and it is taken to follow from the votes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, rel_entr

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import leak_samples_by_entropy
from paclm.study.attacks.belief import chance_to_name
from paclm.study.violations import is_violation

RATE = 1e-4
LOOKS = 6
_ROUNDING = 1e-9
_STAKES = 2.0 ** -np.arange(8)  # of all that a bet may risk
_LOOKED_AT = 512  # beliefs of a stream
_TILTS = 2.0 ** np.arange(-4, 17)  # from leaks of nats, a thousand secrets, to leaks of 2^-32

_HEADS = {
    "budget": "tells more than it was charged for",
    "declared": "tells more than its steps declare",
    "belief": "tells more than its belief knows of",
    "world_id_bound": "lets its world be named more often than its bound allows",
}
"""What can be broken, by the name that figures have for it."""


class Gap(NamedTuple):
    """What lies between the two estimates of the leak, and what chance allows; of several streams both add up."""

    nats: float
    cumulants: FloatArray  # (tilts,) Σ over beliefs of log E exp(tilt · gap)

    @classmethod
    def between(cls, beliefs: FloatArray, secrets: IntArray) -> Gap:
        """Of beliefs (n, m) about secrets (n,); of many the first ones, which is as fair a look and cheaper.

        If a belief is exact, the secret is a draw from it, whatever was released: the law of the gap is known.
        """
        beliefs, secrets = beliefs[:_LOOKED_AT], secrets[:_LOOKED_AT]
        gaps = (
            beliefs + math.log(beliefs.shape[1]) - leak_samples_by_entropy(beliefs)[:, None]
        )  # (n, m), were it that world
        found = float(gaps[np.arange(len(secrets)), secrets].sum())
        return cls(found, np.array([logsumexp(beliefs + tilt * gaps, axis=1).sum() for tilt in _TILTS]))

    @classmethod
    def of_all(cls, gaps: Sequence[Gap]) -> Gap:
        """Of all streams."""
        return cls(sum(gap.nats for gap in gaps), np.sum([gap.cumulants for gap in gaps], axis=0))


class Told(NamedTuple):
    """What is left of n secrets; in nats, each about one of them."""

    leaked: FloatArray  # (n,) by the belief's entropy
    gap: Gap
    declared: FloatArray  # (n,) Σ of what the steps say of themselves
    budget: FloatArray  # (n,) b for every token on which worlds differ: where they agree, nothing can be told
    named: FloatArray  # (n,) the chance that the belief's most likely world is the secret
    agreeing: FloatArray  # (n,) the same of the world that agreed most often with the released tokens
    known: FloatArray  # (n,) what the belief gives to its likeliest world: if exact, no guess is right more often
    world_id_bound: float

    @property
    def world_id_rate(self) -> float:
        """Of the better of both attacks."""
        return float(max(self.named.mean(), self.agreeing.mean()))


def broken_bounds(told: Told, runs: int = 1) -> list[str]:
    """Which of `budget`, `declared`, `belief` and `world_id_bound` the release exceeds by more than chance.

    Mostly none. RATE is shared by so many runs of the release as are told of together.
    """
    if not np.isfinite(told.budget).all():  # without noise there is no bound to break
        return []

    def is_alarm(p: float) -> bool:
        return is_violation(p, LOOKS * runs, RATE)

    found = []
    most = float(told.budget.max()) + _ROUNDING
    mean_declared, mean_budget = float(told.declared.mean()), float(told.budget.mean())
    admits = mean_declared > mean_budget * (1.0 + _ROUNDING) or float(told.declared.max()) > most
    if admits or is_alarm(_p_of_excess(told.leaked - told.budget, most)):
        found.append("budget")
    if not admits and is_alarm(_p_of_excess(told.leaked - told.declared, most)):
        found.append("declared")
    if is_alarm(_p_of_gap(told.gap)) or is_alarm(_p_of_excess(told.agreeing - told.known, 1.0)):
        found.append("belief")
    if any(is_alarm(_p_of_chances(chances, told.world_id_bound)) for chances in (told.named, told.agreeing)):
        found.append("world_id_bound")
    return found


def _p_of_gap(gap: Gap) -> float:
    """How likely, at most, secrets are known so much better than their beliefs say (Chernoff)."""
    return 1.0 if gap.nats <= 0.0 else math.exp(min(0.0, float((gap.cumulants - _TILTS * gap.nats).min())))


def _p_of_excess(excess: FloatArray, most: float) -> float:
    """How likely, at most, such excesses (n,) are, none under −most, when none is expected above 0.

    A fair game multiplies a stake by 1 + share · excess ÷ most for each secret and seldom makes a fortune: the chance
    to end with k times the stake is 1/k at most (Markov). Nothing is asked of the spread, nor of rare, large leaks.
    """
    factors = 1.0 + _STAKES[:, None] * (excess / most)  # (stakes, n)
    with np.errstate(divide="ignore"):  # all of a stake may be lost
        fortunes = np.log(np.maximum(factors, 0.0)).sum(axis=1)  # (stakes,)
    return math.exp(min(0.0, math.log(_STAKES.size) - float(logsumexp(fortunes))))


def _p_of_chances(chances: FloatArray, bound: float) -> float:
    """How likely, at most, so large a mean in [0, 1] is: Hoeffding's exp(−n·KL(mean ‖ bound)); (n,)."""
    mean = min(1.0, float(chances.mean()))
    if mean <= bound:
        return 1.0
    return math.exp(-chances.size * float(rel_entr(mean, bound) + rel_entr(1.0 - mean, 1.0 - bound)))


def chances_by_agreement(votes: IntArray, released: IntArray, secrets: IntArray) -> FloatArray:
    """Whether the world that agreed most often is the realized one, (n,); ties as a fair guess.

    Votes (n · t, m) and tokens (n · t,) of n secrets with t tokens each. Reads tokens alone: it finds a world whose own
    belief was never told of it.
    """
    agrees = (votes == released[:, None]).reshape(len(secrets), -1, votes.shape[1])  # (n, t, m)
    return chance_to_name(agrees.sum(axis=1, dtype=np.float64), secrets)


def describe_overtelling(
    name: str,
    broken: Sequence[str],
    *,
    leaked: float,
    stderr: float | None,
    by_truth: float,
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
        f"{unit} by its belief and {by_truth:.4g} by its secrets, where its budget allows {budget:.4g} and its steps "
        f"declare {declared:.4g}; its world is named in {rate:.4f}, where {bound:.4f} is the bound. Chance says so at "
        f"most once in {1.0 / RATE:,.0f} runs: it tells too much, declares too little, or its belief is not exact "
        "Bayes for what it releases. Trust no bound of it."
    )


def _and(phrases: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
