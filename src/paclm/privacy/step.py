"""What every release shares: the collapse of m votes onto the distinct ones, and the shape of a step's result."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paclm.privacy import arrays
from paclm.privacy.arrays import FloatArray, IntArray
from paclm.privacy.randomness import NoiseSource, check_noise

IN_ONE_SUM = 512
"""Worlds whose beliefs are added up one after another. Each addition may round the same way, by 2^-53: 512 of them lose
2^-44 at most, and as many blocks as 65,536 worlds make a little more."""


class Step(NamedTuple):
    """One released token and everything the curator carries on. Only `token` may leave the curator."""

    token: int
    belief: FloatArray  # (m,) log probabilities after the release
    is_dissent: bool
    information: float = 0.0
    """The nats this step can have told about the secret, given the history: at most b, and 0 without dissent."""
    noise_scale: float = 0.0
    """σ, the largest standard deviation of the noise; 0 where none was drawn."""

    def __repr__(self) -> str:
        return f"Step(token={self.token}, is_dissent={self.is_dissent})"  # a belief is sealed: it is not for printing


class Release(Protocol):
    """Votes, belief, secret, budget and noise in; one token and the next belief out. Pure but for the noise drawn."""

    def __call__(
        self, votes: IntArray, belief: FloatArray, secret: int, per_token: float, noise: NoiseSource
    ) -> Step: ...


def checked(
    release: Release,
    votes: npt.ArrayLike,
    belief: npt.ArrayLike,
    secret: int,
    per_token: float,
    noise: NoiseSource,
) -> Step:
    """Any release, behind checks of everything it is given: the door for callers that this package does not know."""
    votes = arrays.check_votes(votes)
    return release(
        votes,
        arrays.check_belief(belief, votes.size),
        arrays.check_secret(secret, votes.size),
        arrays.check_per_token(per_token),
        check_noise(noise),
    )


class Tally(NamedTuple):
    """The votes collapsed onto the a distinct ones."""

    candidates: IntArray  # (a,) the distinct votes, ascending: a tie between them goes to the smaller token
    choice: IntArray  # (m,) which candidate each world chose
    mass: FloatArray  # (a,) the belief behind each candidate


def is_unanimous(votes: IntArray) -> bool:
    """Whether all worlds voted alike, also those whose belief has become tiny."""
    # One memory comparison: the common case must cost nothing.
    return votes.tobytes() == votes[:1].tobytes() * votes.size


def tally(votes: IntArray, belief: FloatArray) -> Tally:
    """Collapse the votes of all worlds onto the distinct ones."""
    candidates = np.array(sorted(set(votes.tolist())), dtype=votes.dtype)  # another type would compare as floats
    choice = candidates.searchsorted(votes)
    if votes.size > IN_ONE_SUM:
        return Tally(candidates, choice, _sum_in_blocks(choice, np.exp(belief), candidates.size))
    mass: FloatArray = np.bincount(choice, np.exp(belief))  # type: ignore[assignment]
    return Tally(candidates, choice, mass)


def _sum_in_blocks(choice: IntArray, weights: FloatArray, size: int) -> FloatArray:
    """The weights behind each of `size` candidates, (a,), added up in blocks of worlds and then over the blocks."""
    block = np.arange(choice.size) // IN_ONE_SUM
    sums: FloatArray = np.bincount(block * size + choice, weights, (int(block[-1]) + 1) * size)  # type: ignore[assignment]
    total: FloatArray = sums.reshape(-1, size).sum(axis=0)
    return total
