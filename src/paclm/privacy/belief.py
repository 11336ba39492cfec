"""The belief over worlds, the votes collapsed under it, and its update by Bayes' rule.

The belief is the exact posterior over worlds given everything released so far (`prop:coupled` (iii)): what an adversary
who saw the whole history would compute. It is stored as natural logarithms in float64. This file does not know how a
token is chosen, nor where likelihoods come from.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput, UnsoundState

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

SUM_TOLERANCE = 1e-12
"""How far a belief may be from summing to one before it is refused. Updates renormalise, so drift stays near 1e-15."""

SAFE_MASS = 1e-280
"""Below this a sum of probabilities has lost digits to underflow, and the update works in log space throughout."""

IN_ONE_SUM = 512
"""Worlds whose probabilities are added one after another. Each addition may round the same way, by 2^-53: 512 of them
lose at most 2^-44, and the blocks of 65,536 worlds a little more."""


class Release(NamedTuple):
    """One released token with the next belief and diagnostics. Only `token` may leave the curator."""

    token: int
    belief: FloatArray  # (m,) log probabilities after the release
    is_dissent: bool
    information: float = 0.0
    """The most nats this token can leak about the secret, given the history: at most b, and 0 without dissent."""
    noise_scale: float = 0.0
    """σ, the largest standard deviation of the noise; 0 where none was drawn."""

    def __repr__(self) -> str:
        return f"Release(token={self.token}, is_dissent={self.is_dissent})"  # the belief is private: never printed


class Tally(NamedTuple):
    """The votes of m worlds collapsed onto the a distinct ones."""

    candidates: IntArray  # (a,) the distinct votes, ascending, so that ties go to the smaller token
    choice: IntArray  # (m,) which candidate each world chose
    mass: FloatArray  # (a,) the belief behind each candidate


def check_num_worlds(num_worlds: int) -> int:
    """Return the number of worlds as an int: even, because every record is in exactly half of them, and at least 2."""
    if isinstance(num_worlds, bool) or int(num_worlds) != num_worlds or num_worlds < 2 or num_worlds % 2:
        raise InvalidInput(f"The number of worlds must be even and at least 2, not {num_worlds!r}.")
    return int(num_worlds)


def check_votes(votes: npt.ArrayLike) -> IntArray:
    """Return the votes as an integer array (m,)."""
    array = np.asarray(votes)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInput(f"Votes must be one integer per world, not {array.dtype} with shape {array.shape}.")
    check_num_worlds(array.size)
    return array


def check_belief(belief: npt.ArrayLike, num_worlds: int | None = None) -> FloatArray:
    """Return the belief as a float64 array (m,) of log probabilities that sum to one; −inf is a world ruled out."""
    array = np.asarray(belief, dtype=np.float64)
    if array.ndim != 1 or (num_worlds is not None and array.size != num_worlds):
        expected = "one number per world" if num_worlds is None else f"shape ({num_worlds},)"
        raise InvalidInput(f"The belief must have {expected}, not shape {array.shape}.")
    check_num_worlds(array.size)
    total = float(np.exp(array).sum())  # NaN or inf if the belief holds one
    if not abs(total - 1.0) <= SUM_TOLERANCE:
        if not math.isfinite(total):
            raise UnsoundState("The belief holds NaN or +inf. Nothing may be released from it.")
        raise UnsoundState(
            f"The belief sums to {total!r} instead of 1. It holds natural logarithms: start from log(1/m) each "
            "and pass on what the last release returned."
        )
    return array


def check_beliefs(beliefs: npt.ArrayLike) -> FloatArray:
    """Return the beliefs of several sessions as a float64 array (n, m); every row must pass `check_belief`."""
    table = np.asarray(beliefs, dtype=np.float64)
    if table.ndim != 2:
        raise InvalidInput(f"Beliefs must have one row per session, not shape {table.shape}.")
    check_num_worlds(table.shape[1])
    totals = np.exp(table).sum(axis=1)  # (n,), NaN or inf where the row holds one
    for row in np.flatnonzero(~(np.abs(totals - 1.0) <= SUM_TOLERANCE)):
        check_belief(table[row])  # raises, with the reason
    return table


def is_unanimous(votes: IntArray) -> bool:
    """Whether all worlds voted alike, including worlds whose belief has become tiny."""
    return votes.tobytes() == votes[:1].tobytes() * votes.size  # one memory comparison: this is the common case


def tally(votes: IntArray, belief: FloatArray) -> Tally:
    """Collapse the votes of all worlds onto the distinct ones."""
    if is_unanimous(votes):
        return Tally(votes[:1], np.zeros(votes.size, np.intp), np.ones(1))
    candidates = np.array(sorted(set(votes.tolist())), dtype=votes.dtype)  # another type would compare as floats
    choice = candidates.searchsorted(votes)
    if votes.size > IN_ONE_SUM:
        return Tally(candidates, choice, _sum_in_blocks(choice, np.exp(belief), candidates.size))
    mass: FloatArray = np.bincount(choice, np.exp(belief))  # type: ignore[assignment]
    return Tally(candidates, choice, mass)


def _sum_in_blocks(choice: IntArray, weights: FloatArray, size: int) -> FloatArray:
    """The weights behind each of `size` candidates, (a,), summed within blocks of worlds and then over the blocks."""
    block = np.arange(choice.size) // IN_ONE_SUM
    sums: FloatArray = np.bincount(block * size + choice, weights, (int(block[-1]) + 1) * size)  # type: ignore[assignment]
    total: FloatArray = sums.reshape(-1, size).sum(axis=0)
    return total


def uniform_belief(num_worlds: int) -> FloatArray:
    """The prior: every world equally likely."""
    return np.full(check_num_worlds(num_worlds), -math.log(num_worlds))


def update_belief(belief: FloatArray, choice: IntArray, log_likelihood: FloatArray, mass: FloatArray) -> FloatArray:
    """Bayes' rule where the likelihood of a world depends on its vote alone.

    `choice` (m,) is which of the a distinct votes each world cast, `log_likelihood` (a,) that of each vote, `mass` (a,)
    the belief behind each. The normaliser is a sum over the a votes, divided by the mass actually there, so rounding
    does not accumulate.
    """
    values = log_likelihood.tolist()  # nearly always two or three: plain floats are faster than array calls
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
    """Shift log weights so that they sum to one; refuse NaN, +inf, and weights that are all zero."""
    top = log_weights.max()
    if not np.isfinite(top):
        raise UnsoundState("The belief rules out every world, or holds NaN or +inf. Nothing may be released from it.")
    shifted: FloatArray = log_weights - top
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


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
