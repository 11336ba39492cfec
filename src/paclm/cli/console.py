"""Shared by all commands: their arguments, text and JSON output, questions, opening a trained workspace."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from paclm.config import PromiseName, in_shell, parse_count
from paclm.errors import InvalidInput, MissingExtra, WorkspaceError

if TYPE_CHECKING:
    from paclm.curator.streams import PromiseFigures
    from paclm.engine.dp_training import DpPlan
    from paclm.engine.training_plan import TrainingPlan
    from paclm.worlds.workspace import Workspace

WorkspaceArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init.")]
TrainedArgument = Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")]
ServedArgument = Annotated[
    Path,
    typer.Argument(help="Folder made by paclm init, with trained worlds or, for the promise corpus, a DP adapter."),
]
ServableArgument = Annotated[
    Path,
    typer.Argument(
        help="Folder made by paclm init, with trained worlds or, for the promise corpus, a DP adapter; or a student, "
        "made by paclm distill.",
    ),
]
WitnessOption = Annotated[
    str | None,
    typer.Option(
        envvar="PACLM_WITNESS",
        metavar="PATH|URL",
        help="The ledger's witness: a file on another disk, or a database on another server (postgresql://…).",
    ),
]
PromiseOption = Annotated[
    PromiseName,
    typer.Option(help="half: which half of the corpus was used; corpus: whether a record is in the corpus (DP)."),
]
MixPromisesFlag = Annotated[
    bool,
    typer.Option(
        "--mix-promises",
        help="Serve also where the other promise was served: nothing is then promised about the corpus, ever.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

NO_WITNESS = (
    "a folder rolled back or copied by hand would not be detected, and adopting a backup charges the whole budget. "
    "Name a file on another disk (PACLM_WITNESS=/mnt/other-disk/NAME.witness) or a database on another server "
    "(PACLM_WITNESS=postgresql://…)."
)

STOP_MESSAGE: ContextVar[str] = ContextVar("STOP_MESSAGE", default="")
"""Printed after Ctrl-C: what is kept, and how to continue."""

_DEFAULT_WIDTH = 80
_LAST_COMMAND = re.compile(r":\s+(paclm .*)$")
_PLACEHOLDER = "\0"
"""Stands for each character of a command while text is wrapped: no line may break inside a command."""


def require_packages(*packages: str) -> None:
    """Raise `MissingExtra` before any work is done if a package is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package)


def open_trained(path: Path) -> Workspace:
    """Open a workspace whose worlds are trained. Quick: does not import torch."""
    from paclm.worlds.layout import WORLDS_FILE
    from paclm.worlds.workspace import Workspace

    workspace = Workspace.open(path)
    if WORLDS_FILE not in workspace.manifest.adapters:
        raise WorkspaceError(f"{path} has no trained worlds yet. Train them: paclm train {in_shell(path)}")
    if workspace.runtime.device != "cuda":
        warn_of_threads(workspace)
    return workspace


def open_for(promise: PromiseName, path: Path) -> Workspace:
    """Open a workspace that can be served under this promise. Quick: does not import torch."""
    from paclm.curator.dp_decoder import check_dp_adapter
    from paclm.curator.preflight import budgets_of
    from paclm.worlds.workspace import Workspace

    if promise == "half":
        workspace = open_trained(path)
        budgets_of(workspace)
        return workspace
    workspace = Workspace.open(path)
    check_dp_adapter(workspace)
    if workspace.runtime.device != "cuda":
        warn_of_threads(workspace)
    return workspace


def warn_of_threads(workspace: Workspace) -> None:
    """Warn if [runtime] sets more threads than there are cores; raise if far more."""
    from paclm.engine.cores import check_threads

    if warning := check_threads(workspace.runtime.threads):
        typer.echo(f"Warning: {warning}", err=True)


def confirm(question: str) -> None:
    """Ask on standard error; exit with status 1 after a no."""
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as aborted:
        if not isinstance(aborted.__context__, EOFError):  # a no, or Ctrl-C
            raise
        typer.echo(err=True)  # the question ends without a line break
        raise InvalidInput(
            "No answer: standard input is not a terminal, or has ended. Nothing was done. To skip the question, add "
            "--yes."
        ) from None


