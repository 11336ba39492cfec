"""A student folder: one adapter in PEFT's format, trained by `paclm distill` on released text alone, to publish.

`student.json` beside the adapter says on which base model it runs, what is promised about the corpus, and the hashes of
both adapter files. These show that the adapter is the one it was written for; whether its claims are true no reader can
check. Reads no records, no secret and no ledger.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from paclm.config import PromiseName, in_shell
from paclm.errors import StudentGiven, WorkspaceError
from paclm.worlds.layout import CURATOR_FOLDER
from paclm.worlds.settings import Voting
from paclm.worlds.storage import hash_file, make_private_folder
from paclm.worlds.user_dirs import state_folder

FORMAT = "paclm-student-1"
STUDENT_FILE = "student.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MARK = {"paclm": "student"}
"""Among the metadata of a student's safetensors file: it is one without its student.json, too."""
_MAX_HEADER = 2**24

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
    """What their release cost at most."""
    committed_nats: float | None
    """Under `half`: the total of the secret, which the bounds are about."""
    mia_bound: float
    world_id_bound: float | None
    epsilon: float | None
    delta: float | None
    unit: str
    """What the promise protects, with its verb."""
    unit_name: str
    worlds: int | None
    """Under `half`: among how many the realized one is hidden."""
    voting: Voting
    created: str
    files: Mapping[str, str]
    """SHA-256 of both adapter files."""

    @property
    def state_path(self) -> Path:
        """Where a server of it keeps API keys and replies: the folder itself is published, and may be read-only.

        By the adapter's hashes, so that a copy of the folder has the same keys.
        """
        digest = hashlib.sha256("".join(self.files[name] for name in ADAPTER_FILES).encode()).hexdigest()
        return state_folder() / "students" / digest[:32]

    def verify(self) -> None:
        """Refuse adapter files that are missing, have changed or are not a student's; hashes them in full."""
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
        if not has_mark(self.path):
            raise WorkspaceError(
                f"{self.path / ADAPTER_FILES[1]} is not marked as a student's: it may be a private adapter with the "
                f"student.json of another. {_REMEDY}"
            )


def is_student(folder: Path) -> bool:
    """Whether a folder says that it is a student, damaged or not."""
    return (folder.expanduser() / STUDENT_FILE).is_file()


def make_state_folder(student: StudentFolder) -> Path:
    """The folder where a server of it keeps API keys and replies, laid out as in a workspace; closed to others."""
    home = student.state_path
    try:
        home.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (home.parent, home, home / CURATOR_FOLDER):
            make_private_folder(folder)
    except OSError as error:
        raise WorkspaceError(
            f"{home} cannot be made ({error.strerror}). A server keeps API keys and replies there, because the student "
            "is published: name a folder that can be written to with PACLM_STATE_DIR."
        ) from None
    return home


def has_mark(folder: Path) -> bool:
    """Whether the adapter in a PEFT folder is a student's, by the metadata in its safetensors file."""
    try:
        with (folder.expanduser() / ADAPTER_FILES[1]).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MAX_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return False
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(metadata, dict) and MARK.items() <= metadata.items()


def read_student(folder: Path) -> StudentFolder:
    """Read student.json; raises if it is damaged. Entries that are not known here are ignored."""
    folder = folder.expanduser().absolute()
    path = folder / STUDENT_FILE
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkspaceError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
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
        raise StudentGiven(
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
        "delta": is_half or (student.delta or 0.0) <= 1,
        "worlds": not is_half or (isinstance(student.worlds, int) and student.worlds > 1),
        "tokens": isinstance(student.tokens, int) and student.tokens > 0,
        "nats": _is_number(student.nats),
        "release": isinstance(student.release, str),
        "unit": all(isinstance(text, str) and text.isprintable() for text in (student.unit, student.unit_name)),
        "voting": voting.decoder in ("gumbel", "greedy") and _is_number(voting.temperature),
        "support_size": isinstance(voting.support_size, int) and voting.support_size > 0,
        "created": bool(datetime.fromisoformat(student.created)),
        "files": all(isinstance(student.files[name], str) for name in ADAPTER_FILES),
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        raise ValueError(wrong[0])
    return student


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
