"""Lines in a file, read when they are needed, so that a corpus may be larger than memory. Knows nothing of records."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_BYTES_AT_ONCE = 1 << 20
_UNUSED = -1


class LineFile:
    """The lines of a file; 8 bytes of each stay in memory. Several may read at once."""

    def __init__(self, file: IO[bytes]) -> None:
        """Find the lines; the descriptor is kept, so that the file may be closed, or have no name."""
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._starts = array("q", [0])  # where each line begins, and the end of the last
        for line in file:
            self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> bytes:
        return self._read(number, number + 1)

    def __iter__(self) -> Iterator[bytes]:
        first, starts = 0, self._starts
        while first < len(self):
            end = max(first + 1, bisect_right(starts, starts[first] + _BYTES_AT_ONCE) - 1)
            some, begin = self._read(first, end), starts[first]
            yield from (some[starts[i] - begin : starts[i + 1] - begin] for i in range(first, end))
            first = end

    def _read(self, first: int, end: int) -> bytes:
        return os.pread(self._descriptor, self._starts[end] - self._starts[first], self._starts[first])


class LineWriter(LineFile):
    """Lines being written into a file without a name: nothing stays behind if the process is killed."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed when all is written
        super().__init__(self._file)

    def append(self, line: bytes) -> None:
        self._file.write(line)
        self._starts.append(self._starts[-1] + len(line))

    def close(self) -> None:
        """Finish writing; the lines can still be read."""
        self._file.close()

    def _read(self, first: int, end: int) -> bytes:
        if not self._file.closed:
            self._file.flush()
        return super()._read(first, end)


class KeyTable:
    """Numbers by a 64-bit key, in some 25 bytes each: an open-addressing hash table.

    Different contents may have the same key, so callers compare what the numbers stand for.
    """

    def __init__(self) -> None:
        self._keys, self._numbers = array("Q"), array("q")
        self._slots = array("i", [_UNUSED]) * 1024

    def find(self, key: int) -> Iterator[int]:
        """The numbers added under a key, first to last."""
        mask = len(self._slots) - 1
        place = key & mask
        while (entry := self._slots[place]) != _UNUSED:
            if self._keys[entry] == key:
                yield self._numbers[entry]
            place = (place + 1) & mask

    def add(self, key: int, number: int) -> None:
        self._keys.append(key)
        self._numbers.append(number)
        if 3 * len(self._keys) > 2 * len(self._slots):
            self._slots = array("i", [_UNUSED]) * (2 * len(self._slots))
            for entry in range(len(self._keys)):
                self._place(entry)
        else:
            self._place(len(self._keys) - 1)

    def _place(self, entry: int) -> None:
        mask = len(self._slots) - 1
        place = self._keys[entry] & mask
        while self._slots[place] != _UNUSED:
            place = (place + 1) & mask
        self._slots[place] = entry
