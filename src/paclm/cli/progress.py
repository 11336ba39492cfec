"""Progress on standard error: a bar on a terminal, a line of text every 30 seconds elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn

from paclm.config import format_duration

SECONDS = 30.0  # between two lines


def progress(quiet: bool = False, transient: bool = False) -> Progress:
    """A progress display that leaves standard output clean for figures."""
    console = Console(stderr=True)
    if not (quiet or console.is_terminal):
        return PlainProgress(console=Console(stderr=True, soft_wrap=True))  # a file has no width to wrap at
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=quiet, transient=transient)


def task_starter(bar: Progress, indent: int = 0) -> Callable[[str, int], Callable[[int], None]]:
    """A function that starts a task (name, total), removes the task before it, and returns a function to advance it."""
    shown: list[TaskID] = []

    def start(what: str, total: int) -> Callable[[int], None]:
        while shown:
            bar.remove_task(shown.pop())
        task = bar.add_task(" " * indent + what, total=total or None)
        shown.append(task)
        return lambda count: bar.advance(task, count)

    return start


class PlainProgress(Progress):
    """Counts like rich's `Progress` and prints a line every `seconds`, and one when a longer task ends.

    Lines are printed by a thread, so that one long step does not look like a program that hangs.
    """

    def __init__(self, *columns: Any, seconds: float = SECONDS, **options: Any) -> None:
        super().__init__(*columns, **options, disable=True, speed_estimate_period=120.0)
        self._seconds = seconds
        self._stopped = threading.Event()
        self._printer = threading.Thread(target=self._print_often, name="progress", daemon=True)

    def start(self) -> None:
        self._printer.start()

    def stop(self) -> None:
        self._stopped.set()
        self._printer.join()
        for task in self.tasks:
            self._print_end(task)

    def remove_task(self, task_id: TaskID) -> None:
        self._print_end(self._tasks[task_id])
        super().remove_task(task_id)

    def _print_often(self) -> None:
        while not self._stopped.wait(self._seconds):
            with self._lock:  # each line shows one state of its task
                lines = [format_task(task) for task in self.tasks if not task.finished]
            for line in lines:  # outside the lock: a reader that blocks stops only this thread
                self._print(line)

    def _print_end(self, task: Task) -> None:
        if (task.elapsed or 0.0) >= self._seconds:
            self._print(format_task(task))

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


def format_task(task: Task) -> str:
    """What is done of how much, the speed, and the time left."""
    line = f"{task.description.strip()}: {task.completed:,.0f}"
    if task.total is None:
        return f"{line} so far"
    line += f" of {task.total:,.0f}"
    if task.finished:
        return f"{line} in {format_duration(task.finished_time or 0.0)}"
    if speed := task.speed:
        line += f", {f'{speed:,.1f} per second' if speed >= 1 else f'{60 * speed:,.1f} per minute'}"
        line += f", about {format_duration((task.total - task.completed) / speed)} left"
    return line
