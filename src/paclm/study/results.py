"""The result of a regime: rows of plain values and their provenance, one JSON file per regime. Knows no regime.

Every number of a table or figure is a value of a row here, or computed from rows.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.errors import InvalidInput
from paclm.worlds.storage import write_private_json

if TYPE_CHECKING:
    from paclm.worlds.workspace import Workspace

Value = str | int | float | bool | None
Row = dict[str, Any]  # column names to values; flat

_LIBRARIES = ("numpy", "scipy", "torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The findings of one regime."""

    regime: str
    preset: str
    seed: int
    scale: Mapping[str, Any]  # how many positions, sessions, tokens …
    rows: Sequence[Row]
    seconds: float
    notes: Sequence[str] = ()  # what a reader of the numbers must know
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def select(self, **wanted: Value) -> list[Row]:
        """The rows that have these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())]

    def one(self, **wanted: Value) -> Row:
        """The only row that has these values."""
        found = self.select(**wanted)
        if len(found) != 1:
            raise InvalidInput(f"{len(found)} rows of {self.regime} have {wanted}, not one. Run the regime again.")
        return found[0]

    def save(self, folder: Path) -> Path:
        """Write `<regime>.json`; numbers that are not finite become null."""
        path = folder / f"{self.regime}.json"
        write_private_json(path, plain(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a file that `save` wrote."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise InvalidInput(f"{path} is not a result file. Run the regime again with `paclm study run`.") from None


def load_results(folder: Path) -> dict[str, Result]:
    """All results of a folder, by regime."""
    found = (Result.load(path) for path in sorted(folder.glob("*.json")))
    return {result.regime: result for result in found}


def plain(value: Any) -> Any:
    """The same in JSON's types: numpy scalars become numbers, NaN and infinities null."""
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def provenance(workspace: Workspace, device: str) -> dict[str, Any]:
    """Hashes of the workspace, commit, versions and machine: what a number depends on."""
    manifest = workspace.manifest
    return {
        "corpus": manifest.files,
        "records": len(workspace.membership),
        "held_out": manifest.summary.get("held_out"),
        "base": workspace.base.fingerprint,
        "base_name": Path(workspace.base.name).name,
        "adapters": {name: entry["sha256"] for name, entry in manifest.adapters.items()},
        "arguments": {name: file_name(value) for name, value in manifest.arguments.items()},
        "training": asdict(workspace.training),
        **provenance_of_run(device),
    }


def provenance_of_run(device: str) -> dict[str, Any]:
    """Commit, versions, machine and command."""
    return {
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _LIBRARIES}},
        "machine": f"{platform.system()} {platform.machine()}, {device}",
        "command": " ".join(map(file_name, sys.argv)),
    }


def file_name(value: Any) -> Any:
    """Of an absolute path its last part: results are published, and name no folder of the machine."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def _commit() -> str | None:
    """The commit of the source tree, marked where files differ from it; None outside a checkout.

    PACLM_COMMIT overrides it, for a copy of the tree without its history.
    """
    if given := os.environ.get("PACLM_COMMIT"):
        return given

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # fails if installed inside another project's checkout
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None
