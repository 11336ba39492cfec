"""Is a record in the universe? Scores for an attacker who holds all adapters, but not who is in which world.

The guarantee is silent about this: it hides which world was realized, from someone who may know the universe. Every
score is higher for likelier members.
"""

from __future__ import annotations

import math

import numpy as np

from paclm.privacy.belief import FloatArray

LOWEST = 0.2
"""The share of least likely tokens that min-k looks at."""


def informed_scores(log_probability: FloatArray) -> dict[str, float]:
    """Scores of one record from the log probabilities of its tokens, (worlds and the public model last, n).

    loss: how likely the worlds find it. reference: how much likelier than the public model. min-k: how likely its
    least likely tokens are. spread: how much the worlds differ, because half of them saw a member and half did not.
    """
    worlds, public = log_probability[:-1], log_probability[-1]
    tokens = worlds.mean(axis=0)  # (n,)
    count = max(1, math.ceil(LOWEST * tokens.size))
    return {
        "loss": float(tokens.mean()),
        "reference": float((tokens - public).mean()),
        "min-k": float(np.sort(tokens)[:count].mean()),
        "spread": float(worlds.mean(axis=1).std()),
    }
