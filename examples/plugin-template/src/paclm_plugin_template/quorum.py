"""A quorum of worlds, or else the public model: a baseline without a guarantee, which says so."""

import numpy as np

from paclm.privacy.belief import IntArray
from paclm.study.baselines.baseline import Baseline
from paclm.study.recorded_votes import TextVotes

QUORUM = 0.9


def release_by_quorum(votes: TextVotes, rng: np.random.Generator) -> IntArray:
    """The most popular vote where this share of worlds casts it, the public model's token elsewhere; (n,)."""
    released = votes.public.copy()
    for i, row in enumerate(votes.votes):
        tokens, counts = np.unique(row, return_counts=True)
        if counts.max() >= QUORUM * row.size:
            released[i] = tokens[counts.argmax()]
    return released


BASELINE = Baseline("quorum", "none", release_by_quorum)
