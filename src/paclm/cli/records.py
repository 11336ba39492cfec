"""`paclm records`: where a record of the workspace is. Its text is never shown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from paclm.cli.console import JsonFlag, WorkspaceArgument, print_json

records = typer.Typer(help="Look up records of a workspace.", no_args_is_help=True, rich_markup_mode=None)


@records.command()
def find(
    workspace: WorkspaceArgument,
    identifier: Annotated[str, typer.Argument(metavar="ID", help="Id of the record.")],
    as_json: JsonFlag = False,
) -> None:
    """
    Show where a record is: held out, or in which worlds

    For deletion requests: the worlds listed were trained on it. Which record is in which world is not secret; which
    world was realized is, and is not read here.

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
        lines.append("  held out: in no world")
    else:
        kind = "a canary, in" if found.part == "canaries" else "in"
        listed = ", ".join(map(str, found.in_worlds))
        lines.append(f"  {kind} {len(found.in_worlds)} of {found.worlds} worlds: {listed}")
    if found.group is not None:
        lines.append(f"  group {found.group}, all in the same worlds: {name_some(found.group_members)}")
    if found.same_text:
        lines.append(f"  other records with the same text: {name_some(found.same_text)}")
    typer.echo("\n".join(lines))
