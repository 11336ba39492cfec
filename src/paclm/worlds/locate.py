"""Find one record of a workspace, for requests to delete it. Its text is compared and never returned.

Memberships are not secret under the guarantee; the realized world is, and is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paclm.errors import InvalidInput
from paclm.worlds.records import Record
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
    places = ((part, row, record) for part in PARTS for row, record in enumerate(workspace.records(part)))
    part, row, record = next((place for place in places if place[2].id == identifier), (None, 0, None))
    if part is None or record is None:
        if members := [other.id for other in _everyone(workspace) if other.group == identifier]:
            raise InvalidInput(f"{identifier!r} is a group, not a record. Its records: {name_some(members)}.")
        raise InvalidInput(
            f"No record has the id {identifier!r}. An id is the field id (or --id-field) of the corpus, the path of a "
            "file in a folder, or the first 16 digits of the SHA-256 of the text. corpus/*.jsonl in the workspace list "
            "all."
        )
    in_worlds: tuple[int, ...] = ()
    if part != "heldout":
        row += len(workspace.membership) - len(workspace.canaries()) if part == "canaries" else 0
        in_worlds = tuple(int(world) for world in workspace.membership[row].nonzero()[0])
    together, same_text = list[str](), list[str]()
    for other in _everyone(workspace):
        if record.group is not None and other.group == record.group:
            together.append(other.id)
        if other.text == record.text and other.id != identifier:
            same_text.append(other.id)
    return Whereabouts(
        id=identifier,
        part=part,
        group=record.group,
        group_members=tuple(together),
        same_text=tuple(same_text),
        source=record.source,
        in_worlds=in_worlds,
        worlds=workspace.num_worlds,
    )


def _everyone(workspace: Workspace) -> Iterator[Record]:
    return (record for part in PARTS for record in workspace.records(part))


def name_some(ids: Sequence[str]) -> str:
    """The first ids, and how many more there are."""
    more = f" and {len(ids) - _SHOWN:,} more (--json lists all)" if len(ids) > _SHOWN else ""
    return ", ".join(ids[:_SHOWN]) + more
