"""Plan training before it starts: how many worlds fit into one step, memory, disk and time.

Memory is measured: what the backward pass keeps for one more world is the difference between a pass of two worlds and
a pass of one. Time is that of one real step, and of the trunk's pass over some blocks where its states are stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterStack, find_targets
from paclm.engine.loss import LENGTH_STEP, batch_loss, make_batch
from paclm.engine.memory import free_bytes, sharing
from paclm.engine.training import GroupTraining, adapter_spec
from paclm.engine.training_forward import Forward, make_forward
from paclm.engine.training_order import NOTHING, Blocks, IntArray, Schedule
from paclm.engine.training_pass import WorldsPass, trainable
from paclm.engine.trunk_states import Place, TrunkStates, choose_place, compute_group, groups_of, num_bytes
from paclm.engine.weights import output_layer
from paclm.errors import EngineError

BYTES_PER_NUMBER = 4 * 6  # float32: the adapter, its gradient twice, two moments, one temporary
HEADROOM = 1.4  # for temporaries besides what is kept for the backward pass
SHARE_OF_FREE = 0.7
_ENOUGH_POSITIONS = {"cpu": 2048, "cuda": 131072}  # a CPU's cache is limited; a GPU needs enough work per launch
_TIMED_WORLDS = {"cpu": 2, "cuda": 64}
_STEPS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Sizes, memory, disk and time of training."""

    num_worlds: int
    parameters_per_world: int
    num_layers: int  # decoder layers of the base model
    adapted_layers: int  # of them, those with an adapter
    trunk: int  # of them, those below the first with an adapter
    worlds_per_step: int
    num_steps: int  # over all groups of worlds
    num_tokens: int  # predicted, over all worlds and epochs
    num_positions: int  # computed, padding included
    workers: int  # processes that share the groups
    memory_bytes: int  # of each, without the base model
    disk_bytes: int  # while training
    trunk_bytes: int  # of the trunk's states, which are then computed once; 0: in every step
    trunk_place: Place | None  # where they are stored
    seconds: float | None = None  # estimated from one step; None if not asked for


