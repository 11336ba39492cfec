"""The text a study is scored on: windows of tokens, and which of them count. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paclm.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of one record, and whether each of them is scored as a target."""

    tokens: tuple[int, ...]
    is_scored: tuple[bool, ...]
    """As long as tokens; the first token is never a target."""
    document: int = 0
    """Which record or document it is from: windows of one are no independent samples."""

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Passage:
        """A passage that is scored throughout."""
        kept = tuple(tokens)
        return cls(kept, (True,) * len(kept))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_scored(self) -> int:
        """Targets that count."""
        return sum(self.is_scored[1:])


def cut_passages(passages: Iterable[Passage], window: int) -> list[Passage]:
    """Windows of at most `window` tokens, each starting afresh; a rest of fewer than two tokens is dropped.

    Windows overlap by one token, so that every token but a record's first is a target once. First windows of all
    documents come first: whoever takes a few takes them from many.
    """
    if window < 2:
        raise InvalidInput(f"A window must hold at least 2 tokens (a token and its successor), not {window}.")
    windows = [
        (start, Passage(passage.tokens[start : start + window], passage.is_scored[start : start + window], document))
        for document, passage in enumerate(passages)
        for start in range(0, len(passage) - 1, window - 1)
    ]
    return [passage for _, passage in sorted(windows, key=lambda found: found[0])]


def take_positions(passages: Sequence[Passage], num_positions: int) -> list[Passage]:
    """Whole windows, in order, until so many targets are scored; the last one is cut to fit."""
    taken: list[Passage] = []
    missing = num_positions
    for passage in passages:
        if missing <= 0:
            break
        length = 1
        while length < len(passage) and sum(passage.is_scored[1:length]) < missing:
            length += 1
        cut = Passage(passage.tokens[:length], passage.is_scored[:length], passage.document)
        if cut.num_scored:
            taken.append(cut)
            missing -= cut.num_scored
    return taken