def whole_number(option: str, text: str) -> int:
    """Parse a number of tokens: `100000`, `100k`, `2M`."""
    count = parse_count(text)
    if count.denominator != 1 or count < 1:
        raise InvalidInput(f"{option} must be a whole number of at least 1, not {text!r}.")
    return int(count)


def print_json(figures: dict[str, Any]) -> None:
    """Print one JSON object; infinities and NaN, which JSON lacks, become null at any depth."""
    finite = json.loads(json.dumps(figures), parse_constant=lambda _: None)
    typer.echo(json.dumps(finite, indent=2, allow_nan=False))


def print_fields(fields: Mapping[str, str], *, indent: int = 2, err: bool = False) -> None:
    """Print one line `name  text` per field, the texts aligned."""
    column = indent + max(map(len, fields)) + 2
    for name, text in fields.items():
        print_wrapped(f"{' ' * indent + name:<{column}}{text}", err=err, column=column)


def format_size(num_bytes: int) -> str:
    """A size in MiB or GiB."""
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


def layers_in_words(plan: TrainingPlan | DpPlan, num_worlds: int = 1) -> str:
    """Which decoder layers carry adapters."""
    last = "the last " if plan.trunk and plan.trunk + plan.adapted_layers == plan.num_layers else ""
    words = f"adapters in {last}{plan.adapted_layers} of {plan.num_layers}"
    below = "shared by all worlds" if num_worlds > 1 else "left as they are"
    return f"{words}; the {plan.trunk} below are {below}" if plan.trunk else words


def format_guarantee(mia: float, world_id: float, num_worlds: int, unit: str, *, prior: str = "1/2") -> str:
    """Both bounds in one clause; the last digits are rounded up."""
    from paclm.privacy.bounds import format_bound

    return (
        f"no attack on whether {unit} in the secretly drawn half succeeds more than {format_bound(mia)} of the time "
        f"(a guess: {prior}), and none names the realized world more than {format_bound(world_id)} of the time "
        f"(a guess: 1/{num_worlds})"
    )


def format_corpus_guarantee(figures: PromiseFigures, unit: str) -> str:
    """(ε, δ) and what it bounds, or that nothing is promised; figures are rounded up."""
    from paclm.privacy.bounds import format_bound
    from paclm.privacy.dp import format_up

    if not figures["is_promised"]:
        return "nothing is promised about the corpus: it is served under both promises, half and corpus"
    low, high = format_bound(figures["tpr_at_fpr_0_1_percent"]), format_bound(figures["tpr_at_fpr_1_percent"])
    return (
        f"ε = {format_up(figures['epsilon'])}, δ = {format_up(figures['delta'])}: no attack on whether {unit} in the "
        f"corpus succeeds more than {format_bound(figures['mia_bound'])} of the time (a guess: 1/2), or finds more "
        f"than {low} of those inside at 0.1 % false positives, {high} at 1 %"
    )


def print_wrapped(text: str, *, err: bool = False, column: int = 0) -> None:
    """Print sentences that start in this column, wrapped at words on a terminal; lines to paste use `typer.echo`."""
    width = _width(sys.stderr if err else sys.stdout)
    typer.echo(text if width is None else wrap(text, width, column), err=err)


def wrap(text: str, width: int, column: int = 0) -> str:
    """Wrap the text from `column` on, replacing its own line breaks; a command at its end is left unbroken."""
    label, sentences, command = text[:column], text[column:].rstrip(), ""
    if found := _LAST_COMMAND.search(sentences):
        sentences, command = sentences[: found.start(1)], found[1]
    place = _PLACEHOLDER * len(command)
    words = " ".join([*sentences.split(), place])
    lines = textwrap.wrap(words, max(width - column, 20), break_long_words=False, break_on_hyphens=False)
    wrapped = f"\n{' ' * column}".join(lines)
    return label + (wrapped.replace(place, command) if command else wrapped)


def _width(stream: TextIO) -> int | None:
    """Columns of the terminal; None if the stream is not one."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_WIDTH
    except OSError:
        return _DEFAULT_WIDTH
