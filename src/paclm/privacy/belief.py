"""The belief: the posterior over worlds given everything released so far, as natural logarithms in float64.

It is exact Bayes (`prop:coupled` (iii)): what an adversary who saw the whole history would believe. This file knows
nothing of where likelihoods come from.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy.arrays import BoolArray, FloatArray, IntArray, check_belief, check_num_worlds

SAFE_MASS = 1e-280
"""Below this a sum of probabilities has lost digits to underflow, and the update shifts to log space throughout."""


def uniform_belief(num_worlds: int) -> FloatArray:
    """The prior: every world equally likely."""
    return np.full(check_num_worlds(num_worlds), -math.log(num_worlds))


def update_belief(belief: FloatArray, choice: IntArray, log_likelihood: FloatArray, mass: FloatArray) -> FloatArray:
    """Bayes' rule when the likelihood of a world depends on its vote alone.

    `choice` (m,) says which of the a distinct votes each world cast, `log_likelihood` (a,) is that of each vote and
    `mass` (a,) the belief behind each. The normaliser is taken over the a votes and divides by the mass actually
    there, so rounding never accumulates.
    """
    values = log_likelihood.tolist()  # two or three of them nearly always: plain floats beat array calls there
    top = max(values)
    if top > -math.inf:
        evidence = 0.0
        for weight, value in zip(mass.tolist(), values, strict=True):
            evidence += weight * math.exp(value - top)
        if evidence > SAFE_MASS:
            after: FloatArray = belief + (log_likelihood - (top + math.log(evidence)))[choice]
            return after
    return normalise(belief + log_likelihood[choice])


def normalise(log_weights: FloatArray) -> FloatArray:
    """Shift log weights so that they sum to one; refuse when nothing is left or a number is not one."""
    top = log_weights.max()
    if not np.isfinite(top):
        raise UnsoundState(
            "The belief has no world left, or holds a number that is NaN or +inf. Nothing may be released."
        )
    shifted: FloatArray = log_weights - top
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


def entropy(belief: npt.ArrayLike) -> float:
    """Shannon entropy of the belief in nats."""
    log_p = check_belief(belief)
    p = np.exp(log_p)
    return max(0.0, -float(p @ np.where(p > 0.0, log_p, 0.0)))


def membership_probabilities(belief: npt.ArrayLike, membership: npt.ArrayLike) -> FloatArray:
    """Each record's probability of being in the realized world: the belief summed over the worlds that hold it.

    `membership` is (records, worlds) bool, as made by `paclm.assign_worlds`.
    """
    log_p = check_belief(belief)
    table: BoolArray = np.asarray(membership)
    if table.ndim != 2 or table.dtype != np.bool_ or table.shape[1] != log_p.size:
        raise InvalidInput(
            f"Membership must be a bool array (records, {log_p.size}), not {table.dtype} with shape {table.shape}."
        )
    probabilities: FloatArray = np.minimum(table @ np.exp(log_p), 1.0)
    return probabilities
