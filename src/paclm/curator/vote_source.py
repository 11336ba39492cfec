"""What the curator needs from an engine. The engine is never told which world is realized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.decode_step import MaskArray
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
    def capacity(self) -> int:
        """Of all sequences together, in tokens."""

    @property
    def summary(self) -> str:
        """Device, arithmetic and room in one line."""

    @property
    def memory(self) -> str:
        """What it takes of its device at most."""

    @property
    def num_free(self) -> int:
        """Sequences that can still be added."""

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence that grows to so many tokens, prompt and answer, can be added now."""

    def add(self, tokens: Sequence[int], max_new_tokens: int, owner: str | None = None) -> int:
        """Queue a prompt and return the handle of its sequence. Prompts of one owner may share what was computed."""

    def prefill(self) -> None:
        """Read one chunk of the queued prompts, on a GPU while the caller does other work. Nothing if none waits."""

    def is_ready(self, handle: int) -> bool:
        """Whether the prompt is read, so that the sequence can take part in a step."""

    def launch(
        self, handles: Sequence[int], coins: FloatArray, temperature: Sequence[float], allowed: MaskArray | None
    ) -> None:
        """Begin a step of these n sequences with (n, k) coins; on a GPU it runs while the caller does other work.

        allowed: a bit for each token that may be voted for (`decode_step.MaskArray`); None allows all.
        """

    def collect(self) -> Ballot:
        """Wait for the launched step: votes on the next token, one row for each of its sequences, removed ones too."""

    def step(self, handles: Sequence[int], coins: FloatArray, temperature: Sequence[float]) -> Ballot:
        """`launch` and `collect`; reads prompts that are not read yet."""

    def append(self, handle: int, token: int) -> None:
        """Continue a sequence with the token that was released."""

    def remove(self, handle: int) -> None:
        """End a sequence."""

    def check(self) -> None:
        """Wait until workers that are lost are back. Not while a step is in flight."""

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile and record what steps will need; progress(done, all)."""

    def probe(self, context: Sequence[int], coins: FloatArray | None) -> tuple[IntArray, FloatArray]:
        """Votes on one context and the logits behind them; called twice to check determinism."""
