"""One secret, one writer, one belief: a lock that the operating system drops when its holder dies, however it dies.

The lock's file also remembers the newest row, so that a ledger whose side files were removed after a kill is noticed.
Two notes take turns, each with its checksum: one that a crash cut off is known as such, and the other still counts.
Nothing here is signed: it helps against accidents, a witness against people.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from paclm.errors import LedgerBusy, LedgerUnwritable
from paclm.ledger.chain import Head

_HOLDER_BYTES = 12
"""The holder's process id and a newline; the notes stand behind it."""
_NOTE_BYTES = 192
_NOTE = re.compile(rb"(note +([0-9]{1,18}) +([0-9]{1,18}) ([0-9a-f]{64})) ([0-9a-f]{64})\n\0*")
_NOTE_OF_OLD = re.compile(rb" *([0-9]{1,18}) ([0-9a-f]{64})\n.*", re.DOTALL)
"""As earlier versions wrote it: one note, in the place of the first and maybe over it, without turn and checksum."""
_HELD_HERE: set[tuple[int, int]] = set()
"""Locks that this process holds, by device and inode: in another container a process can have the same number."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the notes say."""

    head: Head
    """The newest row by the newest whole note."""
    is_cut_off: bool = False
    """The other note is not whole: a later row was on the disk when it was begun. Or the file was damaged."""


@dataclass(frozen=True, slots=True)
class _Note:
    turn: int
    head: Head


class WriterLock:
    """Held from construction to `release`. A lock file left behind by a dead process holds nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnwritable(
                f"The lock {path} cannot be opened ({error.strerror}). The ledger's folder must be there and writable."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal() from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(f"{path} cannot be locked ({error.strerror}). Keep it on a local disk.") from None
        try:
            noted = os.pread(self._descriptor, 2 * _NOTE_BYTES, _HOLDER_BYTES)
            self.remembered = _memory(noted)
            """The newest row when the ledger was last in use here; None where nobody noted it."""
            self._turn, self._place = _next_turn(noted)
            os.fchmod(self._descriptor, 0o600)
            self._write(f"{os.getpid():<{_HOLDER_BYTES - 1}}\n", 0)
            self._identity = _identity(self._descriptor)  # kept: a release must not depend on asking again
            _HELD_HERE.add(self._identity)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _refusal(self) -> LedgerBusy:
        """Who holds it, and what to do; this attempt is over."""
        try:
            holder = os.pread(self._descriptor, _HOLDER_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
            own = holder == str(os.getpid())  # a fork has the set, and another number
            is_own = own and _identity(self._descriptor) in _HELD_HERE
        finally:
            os.close(self._descriptor)
        where, what_to_do = f"in use by process {holder}", "Stop that process, or send requests to it."
        if is_own:
            where, what_to_do = "open already in this process", "close() the other curator, or open it in a `with`."
        return LedgerBusy(
            f"{self._path.parent} is {where}. One secret has one writer: two would each release against a belief that "
            f"misses the other's tokens. {what_to_do}"
        )

    def remember(self, head: Head) -> None:
        """Note the newest row, which is on the disk. Not synced: this is about what a kill leaves.

        The same row is not noted twice: a note that was cut off is always about a row that the other has not.
        """
        if self.remembered == Memory(head):
            return
        said = f"note {self._turn:>20} {head.seq:>20} {head.digest.hex()}"
        checksum = hashlib.sha256(said.encode()).hexdigest()
        self._write(f"{said} {checksum}\n", _HOLDER_BYTES + self._place * _NOTE_BYTES)
        self.remembered = Memory(head)
        self._turn, self._place = self._turn + 1, 1 - self._place

    def forget(self) -> None:
        """The ledger that the file remembers is gone, and another one begins."""
        os.ftruncate(self._descriptor, _HOLDER_BYTES)
        self.remembered = None
        self._turn, self._place = _next_turn(b"")

    def _write(self, text: str, at: int) -> None:
        try:
            written = os.pwrite(self._descriptor, text.encode(), at)
        except OSError as error:
            raise LedgerUnwritable(f"{self._path} cannot be written ({error.strerror}). Mend the disk.") from None
        if written != len(text):
            raise LedgerUnwritable(f"{self._path} took {written} of {len(text)} bytes. Make room on the disk.")

    def release(self) -> None:
        """Let the next writer in; the file stays, because removing it would race with the next holder."""
        _HELD_HERE.discard(self._identity)
        os.close(self._descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def read_remembered(path: Path) -> Memory | None:
    """What a lock's file remembers, for readers: takes no lock, and works while another holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen: bytes | None = None
        while (noted := os.pread(descriptor, 2 * _NOTE_BYTES, _HOLDER_BYTES)) != seen:  # the next row is being noted
            seen = noted
        return _memory(noted)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _memory(noted: bytes) -> Memory | None:
    notes = _notes(noted)
    whole = [note for note in notes if note is not None]
    if not whole:
        return None
    newest = max(whole, key=lambda note: note.turn)
    is_first = newest.turn <= 1 and not _places(noted)[1 - notes.index(newest)].strip(b"\0")
    return Memory(newest.head, is_cut_off=len(whole) < 2 and not is_first)


def _next_turn(noted: bytes) -> tuple[int, int]:
    """The turn of the next note, and its place: never that of the newest whole one."""
    found = [(note.turn, place) for place, note in enumerate(_notes(noted)) if note is not None]
    turn, place = max(found, default=(0, 1))
    return turn + 1, 1 - place


def _notes(noted: bytes) -> list[_Note | None]:
    return [_parse(place) for place in _places(noted)]


def _places(noted: bytes) -> list[bytes]:
    return [noted[:_NOTE_BYTES], noted[_NOTE_BYTES:]]


def _parse(noted: bytes) -> _Note | None:
    if old := _NOTE_OF_OLD.fullmatch(noted):
        return _Note(0, Head(int(old[1]), bytes.fromhex(old[2].decode())))
    found = _NOTE.fullmatch(noted)
    if found is None or hashlib.sha256(found[1]).hexdigest().encode() != found[5]:
        return None
    return _Note(int(found[2]), Head(int(found[3]), bytes.fromhex(found[4].decode())))
