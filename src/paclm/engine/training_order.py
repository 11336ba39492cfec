"""Which blocks each world trains on, and when: all worlds follow one order of all blocks.

    order of all blocks    b7  b2  b9  b4  b0  b5 …      the same for every world (coupled training)
    world 0 holds          b7      b9      b0            its batches: (b7, b9), (b0, …)
    world 1 holds              b2  b9  b4                its batches: (b2, b9), (b4, …)

Disjoint shards share no record, and a record must not change another shard's model: each has an order of its own, which
depends on its own blocks alone.

A world sees each of its blocks exactly once per epoch, in batches of `batch_size`; its last batch of an epoch may be
short. Plain numpy; knows neither texts nor models.
"""

from __future__ import annotations

import math
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paclm.config import TrainingConfig
from paclm.errors import EngineError, InvalidInput
from paclm.worlds.blocks import block_length, cut_blocks

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
TokenArray = NDArray[np.integer[Any]]

NOTHING = -1
_STREAM = 3  # keeps these draws apart from others under the same seed
_WINDOW = 8  # in units of √n
_BLOCKS_AT_ONCE = 16_384
_LIKE_LENGTHS = 16  # tokens; blocks that differ by less keep their random order


@dataclass(frozen=True, slots=True)
class Blocks:
    """Token blocks, each cut from one record."""

    tokens: TokenArray  # all blocks end to end
    starts: IntArray  # (k + 1,): block i is tokens[starts[i] : starts[i + 1]]
    records: IntArray  # (k,): the record each block belongs to
    repetitions: IntArray  # (k,): how often a world sees the block in one epoch; 1 except for canaries

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, block: int) -> IntArray:
        return self.tokens[self.starts[block] : self.starts[block + 1]].astype(np.int64)


def expected_steps(training: TrainingConfig, records_per_world: float, tokens_per_record: float, context: int) -> int:
    """Steps of a world, estimated from averages."""
    blocks = records_per_world * max(1.0, tokens_per_record / (block_length(training, context) - 1))
    return training.epochs * math.ceil(blocks / training.batch_size)


