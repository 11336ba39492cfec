"""Finished parts of a long regime on disk, so that a run that was stopped goes on. Knows nothing of what it keeps.

A part is keyed by everything it depends on (scale, seed, adapters): a run with other settings finds none of them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paclm.study.results import Row, plain
from paclm.worlds.storage import make_private_folder, write_private, write_private_json

Array = npt.NDArray[Any]


class Parts:
    """The finished parts of one regime under one set of circumstances."""

    def __init__(self, folder: Path, circumstances: Any) -> None:
        text = json.dumps(plain(circumstances), sort_keys=True)
        self._folder = folder
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def rows(self, name: str, make: Callable[[], list[Row]]) -> list[Row]:
        """The rows of a part: read if it was finished before, else made and kept."""
        path = self._folder / f"{name}-{self._key}.json"
        if path.is_file():
            found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
            return found
        made: list[Row] = plain(make())
        make_private_folder(self._folder)
        write_private_json(path, made)
        return made

    def arrays(self, name: str, make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
        """The arrays of a part, likewise."""
        path = self._folder / f"{name}-{self._key}.npz"
        if not path.is_file():
            buffer = io.BytesIO()
            np.savez_compressed(buffer, allow_pickle=False, **make())
            make_private_folder(self._folder)
            write_private(path, buffer.getvalue())
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}

    def clear(self) -> None:
        """Forget all parts under these circumstances: the result holds their rows now."""
        for path in self._folder.glob(f"*-{self._key}.*"):
            path.unlink()
