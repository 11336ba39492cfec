"""`paclm export`: the adapters as PEFT folders, or the folder of a worker; each with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import JsonFlag, TrainedArgument, open_trained, print_json
from paclm.config import in_shell
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.worlds.workspace import Workspace


def export(
    workspace: TrainedArgument,
    peft: Annotated[Path | None, typer.Option(help="New folder for one PEFT folder per world.")] = None,
    worker: Annotated[Path | None, typer.Option(help="New folder with what a worker on another host needs.")] = None,
    rank: Annotated[int | None, typer.Option(help="Which of the workers it is for, from 1 on.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many there are, with rank 0.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """
    Write adapters as PEFT folders, or the folder of a worker

    PEFT folders are for your own inspection only: never publish them. The folder of a worker holds the adapters of its
    worlds and no records, no other worlds and nothing of secret and ledger; only `paclm worker` opens it.

    Example usage:

    \b
        paclm export clinic --peft /private/clinic-peft
        paclm export clinic --worker /private/clinic-rank1 --rank 1 --workers 4
    """
    if (peft is None) == (worker is None):
        raise InvalidInput("Pass either --peft FOLDER, or --worker FOLDER with --rank R and --workers N.")
    if (worker is None, worker is None) != (rank is None, workers is None):
        raise InvalidInput("--worker FOLDER, --rank R and --workers N go together: pass all three.")
    opened = open_trained(workspace)
    if peft is not None:
        _export_peft(opened, peft, as_json)
    elif worker is not None and rank is not None and workers is not None:
        _export_worker(opened, worker, rank, workers, as_json)


def _export_peft(opened: Workspace, peft: Path, as_json: bool) -> None:
    from paclm.engine.base_model import base_of
    from paclm.engine.loading import has_conv1d, load_stack
    from paclm.engine.peft_io import export_peft

    stack, base = load_stack(opened), base_of(opened)
    folders = export_peft(stack, peft, str(base.folder), has_conv1d(base))
    if as_json:
        print_json({"worlds": len(folders), "folder": str(peft), "parameters": stack.num_parameters})
    else:
        typer.echo(f"{len(folders)} PEFT folders of {stack.num_parameters:,} parameters each: {peft}")
    typer.echo(
        "Warning: Never publish these folders. An adapter contains what it was trained on, and the guarantee covers "
        "served tokens only, not weights.",
        err=True,
    )


def _export_worker(opened: Workspace, folder: Path, rank: int, workers: int, as_json: bool) -> None:
    from paclm.engine.worker_folder import export_worker

    which = export_worker(opened, folder, rank, workers)
    if as_json:
        print_json({"worlds": [which.start, which.stop], "folder": str(folder)})
    else:
        start = f"paclm worker {in_shell(folder)} --rank {rank} --workers {workers} --rendezvous HOST:PORT"
        typer.echo(f"{which.stop - which.start} of {opened.num_worlds} worlds: {folder}. On its host: {start}")
    typer.echo(
        "Warning: Keep this folder private. An adapter contains what it was trained on, and the guarantee covers "
        "served tokens only, not weights.",
        err=True,
    )
