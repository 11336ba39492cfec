"""Finished parts of a long regime on disk, so that a run that was stopped goes on. Knows nothing of what it keeps.

A part is keyed by everything it depends on (scale, seed, adapters, code): a run with other settings finds none of them.
Parts stay until the result of the whole regime is written, whatever fails late: then the runner forgets them.
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
    """Which files a run may read instead of making them: its own, and those of earlier runs unless all is made anew."""

    def __init__(self, again: bool = False) -> None:
        self._again = again
        self._made: set[Path] = set()
        self._parts: list[Parts] = []
        self.from_before: set[Path] = set()
        """Files of earlier runs that were read."""

    def begin(self) -> None:
        """A regime begins: nothing was read for it yet, and parts of another that failed are not its own."""
        self.from_before.clear()
        self._parts.clear()

    def end(self) -> None:
        """The result of the regime is written and holds what its parts did: forget them."""
        for parts in self._parts:
            parts.clear()
        self._parts.clear()

    def opened(self, parts: Parts) -> None:
        """These parts are of the regime that runs."""
        self._parts.append(parts)

    def has(self, path: Path) -> bool:
        """Whether to read this file."""
        if not path.is_file() or (self._again and path not in self._made):
            return False
        if path not in self._made:
            self.from_before.add(path)
        return True

    def made(self, path: Path) -> None:
        """This file is of this run."""
        self._made.add(path)

    def arrays(self, path: Path, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of an .npz file: read if the run may, else made and written."""
        if not self.has(path):
            arrays = make()
            make_private_folder(path.parent)
            write_private_arrays(path, **arrays)
            self.made(path)
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}


class Parts:
    """The finished parts of one regime under one set of circumstances."""

    def __init__(self, folder: Path, circumstances: Any, kept: Kept | None = None) -> None:
        text = json.dumps(plain(circumstances), sort_keys=True)
        self._folder = folder
        self._kept = kept or Kept()
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._kept.opened(self)

    @property
    def key(self) -> str:
        """Stands for the circumstances."""
        return self._key

    def rows(self, name: str, make: Callable[[], list[Row]]) -> list[Row]:
        """The rows of a part: read if it was finished before, else made and kept."""
        path = self._folder / f"{name}-{self._key}.json"
        if self._kept.has(path):
            found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
            return found
        made: list[Row] = plain(make())
        make_private_folder(self._folder)
        write_private_json(path, made)
        self._kept.made(path)
        return made

    def arrays(self, name: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of a part, likewise."""
        return self._kept.arrays(self._folder / f"{name}-{self._key}.npz", make)

    def clear(self) -> None:
        """Forget all parts under these circumstances."""
        for path in self._folder.glob(f"*-{self._key}.*"):
            path.unlink()
