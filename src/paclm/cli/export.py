"""`paclm export`: the adapters as PEFT folders, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import JsonFlag, TrainedArgument, open_trained, print_json


def export(
    workspace: TrainedArgument,
    peft: Annotated[Path, typer.Option(help="New folder for one PEFT folder per world.")],
    as_json: JsonFlag = False,
) -> None:
    """
    Write every world's adapter as a PEFT folder

    For your own inspection only: never publish them.

    Example usage:

    \b
        paclm export clinic --peft /private/clinic-peft
    """
    opened = open_trained(workspace)
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
