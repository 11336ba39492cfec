"""Train all worlds, a group at a time: one forward and backward pass updates every world of the group.

    schedule        which blocks each world sees in each step     checkpoint    what survives a kill
    loss            each world's mean over its own tokens         optimizer     AdamW, one row per world
    training_pass   losses and gradients of a batch               improvement   the check at the end
    trunk_states    layers below the first adapted one, computed once

The loss of a step is read after the next step is launched, so that a GPU never waits for the host; but a position or
group is saved only when all of its losses are read and finite. Ctrl-C finishes the current step and saves the position.

A world's adapter equals that of training it alone: the base is frozen, each world's rows use only its own adapter, its
loss is its own mean, and AdamW is elementwise. Knows no workspace and not which world is realized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.checkpoint import Checkpoints, HeldInterrupt, Position, deciding, identify_run
from paclm.engine.improvement import Improvement, measure_improvement, refuse_unimproved
from paclm.engine.loss import make_batch
from paclm.engine.optimizer import StackedAdamW, flatten, unflatten
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import Blocks, BoolArray, IntArray, Schedule
from paclm.engine.training_pass import WorldsPass
from paclm.engine.trunk_states import TrunkStates, choose_place
from paclm.engine.weights import output_layer
from paclm.errors import EngineError


@dataclass(frozen=True, slots=True)
class Progress:
    """State of training after a step."""

    group: int
    num_groups: int
    step: int  # steps done, over all groups
    num_steps: int
    num_tokens: int  # tokens predicted in this step by all worlds of the group
    loss: float  # mean over the worlds of the group in this step


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Losses of a step; on a GPU the copy to the host may still be running."""

    step: int  # of the group, from 1
    num_tokens: int
    means: Tensor  # (k,) on the CPU: the loss of each world, valid after `arrived`
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, means: Tensor, step: int, num_tokens: int) -> StepLoss:
        """Start the copy to the CPU without waiting for it."""
        copy = means.to("cpu", non_blocking=True)  # pinned memory on a GPU, no copy on a CPU
        arrived = None
        if means.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(means.device))
        return cls(step, num_tokens, copy, arrived)

    def wait(self) -> Tensor:
        """The means (k,), after the copy has finished."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.means


@dataclass(frozen=True, slots=True)
class Trained:
    """All worlds, trained and checked."""

    stack: AdapterStack
    improvement: Improvement
    worlds_per_step: int
    seconds: float  # of this call; earlier parts of a resumed run are not counted


OnProgress = Callable[[Progress], None]


def adapter_spec(settings: TrainingConfig) -> AdapterSpec:
    """The adapters that [training] sets."""
    wanted = settings.targets
    names = () if wanted in ("auto", "attention") else (wanted,) if isinstance(wanted, str) else wanted
    only = wanted == "attention"
    return AdapterSpec(rank=settings.rank, alpha=settings.alpha, targets=names, attention_only=only, top=settings.top)


def make_schedule(blocks: Blocks, membership: BoolArray, settings: TrainingConfig, seed: int) -> Schedule:
    """The schedule that [training] sets."""
    return Schedule(blocks, membership, settings.batch_size, settings.epochs, seed, settings.coupled)


def train_worlds(
    model: PreTrainedModel,
    schedule: Schedule,
    settings: TrainingConfig,
    *,
    base: str,
    worlds_per_step: int,
    folder: Path | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
    checkpoint_seconds: float = 60.0,
    must_improve: bool = True,
) -> Trained:
    """Train every world of the schedule on a frozen base model (fingerprint `base`), from the seed of the schedule.

    With a `folder`, checkpoints are kept there and `resume` continues from them; remove it once the stack is saved.
    Raises if a world is no better on its own records than the public model; studies can turn this off.
    """
    began = time.monotonic()
    spec = adapter_spec(settings)
    start = AdapterStack.initial(
        find_targets(model, spec), spec, schedule.num_worlds, schedule.seed, base, settings.coupled
    )
    head, forward = output_layer(model), make_forward(model)
    checkpoints = Checkpoints(folder) if folder is not None else None
    place = choose_place(forward, head, schedule.blocks, start.trunk, folder)
    if checkpoints is not None:
        run = identify_run(schedule, {"base": base, "dtype": str(model.dtype), **deciding(settings)})
        earlier = checkpoints.worlds_per_step(run) if resume else None
        if earlier is None:
            checkpoints.begin(run, worlds_per_step, place is not None)
        elif not checkpoints.has_states:
            place = None
        elif place is None:
            raise EngineError(
                f"The run in {checkpoints.folder} stores the states of the trunk, and there is no more room for them. "
                "Free memory or disk space and resume, or start a new run with --again."
            )
        worlds_per_step = earlier or worlds_per_step
    groups = schedule.groups(worlds_per_step)
    group_steps = [int(schedule.num_steps[worlds].max()) for worlds in groups]
    rows = flatten(start)  # (m, p)
    figures = np.zeros((3, schedule.num_worlds))  # public, trained, moved
    try:
        states = None
        if place is not None:
            states = TrunkStates.compute(forward, head, schedule.blocks, start.trunk, place, folder)
        passes = WorldsPass(forward, head, start, max(map(len, groups)))
        for number, worlds in enumerate(groups):
            done = checkpoints.load_group(number) if checkpoints is not None else None
            if done is None:
                own = start.worlds(worlds.tolist())
                group = GroupTraining(passes, own, schedule, worlds, settings, states)
                if checkpoints is not None:  # outside of `try`: Ctrl-C here must not save a position
                    group.restore(checkpoints.load_position(number))
                try:
                    group.run(number, group_steps, checkpoints, on_progress, checkpoint_seconds)
                    improvement = measure_improvement(
                        forward, head, own, group.stack, schedule, worlds.tolist(), states
                    )
                    if must_improve:
                        refuse_unimproved(improvement, worlds.tolist())
                    measured = np.stack([improvement.public, improvement.trained, improvement.moved])
                    done = {"rows": group.optimizer.rows.cpu(), "figures": torch.from_numpy(measured)}
                    if checkpoints is not None:
                        checkpoints.save_group(number, done)
                except KeyboardInterrupt:
                    if checkpoints is not None and group.is_whole:
                        checkpoints.save_position(group.position(number))
                    raise
            rows[torch.from_numpy(worlds)] = done["rows"]
            figures[:, worlds] = done["figures"].numpy()
    finally:
        forward.close()
    return Trained(unflatten(rows, start), Improvement(*figures), worlds_per_step, time.monotonic() - began)


class GroupTraining:
    """The worlds of one group under way."""

    def __init__(
        self,
        passes: WorldsPass,
        start: AdapterStack,
        schedule: Schedule,
        worlds: IntArray,
        settings: TrainingConfig,
        states: TrunkStates | None = None,
    ) -> None:
        rows = passes.rows[: len(worlds)].copy_(flatten(start))  # (G, p)
        self.passes = passes
        self.stack = unflatten(rows, start)
        self.optimizer = StackedAdamW(rows, settings.learning_rate, settings.weight_decay)
        self.schedule = schedule
        self.worlds = worlds
        self.states = states
        self.num_steps = schedule.num_steps[worlds]  # (G,), falling
        self.num_read = 0

    def run(
        self,
        number: int,
        group_steps: Sequence[int],
        checkpoints: Checkpoints | None,
        on_progress: OnProgress | None,
        checkpoint_seconds: float,
    ) -> None:
        """Take all remaining steps, reporting each in order."""
        picks = self.schedule.batches(self.worlds)  # (G, steps, batch)

        def report(taken: StepLoss) -> None:
            loss = self.read(taken)
            if on_progress is not None:
                done = sum(group_steps[:number]) + taken.step
                on_progress(Progress(number, len(group_steps), done, sum(group_steps), taken.num_tokens, loss))

        saved = time.monotonic()
        unread: StepLoss | None = None
        try:
            with HeldInterrupt() as interrupt:
                for step in range(self.optimizer.num_steps, picks.shape[1]):
                    before, unread = unread, self.step(picks[:, step])
                    if before is not None:
                        report(before)
                    is_due = checkpoints is not None and time.monotonic() - saved >= checkpoint_seconds
                    if is_due or interrupt.came:
                        report(unread)
                        unread = None
                        interrupt.release()
                    if checkpoints is not None and is_due:
                        checkpoints.save_position(self.position(number))
                        saved = time.monotonic()
                if unread is not None:
                    report(unread)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"Training {len(self.worlds)} worlds at a time does not fit into memory. Lower --worlds-per-step; if "
                "it is 1 already, lower batch_size or block_tokens in [training]."
            ) from error

    def step(self, picks: IntArray) -> StepLoss:
        """One step of the first k worlds, which are unfinished; on a GPU it is only launched."""
        k = int((self.num_steps > self.optimizer.num_steps).sum())
        device, most = self.optimizer.rows.device, self.passes.most_recorded
        batch = make_batch(self.schedule.blocks, picks[:k], device, most, states=self.states)
        means = self.passes(batch)
        taken = StepLoss.send(means, self.optimizer.num_steps + 1, batch.num_tokens)
        self.optimizer.step(self.passes.gradient[:k])
        return taken

    def read(self, taken: StepLoss) -> float:
        """The mean loss of a step over its worlds; raises if one is not finite."""
        means = taken.wait()  # (k,)
        broken = self.worlds[: len(means)][~torch.isfinite(means).numpy()]
        if broken.size:
            names = ", ".join(map(str, broken[:10]))
            raise EngineError(
                f"The loss of world {names} is not a finite number in step {taken.step}. "
                "Lower learning_rate in [training], or train in float32."
            )
        self.num_read = taken.step
        return float(means.mean())

    @property
    def is_whole(self) -> bool:
        """Whether the group is between two steps and all losses so far were read and finite."""
        return self.num_read == self.optimizer.num_steps  # a step is counted before it changes a parameter

    def position(self, number: int) -> Position:
        """The state to save; valid only if `is_whole`."""
        return Position.of(self.optimizer, number)

    def restore(self, position: Position | None) -> None:
        """Continue from a saved position, if there is one."""
        if position is not None:
            position.restore(self.optimizer)
            self.num_read = position.num_steps
