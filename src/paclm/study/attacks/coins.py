"""An attack that reads only the coins, and nothing that was released.

Coins are public and must be independent of the secret (condition C1 of `Coins`). If they are not, belief and ledger
cannot notice, because both take the coins as given. This attacker learns, on sessions whose secret is known, how public
numbers computed from coins depend on the secret, and guesses it on other sessions. With sound coins one guess in m is
right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from paclm.privacy.belief import FloatArray, IntArray


class CoinsAttack(NamedTuple):
    """Result of the guesses."""

    right: int
    guesses: int
    prior: float  # chance of a blind guess, 1/m
    chance: float  # probability that blind guesses are right as often or more: small means that the coins leak


def attack_coins(seen: FloatArray, secrets: IntArray, num_worlds: int) -> CoinsAttack:
    """Learn on the first half of the sessions, guess on the second: the world whose mean is nearest to what is seen.

    seen: (sessions, d) any numbers that follow from public coins and known adapters alone: the coins themselves, or
    how often each world voted with the others. secrets: (sessions,), drawn uniformly.
    """
    half = len(seen) // 2
    known, own = seen[:half], secrets[:half]
    worlds = np.unique(own)
    means = np.stack([known[own == world].mean(axis=0) for world in worlds])  # (w, d)
    spread = known.std(axis=0)
    scale = np.where(spread > 0.0, spread, 1.0)
    far = (((seen[half:, None] - means) / scale) ** 2).sum(axis=2)  # (rest, w)
    right = int((worlds[far.argmin(axis=1)] == secrets[half:]).sum())
    guesses, prior = len(seen) - half, 1.0 / num_worlds
    return CoinsAttack(right, guesses, prior, float(binom.sf(right - 1, guesses, prior)))
