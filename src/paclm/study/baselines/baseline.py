"""What a baseline on recorded votes is, for the regime `baselines` and for plugins (`paclm.baselines`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import IntArray
from paclm.study.recorded_votes import TextVotes


class Baseline(NamedTuple):
    """A named function from votes along a text to one token per position, and what it guarantees."""

    name: str
    guarantee: str  # in a few words, for the table; "none" where there is none
    release: Callable[[TextVotes, np.random.Generator], IntArray]
    """(n,) tokens."""

    def tokens(self, votes: TextVotes, rng: np.random.Generator) -> IntArray:
        """What it releases, checked: one integer per position."""
        released = np.asarray(self.release(votes, rng))
        if released.shape != votes.truth.shape or not np.issubdtype(released.dtype, np.integer):
            raise InvalidInput(
                f"The baseline {self.name!r} must release {votes.num_positions} tokens, one integer per position, and "
                f"gave {released.dtype} with shape {released.shape}. Correct its function."
            )
        return released
