"""Finished parts of a long regime on disk, so that a stopped run resumes. Does not know what the parts contain.

A part is keyed by everything it depends on (scale, seed, adapters, code), so a run with other settings reuses none.
Parts are deleted only after the result of the whole regime is written, and lasting ones not even then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paclm.study.results import Row, plain
from paclm.worlds.storage import make_private_folder, write_private_arrays, write_private_json

Array = npt.NDArray[Any]


class Kept:
    """Which files a run may reuse: its own, and those of earlier runs unless `again` is set."""

    def __init__(self, again: bool = False) -> None:
        self._again = again
        self.made: set[Path] = set()  # files that this run wrote
        self.parts: list[Parts] = []  # of the running regime
        self.from_before: set[Path] = set()  # files of earlier runs that were read

    def begin(self) -> None:
        """Start of a regime: forget what was read for the one before, and which parts it had."""
        self.from_before.clear()
        self.parts.clear()

    def end(self) -> None:
        """The result of the regime is written: delete its parts."""
        for parts in self.parts:
            parts.clear()
        self.parts.clear()

    def has(self, path: Path) -> bool:
        """Whether this file may be reused."""
        if not path.is_file() or (self._again and path not in self.made):
            return False
        if path not in self.made:
            self.from_before.add(path)
        return True

    def arrays(self, path: Path, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of an .npz file, read if it may be reused, else made and written."""
        if not self.has(path):
            arrays = make()
            make_private_folder(path.parent)
            write_private_arrays(path, **arrays)
            self.made.add(path)
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}


class Parts:
    """The finished parts of one regime with one set of dependencies."""

    def __init__(self, folder: Path, dependencies: Any, kept: Kept | None = None, is_lasting: bool = False) -> None:
        text = json.dumps(plain(dependencies), sort_keys=True)
        self._folder = folder
        self._kept = kept or Kept()
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]  # of the dependencies
        if not is_lasting:
            self._kept.parts.append(self)

    def rows(self, name: str, make: Callable[[], list[Row]]) -> list[Row]:
        """The rows of a part, read if it was finished before, else made and written."""
        path = self._folder / f"{name}-{self.key}.json"
        if self._kept.has(path):
            found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
            return found
        made: list[Row] = plain(make())
        make_private_folder(self._folder)
        write_private_json(path, made)
        self._kept.made.add(path)
        return made

    def arrays(self, name: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of a part, in the same way."""
        return self._kept.arrays(self._folder / f"{name}-{self.key}.npz", make)

    def clear(self) -> None:
        """Delete all parts with these dependencies."""
        for path in self._folder.glob(f"*-{self.key}.*"):
            path.unlink()
