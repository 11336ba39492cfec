"""Registry of the workspaces of this machine: their ledgers, DP trainings and promises over the same records.

Small files (0600) in the user's state folder hold hashes, paths, days and settings of DP training only. A corpus is
recognized by the smallest hashes of its texts (a bottom-k sketch), also with a few records more or less.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paclm.worlds.layout import MANIFEST_FILE, ledger_path
from paclm.worlds.storage import make_private_folder, write_private_json
from paclm.worlds.user_dirs import state_folder

_SKETCH = 4096  # hashes noted of a corpus: a smaller one is compared as a whole
_ESTIMATED = 256  # smallest of two corpora, of which the shared part is estimated
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHOWN = 3  # how many other workspaces are named


@dataclass(frozen=True, slots=True)
class Sighting:
    """Another workspace over (some of) the same records."""

    identifier: str
    path: Path
    shared: float  # estimated Jaccard similarity of the two corpora
    is_gone: bool

    def __str__(self) -> str:
        part = f"about {self.shared:.0%} of the same records" if self.shared >= 0.01 else "some of the same records"
        part = "the same corpus" if self.shared > 0.995 else part
        return f"{self.path} ({part}{'; deleted, but what it released remains public' if self.is_gone else ''})"


@dataclass(frozen=True, slots=True)
class LedgerNote:
    """A ledger that was made for a workspace, whether or not it still exists."""

    ledger: str
    made: str  # the day, in UTC


def composition_sentence(sightings: list[Sighting]) -> str:
    """The caution about DP trainings over the same records."""
    return (
        f"There were DP trainings over these records: {_named(sightings)}. Trainings of this workspace are composed "
        "with them, so that ε adds up."
    )


def overlap_sentence(sightings: list[Sighting]) -> str:
    """The caution about other workspaces over the same records."""
    who = "Another workspace with a ledger is" if len(sightings) == 1 else "Other workspaces with a ledger are"
    return (
        f"{who} over these records: {_named(sightings)}. Plan as if all totals added up: each draw is bounded at its "
        "own total, and all of them expose the same records."
    )


def _named(sightings: list[Sighting]) -> str:
    more = f" and {len(sightings) - _SHOWN} more" if len(sightings) > _SHOWN else ""
    return ", ".join(map(str, sightings[:_SHOWN])) + more


def sketch_texts(texts: Iterable[str]) -> list[str]:
    """The smallest hashes of the distinct texts."""
    smallest: set[str] = set()
    for text in texts:
        smallest.add(hashlib.sha256(text.encode()).hexdigest()[:16])
        if len(smallest) == 2 * _SKETCH:
            smallest = set(sorted(smallest)[:_SKETCH])
    return sorted(smallest)[:_SKETCH]


def find_workspaces(sketch: list[str], own_id: str) -> list[Sighting]:
    """Other workspaces of this machine, deleted ones too, that share records with this corpus; most shared first.

    One hash in common counts: a few records out of a large corpus are exposed by both all the same.
    """
    found = [
        Sighting(identifier, path, _similarity(sketch, other), is_gone=not _is_at(identifier, path))
        for identifier, path, other in _entries()
        if identifier != own_id and not set(sketch).isdisjoint(other)
    ]
    return sorted(found, key=lambda sighting: (-sighting.shared, str(sighting.path)))


def find_overlaps(sketch: list[str], own_id: str) -> list[Sighting]:
    """Those of them that ever had a ledger."""
    return [
        sighting
        for sighting in find_workspaces(sketch, own_id)
        if ledgers_noted(sighting.identifier) or (not sighting.is_gone and os.path.exists(ledger_path(sighting.path)))
    ]


def remember_workspace(identifier: str, path: Path, sketch: list[str]) -> None:
    """Note a new workspace."""
    write_private_json(_make_folder("workspaces") / f"{identifier}.json", {"path": str(path), "sketch": sketch})


def sketch_noted(identifier: str) -> list[str] | None:
    """The sketch of a noted workspace."""
    sketch = _read_note("workspaces", identifier).get("sketch")
    return list(map(str, sketch)) if isinstance(sketch, list) else None


def note_place(identifier: str, path: Path) -> None:
    """Update the path of a noted workspace that may have been moved; does nothing where that fails."""
    with suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
        file = state_folder() / "workspaces" / _file_name(identifier)
        noted = json.loads(file.read_text())
        if noted["path"] != str(path):
            write_private_json(file, {**noted, "path": str(path)})


def remember_ledger(workspace: str, ledger: str) -> bool:
    """Note a ledger of a workspace once; returns whether it could be noted."""
    notes = ledgers_noted(workspace)
    if ledger in (note.ledger for note in notes):
        return True
    notes.append(LedgerNote(ledger, _today()))
    return _write_note("ledgers", workspace, {"ledgers": list(map(asdict, notes))})


def ledgers_noted(workspace: str) -> list[LedgerNote]:
    """Ledgers ever made for a workspace on this machine, oldest first; none where notes cannot be read."""
    try:
        notes = _read_note("ledgers", workspace)
        return [LedgerNote(str(note["ledger"]), str(note["made"])) for note in notes.get("ledgers", [])]
    except (KeyError, TypeError):
        return []


def remember_training(workspace: str, run: str, details: Mapping[str, Any]) -> bool:
    """Note a DP training that is about to begin; returns whether it could be noted."""
    with lock_notes():
        note, trainings = _read_note("dp", workspace), {**trainings_noted(workspace), run: dict(details)}
        return _write_note("dp", workspace, {**note, "trainings": trainings})


def trainings_noted(workspace: str) -> dict[str, dict[str, Any]]:
    """DP trainings ever begun in a workspace, by run, with what `remember_training` was given."""
    trainings = _read_note("dp", workspace).get("trainings", {})
    return trainings if isinstance(trainings, dict) else {}


def remember_adapter(workspace: str, run: str, digest: str) -> str | None:
    """Note the adapter of a finished DP training, unless one is noted; returns the noted one, None if that failed."""
    with lock_notes():
        note = _read_note("dp", workspace)
        adapters = {run: digest, **note.get("adapters", {})}
        is_noted = _write_note("dp", workspace, {**note, "adapters": adapters})
        return str(adapters[run]) if is_noted else None


def remember_release(workspace: str) -> bool:
    """Note that tokens left under the promise `half`, with `lock_notes` held; returns whether it could be noted."""
    note = _read_note("dp", workspace)
    return _write_note("dp", workspace, {**note, "released": note.get("released") or _today()})


def is_release_noted(workspace: str) -> bool:
    """Whether tokens of a workspace were noted to have left under the promise `half`."""
    return bool(_read_note("dp", workspace).get("released"))


def remember_serving(workspace: str) -> bool:
    """Note that a workspace serves the promise `corpus`, with `lock_notes` held; returns whether it could be noted."""
    note = _read_note("dp", workspace)
    return _write_note("dp", workspace, {**note, "served": note.get("served") or _today()})


def is_serving_noted(workspace: str) -> bool:
    """Whether a workspace ever served the promise `corpus`."""
    return bool(_read_note("dp", workspace).get("served"))


@contextmanager
def lock_notes() -> Iterator[bool]:
    """Hold the lock of this user's notes, waiting for it; yields False where there is no folder to keep them in."""
    try:
        folder = _make_folder("dp")
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield True
    finally:
        os.close(descriptor)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _read_note(folder: str, workspace: str) -> dict[str, Any]:
    try:
        note = json.loads((state_folder() / folder / _file_name(workspace)).read_text())
    except (OSError, RuntimeError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _write_note(folder: str, workspace: str, note: dict[str, Any]) -> bool:
    try:
        write_private_json(_make_folder(folder) / _file_name(workspace), note)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


def _file_name(workspace: str) -> str:
    """The file of an id from a manifest, which is untrusted: it must not lead out of the folder."""
    if not _ID.fullmatch(str(workspace)):
        raise ValueError("The id in a manifest has a form that paclm does not make.")
    return f"{workspace}.json"


def _make_folder(name: str) -> Path:
    folder = state_folder() / name
    if not folder.parent.exists():
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder.parent)
    return make_private_folder(folder)


def _is_at(identifier: str, path: Path) -> bool:
    """Whether this workspace, not another one, is at that path."""
    try:
        return bool(json.loads((path / MANIFEST_FILE).read_bytes())["id"] == identifier)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _entries() -> Iterator[tuple[str, Path, list[str]]]:
    folder = state_folder() / "workspaces"
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            entry = json.loads(file.read_text())
            yield file.stem, Path(entry["path"]), list(entry["sketch"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a broken note only loses its warning


def _similarity(one: list[str], other: list[str]) -> float:
    """Jaccard similarity, estimated on the smallest hashes of the union."""
    smallest = sorted({*one, *other})[:_ESTIMATED]
    both = {*one} & {*other}
    return sum(item in both for item in smallest) / max(1, len(smallest))
