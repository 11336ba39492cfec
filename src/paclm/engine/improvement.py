"""The check after training: every adapter has changed, and is better on its own records than the public model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paclm.engine.adapters import AdapterStack
from paclm.engine.loss import batch_loss, make_batch, world_means
from paclm.engine.training_forward import Forward
from paclm.engine.training_order import NOTHING, IntArray, Schedule
from paclm.engine.trunk_states import TrunkStates
from paclm.errors import EngineError

FloatArray = NDArray[np.float64]

_SAMPLE = 16  # blocks per world
_STREAM = 4  # keeps these draws apart from others under the same seed
_LEAST_MOVE = 1e-6  # relative to the adapter's size: below it is rounding


@dataclass(frozen=True, slots=True)
class Improvement:
    """Mean loss of each world on a sample of its own blocks (nats per token), and how far its adapter moved."""

    public: FloatArray  # (m,): by the public model
    trained: FloatArray  # (m,): by the world's own adapter
    moved: FloatArray  # (m,): distance from the start, relative to the start


def measure_improvement(
    forward: Forward,
    head: nn.Linear,
    start: AdapterStack,
    trained: AdapterStack,
    schedule: Schedule,
    worlds: Sequence[int],
    states: TrunkStates | None = None,
) -> Improvement:
    """Measure the worlds of one group; `start` and `trained` are the group's stacks."""
    picks = _sample(schedule, worlds)  # (G, sample)
    has_block = picks != NOTHING
    counts = np.where(has_block, schedule.blocks.lengths[picks] - 1, 0)  # (G, sample)

    def losses(rows: IntArray, stack: AdapterStack | None) -> Tensor:
        """Mean loss per row of single blocks (rows, 1); each row is a world of the stack, or the public model's."""
        batch = make_batch(schedule.blocks, rows, head.weight.device, states=states)
        A, B, scale = ({}, {}, 1.0) if stack is None else (stack.A, stack.B, stack.spec.scale)
        with torch.no_grad():
            _, each = batch_loss(forward(batch.ids, A, B, scale, stream=batch.stream), head, batch)
        return world_means(each, batch).double()  # on the device: reading each would stall a GPU

    known, places = np.unique(picks[has_block], return_inverse=True)
    by_length = np.argsort(schedule.blocks.lengths[known], kind="stable")
    parts = np.array_split(by_length, -(-len(known) // schedule.batch_size))
    of_block = np.zeros(len(known))
    of_block[by_length] = torch.cat([losses(known[part][:, None], None) for part in parts]).cpu().numpy()
    public = np.zeros(picks.shape)
    public[has_block] = of_block[places]
    used = np.flatnonzero(has_block.any(axis=0))
    own = np.zeros(picks.shape)
    own[:, used] = torch.stack([losses(picks[:, [column]], trained) for column in used], 1).cpu().numpy()
    total = counts.sum(1)
    return Improvement((public * counts).sum(1) / total, (own * counts).sum(1) / total, _relative_move(start, trained))


def refuse_unimproved(improvement: Improvement, worlds: Sequence[int]) -> None:
    """Raise if an adapter has not changed, or is not better on its own records than the public model."""
    still = [int(world) for world, moved in zip(worlds, improvement.moved, strict=True) if not moved > _LEAST_MOVE]
    if still:
        raise EngineError(
            f"{_names(still)} did not change in training. Raise learning_rate or epochs in [training], and train again."
        )
    figures = zip(worlds, improvement.public, improvement.trained, strict=True)
    worse = [(int(world), public, trained) for world, public, trained in figures if not trained < public]
    if worse:
        world, public, trained = worse[0]
        raise EngineError(
            f"{_names([name for name, _, _ in worse])} did not improve on their own records (world {world}: "
            f"{public:.4f} nats per token before, {trained:.4f} after). Change learning_rate or epochs in [training], "
            "and train again."
        )


def _sample(schedule: Schedule, worlds: Sequence[int]) -> IntArray:
    """Up to `_SAMPLE` blocks of each world (G, sample), NOTHING where it has fewer; shared by worlds where possible."""
    order = np.random.default_rng([schedule.seed, _STREAM]).permutation(len(schedule.blocks))
    picks = np.full((len(worlds), _SAMPLE), NOTHING, dtype=np.int64)
    for i, world in enumerate(worlds):
        own = order[schedule.membership[schedule.blocks.records[order], world]][:_SAMPLE]
        picks[i, : len(own)] = own
    return picks


def _relative_move(start: AdapterStack, trained: AdapterStack) -> FloatArray:
    change = size = torch.zeros(start.num_worlds, dtype=torch.float64)
    for before, after in ((start.A, trained.A), (start.B, trained.B)):
        for layer in start.layers:
            old, new = before[layer].double().cpu().flatten(1), after[layer].double().cpu().flatten(1)
            change = change + (new - old).square().sum(1)
            size = size + old.square().sum(1)
    moved: FloatArray = (change / size).sqrt().numpy()
    return moved


def _names(worlds: Sequence[int]) -> str:
    shown = ", ".join(map(str, worlds[:10])) + (f" and {len(worlds) - 10} more" if len(worlds) > 10 else "")
    return f"World {shown}" if len(worlds) == 1 else f"Worlds {shown}"
