"""Train all worlds, a group at a time: one forward and backward pass updates every world of the group.

    schedule        which blocks each world sees in each step     checkpoint    what survives a kill
    loss            each world's mean over its own tokens         optimizer     AdamW, one row per world
    training_pass   losses and gradients of a batch               improvement   the check at the end
    trunk_states    layers below the first adapted one, computed once
    training_queue  the groups, for this process and its workers

The loss of a step is read after the next step is launched, so that a GPU never waits for the host; but a position or
group is saved only when all of its losses are read and finite. Ctrl-C finishes the current step and saves the position.

A world's adapter equals that of training it alone: the base is frozen, each world's rows use only its own adapter, its
loss is its own mean, and AdamW is elementwise. Knows no workspace and not which world is realized.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
from paclm.engine.training_queue import GroupQueue, GroupStep, OnProgress
from paclm.engine.trunk_states import Place, TrunkStates, choose_place
from paclm.engine.weights import output_layer
from paclm.errors import EngineError

if TYPE_CHECKING:
    from paclm.engine.training_refinements import Refinements

CHECKPOINT_SECONDS = 60.0
HelpFrom = Callable[[GroupQueue, str, dict[str, Any]], AbstractContextManager[None]]
"""Starts workers on a queue of groups, given the hash of what is trained, and how groups are trained."""


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


def adapter_spec(settings: TrainingConfig) -> AdapterSpec:
    """The adapters that [training] sets."""
    wanted = settings.targets
    names = () if wanted in ("auto", "attention") else (wanted,) if isinstance(wanted, str) else wanted
    only = wanted == "attention"
    return AdapterSpec(rank=settings.rank, alpha=settings.alpha, targets=names, attention_only=only, top=settings.top)


def make_schedule(
    blocks: Blocks, membership: BoolArray, settings: TrainingConfig, seed: int, own_orders: bool = False
) -> Schedule:
    """The schedule that [training] sets."""
    return Schedule(blocks, membership, settings.batch_size, settings.epochs, seed, settings.coupled, own_orders)


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
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    must_improve: bool = True,
    processes: int = 1,
    help_from: HelpFrom | None = None,
    refinements: Refinements | None = None,
) -> Trained:
    """Train every world of the schedule on a frozen base model (fingerprint `base`), from the seed of the schedule.

    With a `folder`, checkpoints are kept there and `resume` continues from them; remove it once the stack is saved.
    Raises if a world is no better on its own records than the public model; studies can turn this off. `help_from`
    lets workers take groups too; `processes` of them all share this machine. `refinements` are for studies.
    """
    began = time.monotonic()
    checkpoints = Checkpoints(folder) if folder is not None else None
    with closing(GroupTrainer(model, schedule, settings, base, must_improve, refinements)) as trainer:
        place = trainer.choose_place(folder, processes)
        if checkpoints is not None:
            earlier = checkpoints.worlds_per_step(trainer.run_id) if resume else None
            if earlier is None:
                checkpoints.begin(trainer.run_id, worlds_per_step, place is not None)
            elif not checkpoints.has_states:
                place = None
            elif place is None:
                raise EngineError(
                    f"The run in {checkpoints.folder} stores the states of the trunk, and there is no more room for "
                    "them. Free memory or disk space and resume, or start a new run with --again."
                )
            worlds_per_step = earlier or worlds_per_step
        groups = schedule.groups(worlds_per_step)
        rows = flatten(trainer.start)  # (m, p)
        figures = np.zeros((3, schedule.num_worlds))  # public, trained, moved

        def collect(number: int, done: dict[str, Tensor]) -> None:
            rows[torch.from_numpy(groups[number])] = done["rows"]
            figures[:, groups[number]] = done["figures"].numpy()

        group_steps = [int(schedule.num_steps[worlds].max()) for worlds in groups]
        queue = GroupQueue(group_steps, checkpoints, on_progress, collect)
        how: dict[str, Any] = {"worlds_per_step": worlds_per_step, "has_states": place is not None}
        how["checkpoint_seconds"] = checkpoint_seconds
        with help_from(queue, trainer.run_id, how) if help_from else nullcontext():
            trainer.prepare(worlds_per_step, place, folder)
            while (number := queue.take()) is not None:
                queue.finish(number, trainer.train(number, queue, checkpoint_seconds))
    return Trained(unflatten(rows, trainer.start), Improvement(*figures), worlds_per_step, time.monotonic() - began)


class Journal(Protocol):
    """Where a group that is trained begins, and who hears how far it is."""

    def position(self, number: int) -> Position | None: ...

    def save(self, position: Position) -> None: ...

    def note(self, number: int, taken: GroupStep) -> None: ...


class GroupTrainer:
    """Trains groups of worlds in this process, one at a time. Each process of a training has one, alike."""

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: Schedule,
        settings: TrainingConfig,
        base: str,
        must_improve: bool = True,
        refinements: Refinements | None = None,
    ) -> None:
        spec = adapter_spec(settings)
        targets = find_targets(model, spec)
        self.start = AdapterStack.initial(targets, spec, schedule.num_worlds, schedule.seed, base, settings.coupled)
        details = {} if refinements is None else {"refinements": refinements.details()}
        self.run_id = identify_run(schedule, {"base": base, "dtype": str(model.dtype), **deciding(settings), **details})
        """Hash of what is trained."""
        self._schedule = schedule
        self._settings = settings
        self._must_improve = must_improve
        self._refinements = refinements
        self._head, self._forward = output_layer(model), make_forward(model)

    def choose_place(self, folder: Path | None, processes: int = 1) -> Place | None:
        """Where the states of the trunk will be stored; None: nowhere."""
        return choose_place(self._forward, self._head, self._schedule.blocks, self.start.trunk, folder, processes)

    def prepare(self, worlds_per_step: int, place: Place | None, folder: Path | None) -> None:
        """Compute the states of the trunk, if they are to be stored, and make room for the largest group."""
        self._groups = self._schedule.groups(worlds_per_step)
        self._states = None
        if place is not None:
            blocks, layer = self._schedule.blocks, self.start.trunk
            self._states = TrunkStates.compute(self._forward, self._head, blocks, layer, place, folder)
        self._passes = WorldsPass(self._forward, self._head, self.start, max(map(len, self._groups)))

    def train(self, number: int, journal: Journal, checkpoint_seconds: float) -> dict[str, Tensor]:
        """The rows (G, p) of a trained group, and its figures (3, G); raises if a world is no better than before."""
        worlds = self._groups[number]
        own = self.start.worlds(worlds.tolist())
        make = GroupTraining if self._refinements is None else self._refinements.group
        group = make(self._passes, own, self._schedule, worlds, self._settings, self._states)
        group.restore(journal.position(number))  # outside of `try`: Ctrl-C here must not save a position
        try:
            group.run(number, journal, checkpoint_seconds)
            group.finish()
            improvement = measure_improvement(
                self._forward, self._head, own, group.stack, self._schedule, worlds.tolist(), self._states
            )
            if self._must_improve:
                refuse_unimproved(improvement, worlds.tolist())
            measured = np.stack([improvement.public, improvement.trained, improvement.moved])
            return {"rows": group.optimizer.rows.cpu(), "figures": torch.from_numpy(measured)}
        except KeyboardInterrupt:
            if group.is_whole and group.is_resumable:
                journal.save(group.position(number))
            raise

    def close(self) -> None:
        """Undo what the forward pass changed in the model."""
        self._forward.close()


class GroupTraining:
    """The worlds of one group under way."""

    is_resumable = True  # whether `position` holds all of its state

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

    def run(self, number: int, journal: Journal, checkpoint_seconds: float) -> None:
        """Take all remaining steps, reporting each in order."""
        picks = self.schedule.batches(self.worlds)  # (G, steps, batch)

        def report(taken: StepLoss) -> None:
            journal.note(number, GroupStep(taken.step, taken.num_tokens, self.read(taken)))

        saved = time.monotonic()
        unread: StepLoss | None = None
        try:
            with HeldInterrupt() as interrupt:
                for step in range(self.optimizer.num_steps, picks.shape[1]):
                    before, unread = unread, self.step(picks[:, step])
                    if before is not None:
                        report(before)
                    is_due = time.monotonic() - saved >= checkpoint_seconds
                    if is_due or interrupt.came:
                        report(unread)
                        unread = None
                        interrupt.release()
                    if is_due:
                        if self.is_resumable:
                            journal.save(self.position(number))
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

    def finish(self) -> None:
        """After the last step: the rows are what was trained."""

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
