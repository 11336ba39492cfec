"""Whether an attack beats its bound by more than chance, when many cells are looked at.

Each p-value is one-sided and right at the edge of the bound, so it errs on the side of silence inside it. A cell is a
violation when its p-value is under FALSE_ALARMS ÷ looks: if no bound is broken, the chance that any of all the looks
raises an alarm is at most FALSE_ALARMS, however the cells hang together (Bonferroni). For counts that is exact; for
means it rests on Student's t, which is too loud where samples are mostly a little above their mean and rarely far below
it. `overtelling` has bounds that assume no shape, and see less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from paclm.privacy.belief import FloatArray
from paclm.study.results import Row

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


def excess_in_errors(row: Row, attack: str) -> float:
    """By how many standard errors an attack (`membership`, `world`) of a row is above its bound; negative below it."""
    excess, error = row[f"{attack}_rate"] - row[f"{attack}_bound"], row[f"{attack}_stderr"]
    return float(excess / error) if error else math.copysign(math.inf, excess)


def describe_excess(rows: Sequence[Row]) -> str:
    """One sentence about both attacks in rows whose samples are sessions: how far above a bound, and what of it."""
    looks = [(excess_in_errors(row, attack), attack, row) for row in rows for attack in ("membership", "world")]
    largest, attack, row = max(looks, key=lambda look: look[0])
    if largest <= 0.0:
        return f"No attack is above its bound in any of {len(looks)} looks (two attacks in {len(rows)} cells)."
    broken = [look for look in looks if is_violation(_p_of_row(look[2], look[1]), len(looks))]
    if broken:
        largest, attack, row = max(broken, key=lambda look: look[0])
    told = (
        f"{largest:.1f} standard errors over {row['sessions']:,} sessions ({attack} at {row['budget']} and "
        f"{row['horizon']:,} tokens)"
    )
    if broken:
        return (
            f"AN ATTACK IS ABOVE ITS BOUND by {told}. Chance does not explain this: the mechanism or the measurement "
            "is at fault."
        )
    above = sum(look[0] > 0.0 for look in looks)
    verdict = "too few to say more" if row["sessions"] < ENOUGH else "as chance allows in so many looks"
    return f"Attacks are above their bounds in {above} of {len(looks)} looks, by {told} at most: {verdict}."


def _p_of_row(row: Row, attack: str) -> float:
    """One-sided, from a row's mean and error; worlds are named or not, so they are counted."""
    n, bound = row["sessions"], row[f"{attack}_bound"]
    if attack == "world":
        return p_of_hits(math.floor(row["world_rate"] * n), n, bound)
    if not row["membership_stderr"]:
        return p_of_mean(np.full(n, row["membership_rate"]), bound)
    return float(stats.t.sf(excess_in_errors(row, attack), n - 1))


def is_violation(p: float, looks: int, false_alarms: float = FALSE_ALARMS) -> bool:
    """After all looks are allowed for."""
    return p < false_alarms / looks
