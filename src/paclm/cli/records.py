"""`paclm records`: where a record of the workspace is. Its text is never shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.cli.console import JsonFlag, print_json
from paclm.errors import InvalidInput

if TYPE_CHECKING:
    from paclm.worlds.workspace import Workspace

records = typer.Typer(help="Look up records of a workspace.", no_args_is_help=True, rich_markup_mode=None)

_SHOWN = 8


@records.callback()
def _group() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one record is, and who shares its fate."""

    id: str
    part: str
    """train, heldout or canaries."""
    group: str | None
    group_members: tuple[str, ...]
    """Ids of the group's records, in the same worlds; empty where the record stands for itself."""
    same_text: tuple[str, ...]
    """Ids of other records with the very same text."""
    source: str
    worlds: tuple[int, ...]
    """That were trained on it."""
    num_worlds: int
    """Of the workspace."""


def locate_record(workspace: Workspace, identifier: str) -> Whereabouts:
    """Find a record by its id in whatever part of the workspace it is."""
    parts = {part: workspace.records(part) for part in ("train", "heldout", "canaries")}
    everyone = [record for found in parts.values() for record in found]
    places = [(part, record) for part, found in parts.items() for record in found if record.id == identifier]
    if not places:
        raise InvalidInput(_not_found(identifier, [record.id for record in everyone if record.group == identifier]))
    part, record = places[0]
    worlds: tuple[int, ...] = ()
    if part != "heldout":
        row = [member.id for member in workspace.members()].index(identifier)
        worlds = tuple(int(world) for world in workspace.membership[row].nonzero()[0])
    return Whereabouts(
        id=identifier,
        part=part,
        group=record.group,
        group_members=tuple(other.id for other in everyone if record.group is not None and other.group == record.group),
        same_text=tuple(other.id for other in everyone if other.text == record.text and other.id != identifier),
        source=record.source,
        worlds=worlds,
        num_worlds=workspace.num_worlds,
    )


def _not_found(identifier: str, group_members: list[str]) -> str:
    if group_members:
        return f"{identifier!r} is no record but a group. Its records: {_names(group_members)}."
    return (
        f"No record has the id {identifier!r}. An id is the field id (or --id-field) of the corpus, the path of a file "
        "in a folder, or else the first 16 digits of the SHA-256 of the text; the workspace's corpus/*.jsonl list all."
    )


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
        paclm records find clinic note-17 --json | jq .worlds
    """
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
        lines.append(f"  {kind} {len(found.worlds)} of {found.num_worlds} worlds: {', '.join(map(str, found.worlds))}")
    if found.group is not None:
        lines.append(f"  group {found.group}, all in the same worlds: {_names(found.group_members)}")
    if found.same_text:
        lines.append(f"  the same text again: {_names(found.same_text)}")
    typer.echo("\n".join(lines))


def _names(ids: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more (--json lists all)" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
