"""What every command shares: JSON on request, progress on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]


def print_json(figures: dict[str, Any]) -> None:
    """Print one JSON object; infinities and NaN, which JSON lacks, become null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    typer.echo(json.dumps(plain, indent=2))


def progress(quiet: bool = False, transient: bool = False) -> Progress:
    """A progress bar on standard error, so that standard output stays clean for figures."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
        transient=transient,
    )


def tasks(bar: Progress, indent: int = 0) -> Callable[[str, int], Callable[[int], None]]:
    """A lab's progress on one bar: what is counted, how many there are; the last task goes when the next begins."""
    from rich.progress import TaskID

    shown: list[TaskID] = []

    def start(what: str, total: int) -> Callable[[int], None]:
        while shown:
            bar.remove_task(shown.pop())
        task = bar.add_task(" " * indent + what, total=total or None)
        shown.append(task)
        return lambda count: bar.advance(task, count)

    return start
