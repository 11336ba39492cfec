"""Whether an attack beats its bound by more than chance, when many cells are looked at.

Each p-value is one-sided and right at the edge of the bound, so it errs on the side of silence inside it. A cell is a
violation when its p-value is under FALSE_ALARMS ÷ looks: if no bound is broken, the chance that any of all the looks
raises an alarm is at most FALSE_ALARMS, however the cells hang together (Bonferroni).
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from paclm.privacy.arrays import FloatArray

FALSE_ALARMS = 0.01
ENOUGH = 30
"""Samples from which their own spread is believed."""


def p_of_hits(hits: int, trials: int, bound: float) -> float:
    """How likely so many successes, or more, are in independent trials that succeed with the bound's probability."""
    return float(stats.binom.sf(hits - 1, trials, bound))


def p_of_mean(samples: FloatArray, bound: float) -> float:
    """How likely so large a mean of independent samples in [0, 1] is, at most, when the true one is the bound.

    Student's t, and Hoeffding's inequality where it cannot be trusted: for fewer than 30 samples, or equal ones.
    """
    excess, n = float(samples.mean()) - bound, len(samples)
    spread = float(samples.std(ddof=1)) if n >= ENOUGH else 0.0
    if spread < 1e-12:
        return math.exp(-2.0 * n * max(excess, 0.0) ** 2)
    return float(stats.t.sf(excess * math.sqrt(n) / spread, n - 1))


def break_ties(shares: FloatArray, rng: np.random.Generator) -> int:
    """How many trials succeed when one with a tie succeeds with its share: (n,) in [0, 1] → a count."""
    return int((rng.random(len(shares)) < shares).sum())


def is_violation(p: float, looks: int) -> bool:
    """After all looks are allowed for."""
    return p < FALSE_ALARMS / looks
