"""Kinds of randomness that must never be mixed up.

*Coins* are public: shared by all worlds, seedable, recorded, replayable. *Noise* is private: it hides the realized
vote, comes from the operating system, has no seed, and is not kept after the release. They are unrelated types: passing
coins for noise fails in the type checker and at run time. DP training has a source of its own, `DpRandomness`.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn, final

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from paclm.errors import InvalidInput, RandomnessMisuse, UnsoundState
from paclm.privacy.belief import FloatArray

_HALF_STEP = 2.0**-53
_STEP = 2.0**-52
_WEIGHT_BITS = 80
_DRAW_BITS = 128


BoolArray = npt.NDArray[np.bool_]
WordArray = npt.NDArray[np.uint64]


def _open_unit(words: WordArray) -> FloatArray:
    """Uniform on (0, 1): the upper 52 bits, at the middle of their step, so that neither 0 nor 1 occurs."""
    return (words >> 12).astype(np.float64) * _STEP + _HALF_STEP


def normals_of(words: WordArray) -> FloatArray:
    """One N(0, 1) variable per uniform word, by the inverse distribution function."""
    normals: FloatArray = ndtri(_open_unit(words))
    return normals


class Coins:
    """Public randomness for coupled decoding: fresh standard Gumbel variables at every step.

    The paper's conditions on coins, and how they are met:

    (C1) I(S; U_t | H_{t−1}) = 0: a draw is a function of the public seed and the step number alone; no method takes
         a vote, a belief or a secret.
    (C2) U_t is known before the noise is calibrated: votes cannot be formed without the array that `gumbel` returned.
    (C3) U_t is part of the history: (`seed`, step number) is public, and `Coins(seed, step)` gives the same draw again.
    """

    __slots__ = ("seed", "step")

    def __init__(self, seed: int | None = None, step: int = 0) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**128):
            raise InvalidInput(f"A seed for coins must be an integer from 0 to 2^128 − 1, not {seed!r}.")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidInput(f"A step number must be an integer ≥ 0, not {step!r}.")
        self.seed = secrets.randbits(128) if seed is None else seed
        self.step = step

    def gumbel(self, size: int) -> FloatArray:
        """The Gumbel(0, 1) variables of this step, one per candidate; the next call is the next step."""
        if size < 1:
            raise InvalidInput(f"The number of coins must be at least 1, not {size!r}.")
        generator = np.random.Philox(key=self.seed, counter=self.step << 64)  # 2^64 blocks apart: steps never overlap
        self.step += 1
        return _gumbel_of(generator.random_raw(size))

    def __repr__(self) -> str:
        return f"Coins(seed={self.seed}, step={self.step})"


def next_gumbel(coins: Sequence[Coins], size: int) -> FloatArray:
    """What `gumbel(size)` would return for each of several coins, (n, size), at a fifth of the cost. Takes no step."""
    words = np.empty((len(coins), size), dtype=np.uint64)
    generator = np.random.Philox(key=0)
    state = generator.state  # its buffer is empty: draws begin at the counter
    for row, coin in zip(words, coins, strict=True):
        state["state"]["key"] = np.frombuffer(coin.seed.to_bytes(16, "little"), dtype=np.uint64)
        state["state"]["counter"] = np.frombuffer((coin.step << 64).to_bytes(32, "little"), dtype=np.uint64)
        generator.state = state
        row[:] = generator.random_raw(size)
    return _gumbel_of(words)


def coins_of(draws: Sequence[tuple[int, int]], size: int) -> FloatArray:
    """The coins (n, size) of tokens that were voted on earlier, by seed and step number."""
    return next_gumbel([Coins(seed, step) for seed, step in draws], size)


def _gumbel_of(words: WordArray) -> FloatArray:
    gumbel: FloatArray = -np.log(-np.log(_open_unit(words)))
    return gumbel


class NoiseSource:
    """Base class of private randomness. Every draw is built on `words`, uniform 64-bit integers."""

    __slots__ = ()

    is_private = False

    def words(self, size: int) -> WordArray:
        """Uniform 64-bit integers, (size,)."""
        raise RandomnessMisuse(f"{type(self).__name__} is not a source of noise. Use paclm.Noise().")

    def standard_normal(self, size: int) -> FloatArray:
        """Independent N(0, 1) variables, (size,): 52 uniform bits through the inverse normal distribution function."""
        words = self.words(size)
        if size <= 4:  # the common case; scalars are faster
            return np.array([ndtri((word >> 12) * _STEP + _HALF_STEP) for word in words.tolist()])
        return normals_of(words)

    def choose(self, probabilities: FloatArray) -> int:
        """An index drawn from the given probabilities, by integer comparison; the work does not depend on the draw.

        Probabilities become 80-bit integers (below 2^-80 they become zero), and 128 random bits are scaled to their
        exact sum.
        """
        return self.pick([int(math.ldexp(p, _WEIGHT_BITS)) for p in probabilities.tolist()])

    def pick(self, weights: Sequence[int]) -> int:
        """An index drawn in proportion to integers; each probability is exact to 2^-128."""
        if min(weights) < 0 or sum(weights) == 0:
            raise UnsoundState(
                "Cannot choose an index: a probability is negative, or all are zero. Nothing may be released."
            )
        high, low = self.words(2).tolist()
        point = ((high << 64 | low) * sum(weights)) >> _DRAW_BITS
        return sum(running <= point for running in accumulate(weights))

    def below(self, size: int) -> int:
        """A uniform integer in 0 … size−1."""
        if size < 1:
            raise InvalidInput(f"Cannot draw an integer below {size!r}.")
        high, low = self.words(2).tolist()
        return int((high << 64 | low) * size) >> _DRAW_BITS


@final
class Noise(NoiseSource):
    """Noise for serving, from the operating system. No seed and no state, so nothing to copy or store."""

    __slots__ = ()

    is_private = True

    def words(self, size: int) -> WordArray:
        """Uniform 64-bit integers from the operating system."""
        return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)

    def __init_subclass__(cls) -> None:
        raise RandomnessMisuse(
            "paclm.Noise cannot be subclassed, because serving trusts it. Derive from NoiseSource instead."
        )

    def __reduce__(self) -> NoReturn:
        raise RandomnessMisuse("Noise cannot be pickled or copied. Create a new paclm.Noise() where it is needed.")


@final
class DpRandomness:
    """Sampling and noise of DP training, from the operating system. No seed and no state; not a source of coins."""

    __slots__ = ()

    def sample(self, num_units: int, rate: float) -> BoolArray:
        """Which units take part in a step: each independently with probability `rate`, by 64-bit integers.

        A rate below 2^-11 that is no multiple of 2^-64 is rounded down, which only lowers the privacy loss.
        """
        if not 0.0 <= rate <= 1.0:
            raise InvalidInput(f"A sampling rate must lie between 0 and 1, not {rate!r}.")
        if rate == 1.0:
            return np.ones(num_units, dtype=np.bool_)
        words = np.frombuffer(os.urandom(8 * num_units), dtype=np.uint64)
        return words < np.uint64(math.ldexp(rate, 64))

    def normals(self, size: int) -> FloatArray:
        """Independent N(0, 1) variables, (size,).

        Each is the sum of four from 52 bits each, halved. One alone takes 2^52 values with gaps between them, so that
        its lowest bits could betray the sum that it was added to.
        """
        total = np.zeros(size)
        for _ in range(4):
            total += normals_of(np.frombuffer(os.urandom(8 * size), dtype=np.uint64))
        total *= 0.5
        return total

    def __init_subclass__(cls) -> None:
        raise RandomnessMisuse("DpRandomness cannot be subclassed, because DP training trusts it.")

    def __reduce__(self) -> NoReturn:
        raise RandomnessMisuse("DpRandomness cannot be pickled or copied. Create a new one where it is needed.")


@final
class ResearchNoise(NoiseSource):
    """Seeded noise for studies. NOT PRIVATE: the seed is enough to subtract the noise from every release."""

    __slots__ = ("_generator",)

    def __init__(self, seed: int | np.random.SeedSequence) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int | np.random.SeedSequence):
            raise InvalidInput(f"Research noise needs a seed, an integer ≥ 0, not {seed!r}.")
        self._generator = np.random.PCG64(seed)

    def words(self, size: int) -> WordArray:
        """Uniform 64-bit integers from the seeded generator."""
        raw: WordArray = self._generator.random_raw(size)
        return raw


def check_noise(noise: NoiseSource) -> NoiseSource:
    """Return the source of noise; refuse anything else, such as coins, numpy generators or seeds."""
    if not isinstance(noise, NoiseSource):
        raise RandomnessMisuse(
            f"A release needs a source of noise, not {type(noise).__name__}: paclm.Noise() to serve, "
            "paclm.ResearchNoise(seed) to study. Coins are public and hide nothing."
        )
    return noise
