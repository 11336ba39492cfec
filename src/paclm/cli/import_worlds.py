"""`paclm import`: worlds that were trained elsewhere, one PEFT folder each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import JsonFlag, WorkspaceArgument, YesFlag, confirm, print_json, print_wrapped
from paclm.config import in_shell
from paclm.errors import WorkspaceError


def import_worlds(
    workspace: WorkspaceArgument,
    peft: Annotated[Path, typer.Option(help="Folder with one PEFT folder per world: world-000, world-001, …")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace worlds that exist, and drop an unfinished training of them.")
    ] = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """
    Import worlds that were trained elsewhere

    The inverse of `paclm export --peft`. World i must have been trained on the records that column i of membership.npz
    assigns to it and on no others, and all worlds alike: the same recipe, the same rule for seeds, nothing chosen by
    looking at one world. The guarantee rests on that and paclm cannot check it, so you are asked to vouch for it. A
    workspace that has served keeps its worlds.

    Example usage:

    \b
        paclm import clinic --peft trained
        paclm import clinic --peft trained --replace --yes --json
    """
    from paclm.curator.custody import keep_address, refuse_new_worlds
    from paclm.worlds.layout import WORLDS_FILE
    from paclm.worlds.workspace import Workspace

    opened = Workspace.open(workspace)
    keep_address(opened.path)
    refuse_new_worlds(opened)
    from paclm.engine.checkpoint import Checkpoints
    from paclm.engine.imported_worlds import read_worlds
    from paclm.engine.training_job import only_training, training_folder

    unfinished = Checkpoints(training_folder(opened, "worlds"))
    with only_training(opened):
        if not replace and (WORLDS_FILE in opened.manifest.adapters or unfinished.folder.exists()):
            what = "trained worlds" if WORLDS_FILE in opened.manifest.adapters else "an unfinished training of worlds"
            again = f"paclm import {in_shell(workspace)} --peft {in_shell(peft)} --replace"
            raise WorkspaceError(f"{workspace} has {what} already. To replace that: {again}")
        found = read_worlds(opened, peft)
        if not yes:
            print_wrapped(
                f"{found.stack.num_worlds} adapters of {found.stack.num_parameters:,} parameters, trained on "
                f"{found.base_named!r}; this workspace has the base model {opened.base.name!r}. paclm cannot check how "
                "they were trained. The guarantee is void unless each world was trained only on the records that "
                "membership.npz assigns to it, and all worlds alike: the same base model, recipe and rule for seeds, "
                "nothing tuned, stopped or repeated for one world.",
                err=True,
            )
            confirm("Do you vouch for that?")
        refuse_new_worlds(opened)  # someone may have served while the question stood
        changed = found.save(opened)
        unfinished.remove()
    figures = {
        "file": str(changed.adapters_path / WORLDS_FILE),
        "worlds": found.stack.num_worlds,
        "parameters_per_world": found.stack.num_parameters,
        "rank": found.stack.spec.rank,
        "alpha": found.stack.spec.alpha,
        "trunk": found.stack.trunk,
        "base_named": found.base_named,
        "imported": changed.manifest.imported,
    }
    if as_json:
        print_json(figures)
        return
    typer.echo(f"Imported {figures['file']}: {figures['worlds']} worlds of {found.stack.num_parameters:,} parameters")
    typer.echo(f"Next: paclm votes {in_shell(workspace)} --prompt TEXT")
