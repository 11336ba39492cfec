"""Progress where nobody watches a terminal: one line of text now and then, for logs and files."""

from __future__ import annotations

import threading
from typing import Any

from rich.progress import Progress, Task, TaskID

from paclm.config import format_duration

SECONDS = 30.0
"""Between two lines."""


class PlainProgress(Progress):
    """Counts as rich's does and draws no bar: a line every `seconds`, and one at the end of a task that took longer.

    The lines come from a thread of their own, so that a long step does not look like a program that hangs.
    """

    def __init__(self, *columns: Any, seconds: float = SECONDS, **options: Any) -> None:
        super().__init__(*columns, **options, disable=True, speed_estimate_period=120.0)
        self._seconds = seconds
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def start(self) -> None:
        self._teller.start()

    def stop(self) -> None:
        self._over.set()
        self._teller.join()
        for task in self.tasks:
            self._say_end(task)

    def remove_task(self, task_id: TaskID) -> None:
        self._say_end(self._tasks[task_id])
        super().remove_task(task_id)

    def say(self) -> None:
        """Write where each task stands."""
        with self._lock:  # no task moves on, or ends, in the middle of its line
            lines = [line(task) for task in self.tasks if not task.finished]
        for said in lines:  # a reader that stands still holds up nobody but this thread
            self._print(said)

    def _tell(self) -> None:
        while not self._over.wait(self._seconds):
            self.say()

    def _say_end(self, task: Task) -> None:
        if (task.elapsed or 0.0) >= self._seconds:
            self._print(line(task))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def line(task: Task) -> str:
    """Where a task stands: what is done, of how much, how fast, and how long it will still take."""
    said = f"{task.description.strip()}: {task.completed:,.0f}"
    if task.total is None:
        return f"{said} so far"
    said += f" of {task.total:,.0f}"
    if task.finished:
        return f"{said} in {format_duration(task.finished_time or 0.0)}"
    if speed := task.speed:
        said += f", {f'{speed:,.1f} a second' if speed >= 1 else f'{60 * speed:,.1f} a minute'}"
        said += f", about {format_duration((task.total - task.completed) / speed)} left"
    return said
