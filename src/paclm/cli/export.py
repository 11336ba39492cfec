"""`paclm export`: the adapters as PEFT folders, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import JsonFlag, open_trained, print_json

WARNING = (
    "Never publish these folders. An adapter carries what it was trained on, and no guarantee of paclm covers "
    "released weights: the guarantee is about served tokens only."
)


def export(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init, with trained worlds.")],
    peft: Annotated[Path, typer.Option(help="New folder for one PEFT folder per world.")],
    as_json: JsonFlag = False,
) -> None:
    """
    Write every world's adapter as a PEFT folder, for your own inspection

    Example usage:

    \b
        paclm export clinic --peft /private/clinic-peft
    """
    opened = open_trained(workspace)
    from paclm.engine.base import base_of
    from paclm.engine.loading import has_conv1d, load_stack
    from paclm.engine.peft_io import export_peft

    stack = load_stack(opened)
    base = base_of(opened)
    folders = export_peft(stack, peft, str(base.folder), has_conv1d(base))
    if as_json:
        print_json({"worlds": len(folders), "folder": str(peft), "parameters": stack.num_parameters})
    else:
        typer.echo(f"{len(folders)} PEFT folders of {stack.num_parameters:,} parameters each: {peft}")
    typer.echo(f"Warning: {WARNING}", err=True)
