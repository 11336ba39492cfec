"""`paclm records`: where a record of the workspace is. Its text is never shown."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paclm.cli.console import JsonFlag, print_json

records = typer.Typer(help="Look up records of a workspace.", no_args_is_help=True, rich_markup_mode=None)


@records.callback()
def _group() -> None:
    pass


@records.command()
def find(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init.")],
    identifier: Annotated[str, typer.Argument(metavar="ID", help="Of the record.")],
    as_json: JsonFlag = False,
) -> None:
    """
    Say where a record is: held out, or in which worlds

    For requests to delete: these worlds were trained on it. Who is in which world is no secret of the guarantee; which
    world was realized is, and is not looked at.

    Example usage:

    \b
        paclm records find clinic note-17
        paclm records find clinic note-17 --json | jq .in_worlds
    """
    from paclm.worlds.locate import locate_record, name_some
    from paclm.worlds.workspace import Workspace

    found = locate_record(Workspace.open(workspace), identifier)
    if as_json:
        print_json(asdict(found))
        return
    lines = [f"{found.id}, read from {found.source}" if found.source else found.id]
    if found.part == "heldout":
        lines.append("  held out: no world has seen it")
    else:
        kind = "planted; in" if found.part == "canaries" else "in"
        listed = ", ".join(map(str, found.in_worlds))
        lines.append(f"  {kind} {len(found.in_worlds)} of {found.worlds} worlds: {listed}")
    if found.group is not None:
        lines.append(f"  group {found.group}, all in the same worlds: {name_some(found.group_members)}")
    if found.same_text:
        lines.append(f"  the same text again: {name_some(found.same_text)}")
    typer.echo("\n".join(lines))