def plan_training(
    model: PreTrainedModel,
    schedule: Schedule,
    settings: TrainingConfig,
    *,
    worlds_per_step: int | None = None,
    estimate_time: bool = False,
    folder: Path | None = None,
    workers: int = 1,
    processes: int = 1,
) -> TrainingPlan:
    """Measure the memory of a world, choose how many train together (unless given), and count steps and tokens.

    With a `folder`, the states of the trunk may be stored on its disk. Groups are shared by `workers`, of which so many
    `processes` share this machine.
    """
    spec = adapter_spec(settings)
    targets = find_targets(model, spec)
    head, forward = output_layer(model), make_forward(model)
    try:
        start = AdapterStack.initial(targets, spec, 2, schedule.seed, "", settings.coupled).to(model.device)
        size = start.num_parameters
        place = choose_place(forward, head, schedule.blocks, start.trunk, folder, processes)
        states = None if place is None else TrunkStates.alike(head, schedule.blocks, start.trunk)
        stored = 0 if place is None else num_bytes(schedule.blocks, head)
        beside = stored if place == "device" else 0
        kept = _kept_bytes_per_world(forward, head, start, schedule, states)
        per_world = int(HEADROOM * kept) + BYTES_PER_NUMBER * size
        if worlds_per_step is None:
            free = free_bytes(model.device) // sharing(model.device, processes) - beside
            fair = -(-schedule.num_worlds // workers)
            worlds_per_step = min(fair, _choose(schedule, per_world, free, model.device.type))
        worlds_per_step = min(worlds_per_step, schedule.num_worlds)
        groups = schedule.groups(worlds_per_step)
        positions = [_positions(schedule, schedule.batches(worlds)) for worlds in groups]
        seconds = None
        if estimate_time:
            timed = groups[0][: _TIMED_WORLDS.get(model.device.type, 2)]
            begin = AdapterStack.initial(targets, spec, len(timed), schedule.seed, "", settings.coupled)
            passes = WorldsPass(forward, head, begin, len(timed))
            group = GroupTraining(passes, begin, schedule, timed, settings, states)
            seconds = max(sum(positions) / workers, *positions) * _seconds_per_position(group)
            if states is not None:
                seconds += _trunk_seconds(forward, schedule.blocks, states)
    finally:
        forward.close()
    return TrainingPlan(
        num_worlds=schedule.num_worlds,
        parameters_per_world=size,
        num_layers=int(model.config.num_hidden_layers),
        adapted_layers=sum(layer >= 0 for layer in start.decoder_layers),
        trunk=start.trunk,
        worlds_per_step=worlds_per_step,
        num_steps=sum(int(schedule.num_steps[worlds].max()) for worlds in groups),
        num_tokens=int(schedule.num_tokens.sum()),
        num_positions=sum(positions),
        workers=workers,
        memory_bytes=per_world * worlds_per_step + beside,
        disk_bytes=4 * size * (2 * schedule.num_worlds + 3 * min(workers * worlds_per_step, schedule.num_worlds))
        + (processes * stored if place == "disk" else 0),
        trunk_bytes=stored,
        trunk_place=place,
        seconds=seconds,
    )


def _choose(schedule: Schedule, per_world: int, free: int, device: str) -> int:
    fitting = int(SHARE_OF_FREE * free) // per_world
    if fitting < 1:
        raise EngineError(
            f"Training one world takes about {per_world / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free. "
            "Lower batch_size or block_tokens in [training], or try: --worlds-per-step 1"
        )
    positions = schedule.batch_size * int(schedule.blocks.lengths.max())
    return max(1, min(fitting, _ENOUGH_POSITIONS.get(device, 2048) // positions, schedule.num_worlds))


def _kept_bytes_per_world(
    forward: Forward, head: nn.Linear, two: AdapterStack, schedule: Schedule, states: TrunkStates | None
) -> int:
    kept, longest = [], np.argsort(-schedule.blocks.lengths, kind="stable")[: schedule.batch_size]
    for worlds in (1, 2):
        batch = make_batch(schedule.blocks, np.tile(longest, (worlds, 1)), head.weight.device, states=states)
        own = trainable(two, worlds)
        with counting_kept_bytes() as storages:
            hidden = forward(batch.ids, own.A, own.B, two.spec.scale, stream=batch.stream)
            total, _ = batch_loss(hidden, head, batch)
            kept.append(sum(storages.values()))
            del hidden, total
    return max(1, kept[1] - kept[0])


@contextmanager
def counting_kept_bytes() -> Iterator[dict[int, int]]:
    """Sizes of everything autograd keeps for the backward pass, by address."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield storages


def _positions(schedule: Schedule, picks: IntArray) -> int:
    """Positions computed for a group, padding included; picks (G, steps, batch)."""
    known, total = schedule.blocks.lengths, 0
    for start in range(0, picks.shape[1], _STEPS_AT_ONCE):
        some = picks[:, start : start + _STEPS_AT_ONCE]
        has_block = some != NOTHING
        lengths = np.where(has_block, known[some], 0)
        worlds = has_block.any(axis=2).sum(axis=0)  # (steps,)
        rows = has_block.any(axis=0).sum(axis=1)
        padded = -(-lengths.max(axis=(0, 2)) // LENGTH_STEP) * LENGTH_STEP
        total += int((worlds * rows * np.minimum(padded, known.max())).sum())
    return total


def _seconds_per_position(group: GroupTraining) -> float:
    """Time the last of a few steps on the group's own batches."""
    picks = group.schedule.batches(group.worlds)
    middle = min(picks.shape[1] // 2, int(group.num_steps.min()) - 1)
    batch = picks[:, [middle]]
    seconds = 0.0
    for _ in range(3):
        began = time.perf_counter()
        group.read(group.step(batch[:, 0]))
        if group.optimizer.rows.is_cuda:
            torch.cuda.synchronize(group.optimizer.rows.device)  # the loss arrives before the step ends
        seconds = time.perf_counter() - began
    return seconds / _positions(group.schedule, batch)


def _trunk_seconds(forward: Forward, blocks: Blocks, like: TrunkStates) -> float:
    """Time of computing the states of all blocks, from the second of two passes over a group of them."""
    group = next(groups_of(blocks, like.device.type))
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        places, found = compute_group(forward, blocks, like.layer, group, like.device)
        found.cpu()
        seconds = time.perf_counter() - began
    return seconds * len(blocks.tokens) / len(places)
