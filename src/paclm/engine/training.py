"""Training all worlds, a group at a time: one forward and backward pass moves every world of the group.

    schedule   which blocks each world sees in each step          checkpoint    what survives a kill
    loss       each world's mean over its own tokens              optimizer     AdamW, one row per world
                                                                  improvement   the check at the end

The loss of a step is read once the next step is launched, so that a GPU never waits for the host; but no position and
no group is saved before all of its losses are read and finite. Ctrl-C lets the step under way end, and its position is
saved.

A world's adapter is what training it alone would give: the base is frozen, each world's rows meet only its own
adapter, its loss is its own mean, and AdamW is elementwise. Prints nothing, knows no workspace, and is never told
which world is the realized one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paclm.config import TrainingConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.checkpoint import Checkpoints, Position, identify_run
from paclm.engine.improvement import Improvement, measure_improvement, refuse_unimproved
from paclm.engine.interrupts import HeldInterrupt
from paclm.engine.loss import batch_loss, make_batch, world_means
from paclm.engine.optimizer import StackedAdamW, flatten, unflatten
from paclm.engine.schedule import Blocks, BoolArray, IntArray, Schedule
from paclm.engine.training_forward import Forward, make_forward
from paclm.engine.weights import output_layer
from paclm.errors import EngineError


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands after a step."""

    group: int
    num_groups: int
    step: int
    """Steps done, over all groups."""
    num_steps: int
    num_tokens: int
    """Tokens predicted in this step, over the worlds of the group."""
    loss: float
    """Mean over the worlds of the group in this step."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What a step came to; on a GPU perhaps still on its way."""

    step: int
    """Of the group, from 1."""
    num_tokens: int
    means: Tensor
    """(k,) on the CPU: the loss of each world. Holds nothing yet before `arrived`."""
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, means: Tensor, step: int, num_tokens: int) -> StepLoss:
        """Start the copy to the CPU, and wait for nothing."""
        copy = means.to("cpu", non_blocking=True)  # on a GPU into pinned memory, on a CPU no copy at all
        arrived = None
        if means.is_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(means.device))
        return cls(step, num_tokens, copy, arrived)

    def wait(self) -> Tensor:
        """The means (k,), once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.means


@dataclass(frozen=True, slots=True)
class Trained:
    """All worlds, trained and checked."""

    stack: AdapterStack
    improvement: Improvement
    worlds_per_step: int
    seconds: float
    """Spent in this call; a resumed run has spent more."""


OnProgress = Callable[[Progress], None]


def adapter_spec(settings: TrainingConfig) -> AdapterSpec:
    """The adapters that [training] asks for."""
    if settings.targets == "attention":
        return AdapterSpec(rank=settings.rank, alpha=settings.alpha, attention_only=True)
    if settings.targets == "auto":
        return AdapterSpec(rank=settings.rank, alpha=settings.alpha)
    names = (settings.targets,) if isinstance(settings.targets, str) else settings.targets
    return AdapterSpec(rank=settings.rank, alpha=settings.alpha, targets=names)


def make_schedule(blocks: Blocks, membership: BoolArray, settings: TrainingConfig, seed: int) -> Schedule:
    """The order in which [training] lets worlds see blocks."""
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

    With a `folder`, what is done is kept there, and `resume` goes on from it; remove it once the stack is saved.
    A world that is no better on its own records is refused, unless a study that means to spoil worlds says otherwise.
    """
    began = time.monotonic()
    spec = adapter_spec(settings)
    start = AdapterStack.initial(
        find_targets(model, spec), spec, schedule.num_worlds, schedule.seed, base, settings.coupled
    )
    checkpoints = Checkpoints(folder) if folder is not None else None
    if checkpoints is not None:
        run = identify_run(schedule, {"base": base, "dtype": str(model.dtype), **asdict(settings)})
        earlier = checkpoints.worlds_per_step(run) if resume else None
        if earlier is None:
            checkpoints.begin(run, worlds_per_step)
        worlds_per_step = earlier or worlds_per_step
    groups = schedule.groups(worlds_per_step)
    group_steps = [int(schedule.num_steps[worlds].max()) for worlds in groups]
    rows = flatten(start).rows  # (m, p)
    figures = np.zeros((3, schedule.num_worlds))  # public, trained, moved
    head, forward = output_layer(model), make_forward(model)
    try:
        for number, worlds in enumerate(groups):
            done = checkpoints.load_group(number) if checkpoints is not None else None
            if done is None:
                own = start.worlds(worlds.tolist())
                group = GroupTraining(forward, head, own, schedule, worlds, settings)
                if checkpoints is not None:  # Ctrl-C in here must not save a group that has not gone back to its place
                    group.restore(checkpoints.load_position(number))
                try:
                    group.run(number, group_steps, checkpoints, on_progress, checkpoint_seconds)
                    improvement = measure_improvement(forward, head, own, group.stack, schedule, worlds.tolist())
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
        forward: Forward,
        head: nn.Linear,
        start: AdapterStack,
        schedule: Schedule,
        worlds: IntArray,
        settings: TrainingConfig,
    ) -> None:
        flat = flatten(start.to(head.weight.device))
        self.forward = forward
        self.head = head
        self.stack = flat.stack
        self._trained = _leaves(flat.stack, len(worlds))  # made anew only when worlds finish: there are hundreds
        self.optimizer = StackedAdamW(flat.rows, settings.learning_rate, settings.weight_decay)
        self.schedule = schedule
        self.worlds = worlds
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
        """Take all steps that are left, and report each of them, in order."""
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
        """One step of the worlds that are not done yet: the first k. On a GPU it is launched only."""
        k = int((self.num_steps > self.optimizer.num_steps).sum())
        batch = make_batch(self.schedule.blocks, picks[:k], self.head.weight.device)
        if k != self._trained.num_worlds:
            self._trained = _leaves(self.stack, k)
        A, B = self._trained.A, self._trained.B
        hidden = self.forward(batch.ids, A, B, self.stack.spec.scale)  # (places, d)
        total, each = batch_loss(hidden, self.head, batch)
        leaves = [leaf for layer in self.stack.layers for leaf in (A[layer], B[layer])]
        gradients = torch.autograd.grad(total, leaves)
        taken = StepLoss.send(world_means(each, batch), self.optimizer.num_steps + 1, batch.num_tokens)
        self.optimizer.step(torch.cat([gradient.flatten(1) for gradient in gradients], 1))
        return taken

    def read(self, taken: StepLoss) -> float:
        """The mean loss of a step over its worlds; one that is not finite is refused."""
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
        """Whether the group stands between two steps, all of whose losses are read and finite."""
        return self.num_read == self.optimizer.num_steps  # a step counts itself before it moves a number

    def position(self, number: int) -> Position:
        """Where the group stands; to be kept only where it is whole."""
        held = self.optimizer
        return Position(number, held.num_steps, held.rows, held.first, held.second)

    def restore(self, position: Position | None) -> None:
        """Go on from where the group was left, if it was."""
        if position is None:
            return
        self.optimizer.num_steps = position.num_steps
        for name in ("rows", "first", "second"):
            getattr(self.optimizer, name).copy_(getattr(position, name))
        self.num_read = position.num_steps


def _leaves(stack: AdapterStack, num_worlds: int) -> AdapterStack:
    """The first worlds of a stack, the same memory, to be differentiated."""
    A = {layer: a[:num_worlds].detach().requires_grad_() for layer, a in stack.A.items()}
    B = {layer: b[:num_worlds].detach().requires_grad_() for layer, b in stack.B.items()}
    return AdapterStack(stack.spec, stack.base, A, B)
