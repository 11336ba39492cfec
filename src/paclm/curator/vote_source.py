"""What the curator needs from an engine. The engine is never told which world is realized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch is loaded with the models, not on import
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
        """Votes (m,) on one context and the logits behind them; called twice to check determinism."""
