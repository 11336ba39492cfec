"""What an attack on played sessions is, for the regime `attacks` and for plugins (`paclm.attacks`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray, normalise


class PlayedSession(NamedTuple):
    """What an attacker may see of one session, and more than any user sees. The secret is not in it."""

    votes: IntArray  # (t, m) of all worlds: the attacker has every adapter
    released: IntArray  # (t,) tokens
    belief: FloatArray  # (m,) the curator's own at the end, as log probabilities
    release: str  # by name
    per_token: float  # b, inf where there is none


class Attack(NamedTuple):
    """A named function from a played session to a score of every world."""

    name: str
    sees: str  # which part of the session it reads, in a few words
    score: Callable[[PlayedSession, np.random.Generator], FloatArray]
    """(m,) log probabilities of the worlds, up to a constant; −inf rules a world out. Ties count as fair guesses."""

    def belief(self, session: PlayedSession, rng: np.random.Generator) -> FloatArray:
        """The scores as log probabilities (m,)."""
        scores: FloatArray = np.asarray(self.score(session, rng), dtype=np.float64)
        worlds = session.belief.shape
        if scores.shape != worlds or np.isnan(scores).any() or not np.isfinite(scores.max()):
            raise InvalidInput(
                f"The attack {self.name!r} must score {worlds[0]} worlds with numbers, at least one of them finite, "
                f"and gave shape {scores.shape}. Correct its function."
            )
        return normalise(scores)


BELIEF = Attack("belief", "the curator's own belief", lambda session, _: session.belief)
"""Bayes-optimal for who sees the whole history: no attack on these sessions is expected to do better."""
