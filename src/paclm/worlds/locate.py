"""Where one record of a workspace is: for requests to delete it. Its text is compared and never handed out.

Who is in which world is no secret of the guarantee; which world was realized is, and nothing here knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paclm.errors import InvalidInput
from paclm.worlds.workspace import PARTS, Part, Workspace

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one record is, and who shares its fate."""

    id: str
    part: Part
    group: str | None
    group_members: tuple[str, ...]
    """Ids of the group's records, in the same worlds; empty where the record stands for itself."""
    same_text: tuple[str, ...]
    """Ids of other records with the very same text."""
    source: str
    in_worlds: tuple[int, ...]
    """That were trained on it."""
    worlds: int
    """How many the workspace has."""


def locate_record(workspace: Workspace, identifier: str) -> Whereabouts:
    """Find a record by its id in whatever part of the workspace it is."""
    parts = {part: workspace.records(part) for part in PARTS}
    everyone = [record for found in parts.values() for record in found]
    places = [(part, record) for part, found in parts.items() for record in found if record.id == identifier]
    if not places:
        raise InvalidInput(_not_found(identifier, [record.id for record in everyone if record.group == identifier]))
    part, record = places[0]
    in_worlds: tuple[int, ...] = ()
    if part != "heldout":
        row = [member.id for member in workspace.members()].index(identifier)
        in_worlds = tuple(int(world) for world in workspace.membership[row].nonzero()[0])
    return Whereabouts(
        id=identifier,
        part=part,
        group=record.group,
        group_members=tuple(other.id for other in everyone if record.group is not None and other.group == record.group),
        same_text=tuple(other.id for other in everyone if other.text == record.text and other.id != identifier),
        source=record.source,
        in_worlds=in_worlds,
        worlds=workspace.num_worlds,
    )


def name_some(ids: Sequence[str]) -> str:
    """The first few of these ids, and how many more there are."""
    more = f" and {len(ids) - _SHOWN:,} more (--json lists all)" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more


def _not_found(identifier: str, group_members: list[str]) -> str:
    if group_members:
        return f"{identifier!r} is no record but a group. Its records: {name_some(group_members)}."
    return (
        f"No record has the id {identifier!r}. An id is the field id (or --id-field) of the corpus, the path of a file "
        "in a folder, or else the first 16 digits of the SHA-256 of the text; the workspace's corpus/*.jsonl list all."
    )
