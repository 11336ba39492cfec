"""Recorded votes: the format that `paclm votes` writes and `paclm replay` reads."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, IntArray, check_num_worlds
from paclm.worlds.storage import write_private

_ARRAYS = ("votes", "truth", "public", "full")
_MADE_BY = "`paclm votes WORKSPACE --text FILE --out V.npz` makes one."


@dataclass(frozen=True, slots=True)
class RecordedVotes:
    """Every world's vote at n positions. The integers only need to name tokens consistently; −1: not in the support."""

    votes: IntArray  # (n, m)
    truth: IntArray | None = None  # (n,) the token that really came next
    public: IntArray | None = None  # (n,) the public model's choice under the same decoder
    full: IntArray | None = None  # (n,) that of the adapter trained on the whole corpus

    def __post_init__(self) -> None:
        if self.votes.ndim != 2 or self.votes.shape[0] < 1 or not np.issubdtype(self.votes.dtype, np.integer):
            raise InvalidInput(
                f"votes must be integers (positions, worlds), not {self.votes.dtype} with shape {self.votes.shape}."
            )
        check_num_worlds(self.num_worlds)
        for name in ("truth", "public", "full"):
            column = getattr(self, name)
            if column is None:
                continue
            if column.shape != (self.num_positions,) or not np.issubdtype(column.dtype, np.integer):
                raise InvalidInput(
                    f"{name} must be integers ({self.num_positions},), not {column.dtype} with shape {column.shape}."
                )

    @property
    def num_positions(self) -> int:
        """n"""
        return int(self.votes.shape[0])

    @property
    def num_worlds(self) -> int:
        """m"""
        return int(self.votes.shape[1])

    @property
    def digest(self) -> str:
        """The SHA-256 of the votes, in hexadecimal."""
        return hashlib.sha256(np.ascontiguousarray(self.votes, dtype=np.int64).tobytes()).hexdigest()

    @property
    def is_dissent(self) -> BoolArray:
        """(n,) whether the worlds differ at each position."""
        differs: BoolArray = (self.votes != self.votes[:, :1]).any(axis=1)
        return differs

    @classmethod
    def load(cls, path: str | Path) -> RecordedVotes:
        """Read an .npz file; arrays other than votes, truth, public and full are left alone."""
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in _ARRAYS if name in archive}
        except FileNotFoundError:
            raise InvalidInput(f"There is no file {path}. {_MADE_BY}") from None
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile):
            raise InvalidInput(f"{path} is not an .npz file of integer arrays. {_MADE_BY}") from None
        if "votes" not in arrays:
            raise InvalidInput(f"{path} holds no array called votes. {_MADE_BY}")
        return cls(**arrays)

    def save(self, path: str | Path) -> None:
        """Write an .npz file that `load` reads, the same bytes for the same votes; for its owner alone."""
        columns = {name: getattr(self, name) for name in _ARRAYS}
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, allow_pickle=False, **{name: array for name, array in columns.items() if array is not None}
        )
        write_private(Path(path), buffer.getvalue())
