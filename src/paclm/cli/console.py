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

from paclm.errors import MissingExtra, WorkspaceError

if TYPE_CHECKING:
    from rich.progress import Progress

    from paclm.worlds.workspace import Workspace

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]

EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "gguf", "cryptography"), "core"),
    **dict.fromkeys(("fastapi", "uvicorn", "pydantic", "prometheus_client"), "serve"),
    **dict.fromkeys(("matplotlib", "jinja2"), "report"),
    "dp_accounting": "dp",
}
"""Which extra of paclm brings a package: the bare package can plan and replay, and no more."""

WHEN_STOPPED: ContextVar[str] = ContextVar("WHEN_STOPPED", default="")
"""What a command says after Ctrl-C, beside that it stopped: what is kept, and how to go on."""


def need(*packages: str) -> None:
    """Refuse at once, before anything is done, where a package is missing that will be needed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, EXTRAS[package])


def open_trained(path: Path) -> Workspace:
    """Open a workspace whose worlds are trained. Quick: torch is imported only after it is clear that there is one."""
    from paclm.worlds.workspace import Workspace

    workspace = Workspace.open(path)
    if "worlds.safetensors" not in workspace.manifest.adapters:
        raise WorkspaceError(f"{path} has no trained worlds yet. Train them: paclm train {path}")
    return workspace


def print_json(figures: dict[str, Any]) -> None:
    """Print one JSON object; infinities and NaN, which JSON lacks, become null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    typer.echo(json.dumps(plain, indent=2))


def duration(seconds: float) -> str:
    """A time as people say it: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
