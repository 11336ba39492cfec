"""Votes of all worlds at many positions: the file of `paclm votes` and `paclm replay`, and votes along a test text."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, IntArray, check_num_worlds
from paclm.privacy.randomness import Coins
from paclm.study.decoding import Decoding
from paclm.study.eval_text import Passage
from paclm.worlds.storage import write_private_arrays

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

_IN_FILE = ("votes", "truth", "public", "full")
_MADE_BY = "`paclm votes WORKSPACE --text FILE --out V.npz` makes one."


@dataclass(frozen=True, slots=True)
class RecordedVotes:
    """Every world's vote at n positions. The integers only need to name tokens consistently; −1: not in the support."""

    votes: IntArray  # (n, m)
    truth: IntArray | None = None  # (n,) the token that follows in the text
    public: IntArray | None = None  # (n,) the public model's choice under the same decoder
    full: IntArray | None = None  # (n,) the choice of the adapter trained on the whole corpus

    def __post_init__(self) -> None:
        if self.votes.ndim != 2 or self.votes.shape[0] < 1 or not np.issubdtype(self.votes.dtype, np.integer):
            raise InvalidInput(
                f"votes must be integers (positions, worlds), not {self.votes.dtype} with shape {self.votes.shape}."
            )
        check_num_worlds(self.num_worlds)
        n = self.num_positions
        for name, column in self.columns().items():
            if name != "votes" and (column.shape != (n,) or not np.issubdtype(column.dtype, np.integer)):
                raise InvalidInput(f"{name} must be integers ({n},), not {column.dtype} with shape {column.shape}.")

    @property
    def num_positions(self) -> int:
        return int(self.votes.shape[0])

    @property
    def num_worlds(self) -> int:
        return int(self.votes.shape[1])

    @property
    def digest(self) -> str:
        """The SHA-256 of the votes, in hexadecimal."""
        return hashlib.sha256(np.ascontiguousarray(self.votes, dtype=np.int64).tobytes()).hexdigest()

    @property
    def is_dissent(self) -> BoolArray:
        """(n,) whether the worlds differ at each position."""
        differs: BoolArray = (self.votes != self.votes[:, :1]).any(axis=1)
        return differs

    def columns(self) -> dict[str, IntArray]:
        """All arrays that are present, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}

    def column(self, name: str) -> IntArray:
        """An array that may be absent; raises InvalidInput if it is."""
        if name not in self.columns():
            raise InvalidInput(f"These votes have no column {name}.")
        return self.columns()[name]

    @classmethod
    def load(cls, path: str | Path) -> RecordedVotes:
        """Read an .npz file; arrays other than votes, truth, public and full are ignored."""
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in _IN_FILE if name in archive}
        except FileNotFoundError:
            raise InvalidInput(f"There is no file {path}. {_MADE_BY}") from None
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile):
            raise InvalidInput(f"{path} is not an .npz file of integer arrays. {_MADE_BY}") from None
        if "votes" not in arrays:
            raise InvalidInput(f"{path} holds no array called votes. {_MADE_BY}")
        return RecordedVotes(**arrays)

    def save(self, path: str | Path) -> None:
        """Write an .npz file that `load` reads, readable by its owner only; the same votes give the same bytes."""
        columns = self.columns()
        kept = {name: columns[name] for name in _IN_FILE if name in columns}
        write_private_arrays(Path(path), **kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVotes(RecordedVotes):
    """Votes along a test text. Draws of coins follow one another, so a position appears once per draw."""

    truth: IntArray  # (n,)
    public: IntArray  # (n,)
    passage: IntArray  # (n,) the document of each position: standard errors are clustered by it
    position: IntArray  # (n,) the same number in every draw

    def arrays(self, prefix: str) -> dict[str, IntArray]:
        """All arrays as int32, named `prefix.votes` and so on, for a file."""
        return {f"{prefix}.{name}": array.astype(np.int32) for name, array in self.columns().items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> TextVotes:
        """The inverse of `arrays`."""
        names = [(field.name, f"{prefix}.{field.name}") for field in fields(cls)]
        return cls(**{name: arrays[key] for name, key in names if key in arrays})


def collect_votes(
    engine: Engine,
    passages: Sequence[Passage],
    decodings: Sequence[Decoding],
    seeds: Sequence[int],
    with_full: bool,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, TextVotes]:
    """Teacher-forced votes along the passages, in one forward pass for all decodings and draws of coins.

    with_full: the engine's last world is the full-corpus adapter, whose vote is recorded apart from the worlds'.
    """
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
            n, k = hidden.shape[1], engine.support_size
            keep = np.flatnonzero(scored[done : done + n])
            done += n
            # coins are drawn for unscored positions too: seeds fix every vote
            drawn = [
                [
                    np.stack([source.gumbel(k) for _ in range(n)])[keep] if decoding.temperature else None
                    for source in sources
                ]
                for decoding, sources in zip(decodings, coins, strict=True)
            ]
            if not keep.size:
                continue
            support, logits = engine.restricted(hidden[:, torch.from_numpy(keep).to(hidden.device)])
            for decoding, own in zip(decodings, drawn, strict=True):
                for draw, one in enumerate(own):
                    there = None if one is None else torch.from_numpy(one).to(support.device).float()
                    votes = coupled_votes(logits, support, there, decoding.temperature)
                    kept[decoding.name][draw].append(votes.cpu().numpy().astype(np.int32))
            advance(len(keep))
    truth = np.concatenate([np.asarray(p.tokens[1:], np.int32)[np.asarray(p.is_scored[1:])] for p in passages])
    cluster = np.concatenate([np.full(p.num_scored, p.document, np.int32) for p in passages])
    position = np.arange(len(truth), dtype=np.int32)
    found = {}
    for decoding in decodings:
        every = np.concatenate([votes for draw in kept[decoding.name] for votes in draw])  # (draws·n, m, full?, public)
        found[decoding.name] = TextVotes(
            votes=every[:, : -2 if with_full else -1],
            truth=np.tile(truth, decoding.draws),
            public=every[:, -1],
            full=every[:, -2] if with_full else None,
            passage=np.tile(cluster, decoding.draws),
            position=np.tile(position, decoding.draws),
        )
    return found
