"""Teacher-forced votes along a text: one forward pass, as many decoders and coin draws as asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import IntArray
from paclm.privacy.randomness import Coins
from paclm.study.decoding import Decoding
from paclm.study.text import Passage
from paclm.study.votes import RecordedVotes

if TYPE_CHECKING:
    from paclm.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class TextVotes:
    """Votes on a text; a position appears once per draw, and knows which passage it is from."""

    recorded: RecordedVotes
    passage: IntArray  # (n,) the document of each position: errors are over these
    position: IntArray  # (n,) the same number in every draw
    draw: IntArray  # (n,)

    @property
    def truth(self) -> IntArray:
        """(n,) the token that really came next."""
        return self._column("truth")

    @property
    def public(self) -> IntArray:
        """(n,) the public model's vote."""
        return self._column("public")

    @property
    def full(self) -> IntArray:
        """(n,) the full-corpus adapter's vote; only where it was asked for."""
        return self._column("full")

    def _column(self, name: str) -> IntArray:
        column: IntArray | None = getattr(self.recorded, name)
        if column is None:
            raise InvalidInput(f"These votes were taken without the column {name}.")
        return column

    def arrays(self) -> dict[str, IntArray]:
        """As flat arrays, for a file."""
        columns = {name: getattr(self.recorded, name) for name in ("votes", "truth", "public", "full")}
        columns |= {"passage": self.passage, "position": self.position, "draw": self.draw}
        return {name: array.astype(np.int32) for name, array in columns.items() if array is not None}

    @classmethod
    def from_archive(cls, archive: Mapping[str, Any], prefix: str) -> TextVotes:
        """From the arrays `prefix.votes`, `prefix.truth` … of an open .npz file."""
        names = ("votes", "truth", "public", "full", "passage", "position", "draw")
        found = {name: archive[f"{prefix}.{name}"] for name in names if f"{prefix}.{name}" in archive}
        clusters = {name: found.pop(name) for name in ("passage", "position", "draw")}
        return cls(RecordedVotes(**found), **clusters)


def collect_votes(
    engine: Engine,
    passages: Sequence[Passage],
    decodings: Sequence[Decoding],
    seeds: Sequence[int],
    with_full: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, TextVotes]:
    """Walk the passages once; with_full: the engine's last world is the full-corpus adapter, which only looks on."""
    import torch

    from paclm.engine.decode_step import coupled_votes

    for decoding in decodings:
        if decoding.coupling != "coupled":
            raise InvalidInput(f"Votes on a text are coupled; {decoding.name} is for generated sequences only.")
    coins = [[Coins(seed + draw) for draw in range(d.draws)] for d, seed in zip(decodings, seeds, strict=True)]
    kept: dict[str, list[list[IntArray]]] = {d.name: [[] for _ in range(d.draws)] for d in decodings}
    for passage in passages:
        scored = np.asarray(passage.is_scored[1:])
        done = 0
        for hidden in engine.windows(passage.tokens, len(passage.tokens)):
            support, logits = engine.restricted(hidden)
            n, k = support.shape
            keep = np.flatnonzero(scored[done : done + n])
            done += n
            rows = torch.from_numpy(keep).to(support.device)
            for decoding, sources in zip(decodings, coins, strict=True):
                for draw, source in enumerate(sources):
                    drawn = None
                    if decoding.temperature:
                        drawn = torch.from_numpy(np.stack([source.gumbel(k) for _ in range(n)])).to(support.device)
                        drawn = drawn[rows].float()
                    votes = coupled_votes(logits[rows], support[rows], drawn, decoding.temperature)
                    kept[decoding.name][draw].append(votes.cpu().numpy().astype(np.int32))
            advance(len(keep))
    truth = np.concatenate([np.asarray(p.tokens[1:], np.int32)[np.asarray(p.is_scored[1:])] for p in passages])
    cluster = np.concatenate([np.full(p.num_scored, p.document, np.int32) for p in passages])
    return {
        decoding.name: _joined([np.concatenate(draw) for draw in kept[decoding.name]], truth, cluster, with_full)
        for decoding in decodings
    }


def _joined(draws: list[IntArray], truth: IntArray, cluster: IntArray, with_full: bool) -> TextVotes:
    every = np.concatenate(draws)  # (draws·n, worlds, full?, public)
    count = len(draws)
    recorded = RecordedVotes(
        votes=every[:, : -2 if with_full else -1],
        truth=np.tile(truth, count),
        public=every[:, -1],
        full=every[:, -2] if with_full else None,
    )
    return TextVotes(
        recorded,
        np.tile(cluster, count),
        np.tile(np.arange(len(truth), dtype=np.int32), count),
        np.repeat(np.arange(count, dtype=np.int32), len(truth)),
    )
