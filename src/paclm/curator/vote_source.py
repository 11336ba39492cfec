"""What the curator asks of the models, and no more. Whatever answers is never told which world is realized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the names alone: whoever opens a curator loads torch when the models are loaded
    from paclm.engine.determinism import FloatArray, IntArray
    from paclm.engine.engine import Ballot


class VoteSource(Protocol):
    """Every world's vote on each of several sequences. `paclm.engine.engine.Engine` is one."""

    @property
    def num_worlds(self) -> int:
        """m."""

    @property
    def support_size(self) -> int:
        """k."""

    @property
    def vocabulary(self) -> int:
        """Token ids are smaller than this."""

    @property
    def context(self) -> int:
        """Prompt and answer together, in tokens."""

    @property
    def num_free(self) -> int:
        """Sequences that can still be added."""

    def add(self, tokens: Sequence[int], max_new_tokens: int) -> int:
        """Start a sequence and return its handle."""

    def step(self, handles: Sequence[int], coins: FloatArray, temperature: Sequence[float]) -> Ballot:
        """(n, k) coins → the votes on the next token of these n sequences, in this order."""

    def append(self, handle: int, token: int) -> None:
        """Continue a sequence with the token that was released."""

    def remove(self, handle: int) -> None:
        """End a sequence."""

    def probe(self, context: Sequence[int], coins: FloatArray | None) -> tuple[IntArray, FloatArray]:
        """Votes (m,) on one context and what they came from: asked twice, to see that they repeat."""
