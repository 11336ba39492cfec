"""A student folder: one adapter in PEFT's format, trained by `paclm distill` on released text alone, to publish.

`student.json` beside the adapter says on which base model it runs, what is promised about the corpus, and the hashes of
both adapter files. Reads no records, no secret and no ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from paclm.config import PromiseName, in_shell
from paclm.errors import WorkspaceError
from paclm.worlds.settings import Voting
from paclm.worlds.storage import hash_file

FORMAT = "paclm-student-1"
STUDENT_FILE = "student.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_REMEDY = "Fetch the folder again from where it was published, or make it again with paclm distill."


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentFolder:
    """A student on disk, as its student.json describes it."""

    path: Path
    base: Mapping[str, str]
    """Name and fingerprint of the base model that it was trained on."""
    promise: PromiseName
    """Under which the text that it learnt from was released."""
    release: str
    tokens: int
    """Released tokens that it was trained on."""
    nats: float
    """What their release was charged."""
    committed_nats: float | None
    """Under `half`: the total of the secret, which the bounds are about."""
    mia_bound: float
    world_id_bound: float | None
    epsilon: float | None
    delta: float | None
    unit: str
    """What the promise protects."""
    voting: Voting
    created: str
    files: Mapping[str, str]
    """SHA-256 of both adapter files."""

    def verify(self) -> None:
        """Refuse adapter files that are missing or have changed; hashes them in full."""
        for name in ADAPTER_FILES:
            path = self.path / name
            try:
                found = hash_file(path)
            except OSError as error:
                raise WorkspaceError(f"{path} cannot be read: {error.strerror}. {_REMEDY}") from None
            if found != self.files[name]:
                raise WorkspaceError(
                    f"{path} has changed since the student was made (SHA-256 {found[:12]}…, was "
                    f"{self.files[name][:12]}…): nothing is known about what it reveals. {_REMEDY}"
                )


def is_student(folder: Path) -> bool:
    """Whether a folder says that it is a student, damaged or not."""
    return (folder.expanduser() / STUDENT_FILE).is_file()


def read_student(folder: Path) -> StudentFolder:
    """Read student.json; raises if it is damaged. Entries that are not known here are ignored."""
    folder = folder.expanduser().absolute()
    path = folder / STUDENT_FILE
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkspaceError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WorkspaceError(f"{path} is not JSON ({error}). {_REMEDY}") from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise WorkspaceError(
            f"{path} has format {found!r}; this version of paclm reads {FORMAT!r}. Use the version that made it."
        )
    try:
        return _parse(folder, values)
    except (KeyError, TypeError, ValueError) as error:
        raise WorkspaceError(f"{path} is damaged at {error}. {_REMEDY}") from None


def refuse_student(folder: Path) -> None:
    """Refuse a student where a workspace is needed."""
    if is_student(folder):
        raise WorkspaceError(
            f"{folder} is a student made by paclm distill, not a workspace. Serve it: paclm serve {in_shell(folder)}"
        )


def _parse(folder: Path, values: Mapping[str, Any]) -> StudentFolder:
    voting = Voting(**values["voting"])
    student = StudentFolder(
        path=folder,
        voting=voting,
        **{each.name: values[each.name] for each in fields(StudentFolder) if each.name not in ("path", "voting")},
    )
    is_half = student.promise == "half"
    bounds = (student.committed_nats, student.world_id_bound) if is_half else (student.epsilon, student.delta)
    checks = {
        "base": all(isinstance(student.base[name], str) for name in ("name", "fingerprint")),
        "promise": student.promise in ("half", "corpus"),
        "mia_bound": _is_number(student.mia_bound) and 0.5 <= student.mia_bound <= 1,
        "committed_nats, world_id_bound" if is_half else "epsilon, delta": all(map(_is_number, bounds)),
        "tokens": isinstance(student.tokens, int) and student.tokens > 0,
        "nats": _is_number(student.nats),
        "unit": isinstance(student.unit, str),
        "voting": voting.decoder in ("gumbel", "greedy") and _is_number(voting.temperature) and voting.support_size > 0,
        "created": bool(datetime.fromisoformat(student.created)),
        "files": all(isinstance(student.files[name], str) for name in ADAPTER_FILES),
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise ValueError(wrong[0])
    return student


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
