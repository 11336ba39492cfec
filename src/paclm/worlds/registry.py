"""Which corpora have workspaces on this machine: two workspaces over the same records spend two budgets on them.

Only hashes are kept, one small file (0600) per workspace, in the user's state folder. A corpus is recognized by the
smallest hashes of its texts (a bottom-k sketch), so one with a few records more or less is recognized too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paclm.worlds.places import state_folder
from paclm.worlds.storage import make_private_folder, write_private_json

_SKETCH = 256
_LEAST_SHARED = 0.01


@dataclass(frozen=True, slots=True)
class Sighting:
    """Another workspace over (some of) the same records."""

    path: Path
    shared: float
    """Estimated share of the records of both corpora together that are in both."""

    def sentence(self) -> str:
        """What the overlap means for the budgets."""
        gone = "" if (self.path / "manifest.json").exists() else " (no longer there, but what it released is)"
        part = "the same corpus" if self.shared > 0.995 else f"about {self.shared:.0%} of the same records"
        return (
            f"The workspace {self.path}{gone} is over {part}. Their budgets add up: an attacker who sees the tokens of "
            "both is bounded at the sum of both totals, not at either one."
        )


def sketch_texts(texts: Iterable[str]) -> list[str]:
    """The smallest hashes of the distinct texts."""
    return sorted({hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts})[:_SKETCH]


def find_overlaps(sketch: list[str], own_id: str) -> list[Sighting]:
    """Workspaces seen on this machine whose corpus shares records with this one."""
    found = []
    for identifier, path, other in _entries():
        shared = _similarity(sketch, other)
        if identifier != own_id and shared >= _LEAST_SHARED:
            found.append(Sighting(path, shared))
    return sorted(found, key=lambda sighting: (-sighting.shared, str(sighting.path)))


def remember_workspace(identifier: str, path: Path, sketch: list[str]) -> None:
    """Note that a workspace exists."""
    folder = state_folder() / "workspaces"
    if not folder.parent.exists():
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder.parent)
    make_private_folder(folder)
    write_private_json(folder / f"{identifier}.json", {"path": str(path), "sketch": sketch})


def _entries() -> Iterator[tuple[str, Path, list[str]]]:
    folder = state_folder() / "workspaces"
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            entry = json.loads(file.read_text())
            yield file.stem, Path(entry["path"]), list(entry["sketch"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a note that cannot be read warns of nothing; it guards no secret


def _similarity(one: list[str], other: list[str]) -> float:
    """Jaccard similarity, estimated on the smallest hashes of the union."""
    smallest = sorted({*one, *other})[:_SKETCH]
    both = {*one} & {*other}
    return sum(item in both for item in smallest) / max(1, len(smallest))