def make_blocks(
    records: Iterable[Sequence[int]],
    block_tokens: int,
    max_record_tokens: int,
    repetitions: Sequence[int] = (),
    folder: Path | None = None,
) -> Blocks:
    """Cut the token ids of records into blocks; blocks of one token, with nothing to predict, are left out.

    The tokens are kept in a file without a name in `folder`, or in the folder of temporary files, not in memory.
    """
    lengths, owners, num_records = array("q", [0]), array("q"), 0
    with tempfile.TemporaryFile(dir=folder) as file:
        for record, token_ids in enumerate(records):
            found = [block for block in cut_blocks(token_ids, block_tokens, max_record_tokens) if len(block) > 1]
            for block in found:
                file.write(array("i", block).tobytes())
                lengths.append(len(block))
            owners.extend([record] * len(found))
            num_records = record + 1
        if not owners:
            raise EngineError("No record has two tokens, so there is nothing to train on. Bring longer records.")
        file.flush()
        tokens = np.memmap(file, dtype=np.int32, mode="r")
    owner_of = np.array(owners, dtype=np.int64)
    per_record = np.array(repetitions if len(repetitions) else [1] * num_records, dtype=np.int64)
    return Blocks(tokens, np.cumsum(lengths, dtype=np.int64), owner_of, per_record[owner_of])


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every world's batches, in order. The same arguments give the same schedule on every machine."""

    blocks: Blocks
    membership: BoolArray  # (n, m): who is in which world
    batch_size: int
    epochs: int
    seed: int
    coupled: bool = True
    own_orders: bool = False  # each world's order depends on its own blocks alone: for disjoint shards
    num_steps: IntArray = field(init=False)  # (m,): steps of each world
    num_tokens: IntArray = field(init=False)  # (m,): tokens each world is trained to predict, over all epochs

    def __post_init__(self) -> None:
        if len(self.membership) <= int(self.blocks.records.max()):
            raise InvalidInput(
                f"The membership has {len(self.membership)} records, the blocks {self.blocks.records.max() + 1}."
            )
        visits = self._sum_over_blocks(self.blocks.repetitions)
        if (visits == 0).any():
            names = ", ".join(map(str, np.flatnonzero(visits == 0)[:10]))
            raise EngineError(f"No record of world {names} has two tokens, so it has nothing to train on.")
        steps = self.epochs * -(-visits // self.batch_size)
        tokens = self.epochs * self._sum_over_blocks(self.blocks.repetitions * (self.blocks.lengths - 1))
        object.__setattr__(self, "num_steps", steps)
        object.__setattr__(self, "num_tokens", tokens)

    def _sum_over_blocks(self, values: IntArray) -> IntArray:
        """Sums of the blocks' values (k,) over those that each world holds, (m,)."""
        total = np.zeros(self.num_worlds, dtype=np.int64)
        for start in range(0, len(values), _BLOCKS_AT_ONCE):
            some = slice(start, start + _BLOCKS_AT_ONCE)
            total += values[some] @ self.membership[self.blocks.records[some]]
        return total

    @property
    def num_worlds(self) -> int:
        return int(self.membership.shape[1])

    def groups(self, worlds_per_step: int) -> list[IntArray]:
        """Divide the worlds into groups that train together, by number of steps, most first.

        Worlds then finish from the end of their group, and the unfinished ones are always the first k.
        """
        by_steps = np.argsort(-self.num_steps, kind="stable")  # (m,)
        return np.array_split(by_steps, -(-self.num_worlds // worlds_per_step))

    def batches(self, worlds: Sequence[int] | IntArray) -> IntArray:
        """Block numbers (G, steps, batch_size) of some worlds; NOTHING in short batches and after a world's end."""
        picks = np.full((len(worlds), int(self.num_steps[worlds].max()), self.batch_size), NOTHING, dtype=np.int64)
        every = np.arange(len(self.blocks))
        for epoch in range(self.epochs):
            shared = self._order(every, epoch, None) if self.coupled and not self.own_orders else None
            for i, world in enumerate(worlds):
                holds = self.membership[self.blocks.records, world]  # (k,)
                if self.own_orders:
                    own = self._order(np.flatnonzero(holds), epoch, int(world))
                else:
                    order = shared if shared is not None else self._order(every, epoch, int(world))
                    own = order[holds[order]]  # (visits,)
                steps = -(-len(own) // self.batch_size)
                full = np.full(steps * self.batch_size, NOTHING, dtype=np.int64)
                full[: len(own)] = own
                picks[i, epoch * steps : (epoch + 1) * steps] = full.reshape(steps, self.batch_size)
        return picks

    def _order(self, blocks: IntArray, epoch: int, world: int | None) -> IntArray:
        """Blocks of an epoch in random order, sorted by length within windows, so that batches need little padding.

        Lengths rise in one window and fall in the next. Worlds that follow the same order drift about √n blocks apart,
        so windows of some √n blocks give them blocks of similar length in the same step. Repeated records (canaries)
        keep their random place: they are short, and sorted they would fill whole batches, each of which would move an
        adapter as far as a batch of text.
        """
        draws = np.random.default_rng([self.seed, _STREAM, epoch] + ([] if world is None else [world]))
        order = draws.permutation(np.repeat(blocks, self.blocks.repetitions[blocks]))
        classes = self.blocks.lengths // _LIKE_LENGTHS
        rises = bool(draws.integers(2))
        window = max(2 * self.batch_size, int(_WINDOW * np.sqrt(len(order))))
        windows = []
        for start in range(0, len(order), window):
            part = order[start : start + window]
            free = np.flatnonzero(self.blocks.repetitions[part] == 1)
            own = part[free]
            part[free] = own[np.argsort(classes[own] if rises else -classes[own], kind="stable")]
            windows.append(part)
            rises = not rises
        return np.concatenate(windows)
