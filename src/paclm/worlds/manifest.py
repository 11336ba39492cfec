"""manifest.json: hashes of everything a workspace was made of, so that a changed part is refused and named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from paclm.errors import WorkspaceError
from paclm.worlds.fingerprints import Base, base_files, fingerprint_base, stat_files
from paclm.worlds.layout import ADAPTERS_FOLDER, MANIFEST_FILE, WORLDS_FILE
from paclm.worlds.storage import hash_file, write_private_json
from paclm.worlds.student_folder import refuse_student

FORMAT = 1

_REMEDY = "Restore it from a backup, or make a new workspace."


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything a workspace was made of; a change makes a new one, written atomically."""

    format: int
    id: str
    created: str
    versions: Mapping[str, str]
    arguments: Mapping[str, Any]
    """Arguments of `paclm init` with defaults filled in; a repeated init must pass the same.

    `units` is the number of units of privacy at init, canaries included: a constant of DP training. `split` is "hash"
    where every unit was held out by itself. Workspaces of earlier versions have neither.
    """
    summary: Mapping[str, Any]
    """Counts to display: records, groups, tokens."""
    files: Mapping[str, str]
    """SHA-256 by path inside the workspace: corpus and membership."""
    base: Mapping[str, Any]
    """Name, folder, fingerprint, and size and time of its files."""
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By file name inside adapters/: SHA-256, size and time, and details of training.

    For the worlds also `worlds_sha256`, of each one's adapter; `imported`, when they were trained elsewhere: the date,
    the base model their folders name, and what the operator vouched for; and `held`, in the folder of a worker: first
    and last (exclusive) of the worlds that are in the file.
    """

    @property
    def worlds_sha256(self) -> list[str]:
        """Of each world's adapter; empty where training did not note them."""
        return list(self.adapters.get(WORLDS_FILE, {}).get("worlds_sha256", ()))

    @property
    def imported(self) -> str | None:
        """When worlds that were trained elsewhere were imported; None: `paclm train` made them."""
        imported = self.adapters.get(WORLDS_FILE, {}).get("imported")
        return None if imported is None else str(imported["at"])

    @property
    def held(self) -> slice | None:
        """The worlds in the folder of a worker; None in a workspace, which has them all."""
        held = self.adapters.get(WORLDS_FILE, {}).get("held")
        return None if held is None else slice(*held)

    @property
    def digest(self) -> str:
        """A hash of corpus, membership and base model; a ledger is bound to it."""
        parts = {"files": dict(self.files), "base": self.base["fingerprint"]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def base_model(self) -> Base:
        """The base model as it was at init."""
        return Base(self.base["name"], Path(self.base["folder"]), self.base["fingerprint"])

    @property
    def unit(self) -> str:
        """What the guarantee protects, with its verb: a record, or the records of a group."""
        return unit_of(self.arguments.get("group_by"))

    @property
    def unit_name(self) -> str:
        """The unit of privacy, whose presence a DP training hides."""
        group_by = self.arguments.get("group_by")
        return "record" if group_by is None else f"all records of one {group_by}"

    def with_adapters(self, path: Path, details: Mapping[str, Any]) -> Manifest:
        """The manifest with the entry of an adapter file that was written or replaced."""
        entry = {"sha256": hash_file(path), "stat": stat_files([path])[path.name], **details}
        return replace(self, adapters={**self.adapters, path.name: entry})

    def write(self, workspace: Path) -> None:
        """Write manifest.json, atomically."""
        write_private_json(workspace / MANIFEST_FILE, asdict(self))


def unit_of(group_by: str | None) -> str:
    """What the guarantee protects, with its verb; a record where no workspace is known."""
    return "a record was" if group_by is None else f"the records of one {group_by} were"


def describe_base(base: Base) -> dict[str, Any]:
    """The manifest's entry for a base model."""
    files = stat_files(base_files(base.folder))
    return {"name": base.name, "folder": str(base.folder), "fingerprint": base.fingerprint, "files": files}


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide the worlds."""
    found = {"python": python_version()}
    for package in ("paclm", "numpy", "torch", "transformers", "tokenizers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def load_manifest(workspace: Path) -> Manifest:
    """Read manifest.json. Every command that takes a workspace comes by here, and refuses a student."""
    refuse_student(workspace)
    path = workspace / MANIFEST_FILE
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        reason = "there is no such folder"
        if workspace.exists():
            reason = "it has no manifest.json" if workspace.is_dir() else "it is a file"
        raise WorkspaceError(
            f"{workspace} is not a workspace: {reason}. Make one with: paclm init WORKSPACE --corpus PATH --base MODEL"
        ) from None
    except OSError as error:
        raise WorkspaceError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise WorkspaceError(f"{path} is not JSON ({error}). {_REMEDY}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise WorkspaceError(
            f"{path} has format {found!r}; this version of paclm reads format {FORMAT}. Use the version that made it "
            '("versions" in that file), or make a new workspace.'
        )
    if set(values) != {item.name for item in fields(Manifest)}:
        raise WorkspaceError(f"{path} has other entries than expected: {', '.join(sorted(values))}. {_REMEDY}")
    return Manifest(**values)


def verify_files(workspace: Path, manifest: Manifest) -> None:
    """Refuse a workspace whose corpus or membership has changed since init."""
    for name, expected in manifest.files.items():
        try:
            found = hash_file(workspace / name)
        except OSError as error:
            raise WorkspaceError(f"{workspace / name} cannot be read: {error.strerror}. {_REMEDY}") from None
        if found != expected:
            raise WorkspaceError(
                f"{workspace / name} has changed since the workspace was made (SHA-256 {found[:12]}…, was "
                f"{expected[:12]}…): the worlds no longer match their records. {_REMEDY}"
            )


def verify_base(manifest: Manifest, in_full: bool) -> None:
    """Refuse a base model whose files have changed since init.

    Files of the same size and time count as unchanged unless `in_full`. A folder that is gone is not checked here: the
    engine finds the model again by name and compares fingerprints.
    """
    base = manifest.base_model
    if not base.folder.is_dir():
        return
    if not in_full and stat_files(base_files(base.folder)) == manifest.base["files"]:
        return
    refuse_other_base(manifest, fingerprint_base(base.folder))


def refuse_other_base(manifest: Manifest, fingerprint: str) -> None:
    """Refuse a base model with another fingerprint: adapters fit only the one they were trained on."""
    base = manifest.base_model
    if fingerprint != base.fingerprint:
        raise WorkspaceError(
            f"The base model {base.name} has changed since the workspace was made (fingerprint {fingerprint[:12]}…, "
            f"was {base.fingerprint[:12]}…): the adapters no longer fit it. Restore it (tiny: install the "
            "version of paclm that made the workspace), or make a new workspace."
        )


def verify_adapters(workspace: Path, manifest: Manifest, in_full: bool) -> None:
    """Refuse adapter files that have changed since training wrote them."""
    for name, entry in manifest.adapters.items():
        path = workspace / ADAPTERS_FOLDER / name
        if not path.is_file():
            raise WorkspaceError(f"{path} is missing. {_REMEDY}")
        if not in_full and stat_files([path])[name] == entry["stat"]:
            continue
        if hash_file(path) != entry["sha256"]:
            raise WorkspaceError(f"{path} has changed since it was trained. {_REMEDY}")
