"""Notes of the newest row, in the lock file beside a ledger: they show that rows vanished since it was last in use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paclm.errors import LedgerFull, LedgerUnwritable
from paclm.ledger.events import Head
from paclm.ledger.lock import HOLDER_BYTES


class TwoSlots:
    """Two places of equal size in a file, written in turn: a write that a crash cuts off leaves the other one whole."""

    def __init__(self, path: Path, descriptor: int, start: int, size: int, *, is_synced: bool) -> None:
        self.path, self.size = path, size
        self._descriptor, self._start, self._is_synced = descriptor, start, is_synced
        self.next_slot, self.next_turn = 0, 0

    def read(self) -> list[bytes]:
        """Both slots as they are."""
        return [os.pread(self._descriptor, self.size, self._start + slot * self.size) for slot in (0, 1)]

    def write(self, content: bytes) -> None:
        """Overwrite the older slot."""
        try:
            written = os.pwrite(self._descriptor, content, self._start + self.next_slot * self.size)
            if self._is_synced:
                _sync(self._descriptor)
        except OSError as error:
            raise LedgerUnwritable(f"{self.path} cannot be written ({error.strerror}). Repair the disk.") from None
        if written != len(content):
            raise LedgerFull(f"{self.path} took {written} of {len(content)} bytes. Make room on the disk.")
        self.next_slot, self.next_turn = 1 - self.next_slot, self.next_turn + 1


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":  # fsync there stops at the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


_NOTE_BYTES = 192
_NOTE = re.compile(rb"(note +([0-9]{1,18}) +([0-9]{1,18}) ([0-9a-f]{64})) ([0-9a-f]{64})\n\0*")


@dataclass(frozen=True, slots=True)
class HeadNote:
    """The newest row by the notes in a lock file."""

    head: Head
    is_torn: bool = False
    """The other note is not whole: a later row was on the disk when its note was begun. Or the file was damaged."""


class HeadNotes:
    """Notes of the newest row in a lock file: they show that `-wal` was removed after a kill, or a file rolled back.

    Not signed and not synced: they protect against accidents and kills; a witness protects against people.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self._slots = TwoSlots(path, descriptor, HOLDER_BYTES, _NOTE_BYTES, is_synced=False)
        self.newest, slot, turn = _newest_note(self._slots.read())
        self._slots.next_slot, self._slots.next_turn = 1 - slot, turn + 1

    def write(self, head: Head) -> None:
        """Note a row that is on the disk. A row is noted once: a torn note is always about a row after the other's."""
        if self.newest == HeadNote(head):
            return
        text = f"note {self._slots.next_turn:>20} {head.seq:>20} {head.digest.hex()}"
        self._slots.write(f"{text} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        self.newest = HeadNote(head)

    def close(self) -> None:
        """Close the file, where no lock holds it."""
        os.close(self._descriptor)


def open_notes(folder: Path) -> HeadNotes:
    """The notes in a folder about a ledger kept elsewhere. Takes no lock: only the holder of the ledger writes."""
    path = lock_path(folder / "ledger")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return HeadNotes(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise LedgerUnwritable(f"{path} cannot be opened ({error.strerror}). The folder must be writable.") from None


def read_note(path: Path) -> HeadNote | None:
    """The note in a lock file, for readers: takes no lock, and works while a writer holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        slots = TwoSlots(path, descriptor, HOLDER_BYTES, _NOTE_BYTES, is_synced=False)
        seen: list[bytes] = []
        while (found := slots.read()) != seen:  # a note may be being written
            seen = found
        return _newest_note(found)[0]
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _newest_note(slots: Sequence[bytes]) -> tuple[HeadNote | None, int, int]:
    """The newest whole note, its slot and its turn; before the first note, slot 1 and turn 0."""
    whole = []
    for slot, content in enumerate(slots):
        found = _NOTE.fullmatch(content)
        if found is not None and hashlib.sha256(found[1]).hexdigest().encode() == found[5]:
            whole.append((int(found[2]), slot, Head(int(found[3]), bytes.fromhex(found[4].decode()))))
    if not whole:
        return None, 1, 0
    turn, slot, head = max(whole, key=lambda note: note[0])
    is_first = turn == 1 and not slots[1 - slot].strip(b"\0")
    return HeadNote(head, is_torn=len(whole) < 2 and not is_first), slot, turn


def lock_path(path: Path) -> Path:
    """The lock file beside a ledger."""
    return path.with_name("ledger.lock")
