"""What every command shares: JSON on request, progress on a terminal, workspaces opened before anything slow."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paclm.config import in_shell, parse_count
from paclm.errors import InvalidInput, MissingExtra, WorkspaceError

if TYPE_CHECKING:
    from rich.progress import Progress

    from paclm.worlds.workspace import Workspace

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]

WHEN_STOPPED: ContextVar[str] = ContextVar("WHEN_STOPPED", default="")
"""What a command says after Ctrl-C, beside that it stopped: what is kept, and how to go on."""


def need(*packages: str) -> None:
    """Refuse at once, before anything is done, where a package is missing that will be needed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package)


def open_trained(path: Path) -> Workspace:
    """Open a workspace whose worlds are trained. Quick: torch is imported only after it is clear that there is one."""
    from paclm.worlds.layout import WORLDS_FILE
    from paclm.worlds.workspace import Workspace

    workspace = Workspace.open(path)
    if WORLDS_FILE not in workspace.manifest.adapters:
        raise WorkspaceError(f"{path} has no trained worlds yet. Train them: paclm train {in_shell(path)}")
    if workspace.runtime.device != "cuda":
        say_crowding(workspace)
    return workspace


def say_crowding(workspace: Workspace) -> None:
    """Caution before the slow work where [runtime] sets more threads than there are cores; refuse far too many."""
    from paclm.engine.cores import check_threads, crowding

    check_threads(workspace.runtime.threads)
    if caution := crowding(workspace.runtime.threads):
        typer.echo(f"Caution: {caution}", err=True)


def confirm(question: str) -> None:
    """Go on after a yes, and leave after a no; where nobody can answer, say how to do without the question."""
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as left:
        if not isinstance(left.__context__, EOFError):  # a no, or Ctrl-C
            raise
        typer.echo(err=True)  # the question ends without a line break
        raise InvalidInput(
            "Nobody answered: standard input is not a terminal, or has ended. Nothing was done. To go on without being "
            "asked, add --yes."
        ) from None


def whole_number(option: str, text: str) -> int:
    """A number of tokens as people write it: `100000`, `100k`, `2M`."""
    count = parse_count(text)
    if count.denominator != 1 or count < 1:
        raise InvalidInput(f"{option} must be a whole number of at least 1, not {text!r}.")
    return int(count)


def print_json(figures: dict[str, Any]) -> None:
    """Print one JSON object; infinities and NaN, which JSON lacks, become null wherever they are."""
    typer.echo(json.dumps(_finite(figures), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress(quiet: bool = False, transient: bool = False) -> Progress:
    """Progress on standard error, so that standard output stays clean for figures: a bar on a terminal, else lines."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (quiet or console.is_terminal):
        from paclm.cli.plain_progress import PlainProgress

        return PlainProgress(console=Console(stderr=True, soft_wrap=True))  # a file has no width to wrap at
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
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
