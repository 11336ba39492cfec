"""Where a ledger is kept: rows, belief and sums in one SQLite file, and a note of the newest row in its lock file.

All SQL that a ledger runs is here, and SQLite's errors leave as the ledger's. Knows no budget, no price and no witness.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paclm.errors import (
    InvalidInput,
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerTampered,
    LedgerUnwritable,
)
from paclm.ledger import sqlite_file
from paclm.ledger.events import COUNTS, Head, Row, Usage
from paclm.ledger.lock import HOLDER_BYTES, WriterLock
from paclm.ledger.state import UsageTable, add_usages

_COLUMNS = "seq, at, kind, body, key, previous, digest, mac"
_ADD_ROW = "INSERT INTO events VALUES (?,?,?,?,?,?,?,?)"
_SET_BELIEF = "INSERT OR REPLACE INTO belief VALUES (1, ?, ?)"
_FIND_SUMS = f"SELECT {', '.join(COUNTS)} FROM usage WHERE hour = ? AND key = ?"
_SET_SUMS = f"INSERT OR REPLACE INTO usage (hour, key, {', '.join(COUNTS)}) VALUES (?,?,?,?,?,?,?)"


class Store:
    """One open ledger file: by its single writer, who holds the lock, or by a reader."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: WriterLock | None, notes: HeadNotes | None) -> None:
        self.path = path
        self.db = db
        self._lock = lock
        self._notes = notes

    @classmethod
    def create(cls, path: Path, row: Row, sealed_belief: bytes) -> None:
        """Make a ledger with its first row; the file is complete or absent, also after a crash."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        sqlite_file.check_closed(path.parent)
        lock = WriterLock(lock_path(path))
        try:
            if path.exists():
                raise LedgerError(f"{path} already exists. A secret has one ledger, which is never replaced.")
            part = path.with_name(path.name + ".part")
            for leftover in (part, part.with_name(part.name + "-journal")):
                leftover.unlink(missing_ok=True)
            sqlite_file.create_file(part)
            _write_first_row(part, row, sealed_belief)
            os.ftruncate(lock.descriptor, HOLDER_BYTES)  # notes left here are about a ledger that was removed
            os.replace(part, path)
            sqlite_file.sync_folder(path.parent)
        finally:
            lock.release()

    @classmethod
    def open_writer(cls, path: Path) -> Store:
        """Take the lock and open the file for writing; it must be closed to other users."""
        sqlite_file.check_private(path)
        lock = WriterLock(lock_path(path))
        try:
            notes = HeadNotes(lock.path, lock.descriptor)
            with translated(path):
                return cls(path, sqlite_file.open_writer(path), lock, notes)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_reader(cls, path: Path) -> Store:
        """Open the file for reading alone, also while another process writes it."""
        with translated(path, is_reading=True):
            return cls(path, sqlite_file.open_reader(path), None, None)

    def close(self) -> None:
        """Close the file and release the lock."""
        self.db.close()
        if self._lock is not None:
            self._lock.release()

    def append(self, row: Row, entries: Iterable[Usage], belief_seq: int, sealed_belief: bytes | None) -> None:
        """Write a row, its sums and the belief in one transaction; all is on the disk when this returns."""
        with translated(self.path), transaction(self.db):
            self.db.execute(_ADD_ROW, row)
            add_sums(self.db, row.at, entries)
            if sealed_belief is not None:
                self.db.execute(_SET_BELIEF, (belief_seq, sealed_belief))

    @property
    def note(self) -> HeadNote | None:
        """The newest row when the ledger was last in use here, as its writer finds it noted in the lock file."""
        return None if self._notes is None else self._notes.newest

    def note_head(self, head: Head) -> None:
        """Note the newest row in the lock file. Only a writer does."""
        if self._notes is not None:
            self._notes.write(head)

    def migrate(self, at: str) -> None:
        """Apply the migrations that the file lacks."""
        with translated(self.path), transaction(self.db):
            sqlite_file.migrate(self.db, at, self.path)

    def empty_log(self) -> None:
        """Move the write-ahead log into the file."""
        with translated(self.path):
            sqlite_file.empty_log(self.db)

    @property
    def kind(self) -> int:
        """`sqlite_file.LIVE`, `sqlite_file.COPY`, or another number for a file that is no ledger."""
        return int(self._one("PRAGMA application_id")[0])

    def mark(self, kind: int) -> None:
        """Mark the file as in use, or as a copy that must be adopted first."""
        self._one(f"PRAGMA application_id={kind}")

    def freeze_view(self) -> None:
        """Read one state of the file from here on, whatever a writer does meanwhile."""
        self._one("BEGIN")

    def check_pages(self) -> None:
        """Run SQLite's own check that the file is whole."""
        (verdict,) = self._one("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise LedgerDamaged(f"{self.path} is not a whole database: {verdict}. Restore a backup and adopt it.")

    def check_schema(self) -> None:
        """Refuse tables or triggers that are not a ledger's."""
        with self._translated():
            expected, found = sqlite_file.expected_schema(), sqlite_file.schema_of(self.db)
        if found != expected:
            names = sorted({name for _, name, _ in set(expected) ^ set(found)})
            raise LedgerTampered(f"{self.path} has not the tables and triggers of a ledger: {', '.join(names)} differ.")

    def count_rows(self, after: int = 0) -> int:
        """How many rows there are after that one."""
        return int(self._one("SELECT count(*) FROM events WHERE seq > ?", after)[0])

    def newest_row(self) -> Row | None:
        """The row with the highest number."""
        found = self._one(f"SELECT {_COLUMNS} FROM events ORDER BY seq DESC LIMIT 1")
        return None if found is None else Row(*found)

    def row(self, seq: int) -> Row | None:
        """One row by its number."""
        if not 0 < seq < 2**63:  # SQLite's own integers; a forged row may name any number
            return None
        found = self._one(f"SELECT {_COLUMNS} FROM events WHERE seq = ?", seq)
        return None if found is None else Row(*found)

    def rows(self) -> Iterator[Row]:
        """All rows, oldest first."""
        with self._translated():
            yield from (Row(*found) for found in self.db.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq"))

    def signers(self) -> tuple[str, ...]:
        """Names of the keys that the rows name as theirs, oldest first."""
        with self._translated():
            found = self.db.execute("SELECT key FROM events GROUP BY key ORDER BY max(seq)")
            return tuple(name for (name,) in found if isinstance(name, str))

    def belief(self) -> tuple[Any, Any]:
        """The row that the stored belief was sealed for, and the sealed bytes; not checked."""
        found = self._one("SELECT seq, sealed FROM belief")
        return (None, None) if found is None else found

    def usage(self) -> UsageTable:
        """The stored sums by hour and key."""
        try:
            with self._translated():
                rows = self.db.execute(f"SELECT hour, key, {', '.join(COUNTS)} FROM usage ORDER BY hour, key")
                return {(hour, key): Usage(key, *map(int, counts)) for hour, key, *counts in rows}
        except (TypeError, ValueError, InvalidInput):
            raise LedgerTampered("The sums by hour and key hold something that is not a number.") from None

    def _one(self, statement: str, *arguments: object) -> Any:
        with self._translated():
            return self.db.execute(statement, arguments).fetchone()

    def _translated(self) -> Any:
        return translated(self.path, is_reading=self._lock is None)


def _write_first_row(path: Path, row: Row, sealed_belief: bytes) -> None:
    with translated(path):
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=FULL")
            with transaction(db):
                db.execute(f"PRAGMA application_id={sqlite_file.LIVE}")
                sqlite_file.migrate(db, row.at, path)
                db.execute(_ADD_ROW, row)
                db.execute(_SET_BELIEF, (row.seq, sealed_belief))
        finally:
            db.close()


def add_sums(db: sqlite3.Connection, at: str, entries: Iterable[Usage]) -> None:
    """Add an event's entries to the stored sums by hour and key."""
    added: UsageTable = {}
    add_usages(added, at, entries)
    for place, usage in added.items():
        found = db.execute(_FIND_SUMS, place).fetchone()
        if found is not None:
            usage = usage.plus(Usage(usage.key, *map(int, found)))
        counts = {name: getattr(usage, name) for name in COUNTS}
        db.execute(_SET_SUMS, (*place, *(counts | {"units": str(usage.units)}).values()))


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the commit is on the disk when the block has ended.

    The write lock is taken first: what is read inside cannot change before the write.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def translated(path: Path, *, is_reading: bool = False) -> Iterator[None]:
    """Raise SQLite's errors as the ledger's, by their code."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translation(path, error, is_reading) from error


def _translation(path: Path, error: sqlite3.Error, is_reading: bool) -> LedgerError:
    name = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
    cause = f"SQLite: {error} ({name})."
    again = "repeat." if is_reading else "restart: nothing was released."
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE")):  # also for reading: SQLite makes a -shm file
        return LedgerFull(f"There is no room left for {path} and its side files. {cause} Make room, then {again}")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LedgerBusy(f"Another program holds {path}. {cause} Close it, then {again}")
    if name == "SQLITE_CONSTRAINT_PRIMARYKEY":
        return LedgerBusy(
            f"Another process has written the next row of {path}: it could open the ledger because the lock was "
            f"removed while this one served. {cause} Stop one of the two, then restart: nothing was released."
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_CORRUPTFS", "SQLITE_IOERR_DATA")):
        return LedgerDamaged(
            f"{path} is not a whole database: it was cut off or overwritten. {cause} Restore a backup and adopt it."
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_AUTH")):
        what = "read" if is_reading else "written"
        return LedgerUnwritable(
            f"{path} cannot be {what}. {cause} Check the disk, its permissions, and whether a side file (-wal, -shm) "
            f"was replaced; then {again}"
        )
    return LedgerDamaged(f"{path} cannot be used as a ledger. {cause}")


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
