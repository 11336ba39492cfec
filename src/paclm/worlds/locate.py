"""Find one record of a workspace, for requests to delete it. Its text is compared and never returned.

Memberships are not secret under the guarantee; the realized world is, and is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paclm.errors import InvalidInput
from paclm.worlds.workspace import PARTS, Part, Workspace

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where one record is, and which records go with it."""

    id: str
    part: Part
    group: str | None
    group_members: tuple[str, ...]  # ids of its group's records, all in the same worlds; empty without a group
    same_text: tuple[str, ...]  # ids of other records with the same text
    source: str
    in_worlds: tuple[int, ...]  # worlds trained on it
    worlds: int  # number of worlds of the workspace


def locate_record(workspace: Workspace, identifier: str) -> Whereabouts:
    """Find a record by its id in any part of the workspace."""
    parts = {part: workspace.records(part) for part in PARTS}
    everyone = [record for found in parts.values() for record in found]
    places = [(part, record) for part, found in parts.items() for record in found if record.id == identifier]
    if not places:
        if members := [record.id for record in everyone if record.group == identifier]:
            raise InvalidInput(f"{identifier!r} is a group, not a record. Its records: {name_some(members)}.")
        raise InvalidInput(
            f"No record has the id {identifier!r}. An id is the field id (or --id-field) of the corpus, the path of a "
            "file in a folder, or the first 16 digits of the SHA-256 of the text. corpus/*.jsonl in the workspace list "
            "all."
        )
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
    """The first ids, and how many more there are."""
    more = f" and {len(ids) - _SHOWN:,} more (--json lists all)" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
