"""The groups of worlds of a training: which are left, how far the others are, and what is finished.

This process and the threads that speak with its workers take groups from it, one after another. Which of them trains a
group does not change its adapters. A group that is given back is taken by another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paclm.engine.checkpoint import Checkpoints, Position


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
class GroupStep:
    """A step of a group."""

    step: int  # from 1
    num_tokens: int
    loss: float


OnProgress = Callable[[Progress], None]


class GroupQueue:
    """Groups by their numbers; for several threads."""

    def __init__(
        self,
        group_steps: Sequence[int],
        checkpoints: Checkpoints | None = None,
        on_progress: OnProgress | None = None,
        collect: Callable[[int, dict[str, Tensor]], None] = lambda number, done: None,
    ) -> None:
        """`collect` gets the tensors of each group that is finished, now or in an earlier run."""
        self._group_steps = group_steps
        self._checkpoints = checkpoints
        self._on_progress = on_progress
        self._collect = collect
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._left: deque[int] = deque()
        self._taken: set[int] = set()
        self._steps = [0] * len(group_steps)
        for number, steps in enumerate(group_steps):
            done = None if checkpoints is None else checkpoints.load_group(number)
            if done is None:
                self._left.append(number)
            else:
                self._steps[number] = steps
                collect(number, done)

    @property
    def num_left(self) -> int:
        """Groups that nobody has taken."""
        return len(self._left)

    @property
    def is_over(self) -> bool:
        """Whether all groups are finished, or none will be."""
        return self._failure is not None or not (self._left or self._taken)

    def take(self) -> int | None:
        """The next group to train; None when all are finished. Waits while groups that are taken may be given back."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self.is_over)
            self._raise_failure()
            if not self._left:
                return None
            number = self._left.popleft()
            self._taken.add(number)
            return number

    def position(self, number: int) -> Position | None:
        """Where to continue this group, if it was begun."""
        return None if self._checkpoints is None else self._checkpoints.load_position(number)

    def save(self, position: Position) -> None:
        """Keep the position inside a group."""
        if self._checkpoints is not None:
            self._checkpoints.save_position(position)

    def note(self, number: int, taken: GroupStep) -> None:
        """Report a step; raises what stopped another rank."""
        with self._changed:
            self._raise_failure()
            self._steps[number] = taken.step
            if self._on_progress is not None:
                done, total = sum(self._steps), sum(self._group_steps)
                self._on_progress(Progress(number, len(self._steps), done, total, taken.num_tokens, taken.loss))

    def finish(self, number: int, done: dict[str, Tensor]) -> None:
        """Keep a trained group."""
        if self._checkpoints is not None:
            self._checkpoints.save_group(number, done)
        with self._changed:
            self._collect(number, done)
            self._steps[number] = self._group_steps[number]
            self._taken.discard(number)
            self._changed.notify_all()

    def give_back(self, number: int) -> None:
        """Leave a group to another, which continues at its last position."""
        with self._changed:
            self._taken.discard(number)
            self._left.appendleft(number)
            self._changed.notify_all()

    def stop(self, failure: BaseException) -> None:
        """Let everyone who takes or trains a group end with this error."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
