"""A ledger in one SQLite file: rows, belief, secret and sums, and a note of the newest row in its lock file.

All SQL that a ledger in a file runs is here, and SQLite's errors leave as the ledger's.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

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
from paclm.ledger.events import COUNTS, Checkpoint, Head, Row, Usage
from paclm.ledger.head_notes import HeadNote, HeadNotes, lock_path, read_note
from paclm.ledger.lock import HOLDER_BYTES, WriterLock
from paclm.ledger.state import UsageTable, add_usages
from paclm.ledger.store import Commit, Copy, Kind, Store, not_a_number

_COLUMNS = "seq, at, kind, body, key, previous, digest, mac"
_ADD_ROW = "INSERT INTO events VALUES (?,?,?,?,?,?,?,?)"
_SET_BELIEF = "INSERT OR REPLACE INTO belief VALUES (1, ?, ?)"
_SET_SECRET = "INSERT OR REPLACE INTO secret VALUES (1, ?)"
_SET_CHECKPOINT = "INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?, ?)"
_ADD_UP = (
    "SELECT {0}, sum(tokens), sum(dissent_tokens), sum(charged_tokens), group_concat(units), sum(public_tokens), "
    f"min(coalesce({' AND '.join(f'{name} >= 0' for name in COUNTS)} AND units NOT GLOB '*[^0-9]*', 0)) "
    "FROM usage GROUP BY {0} ORDER BY {0}"
)
"""Adds up all but the units; says last whether each is a number: `sum` would skip what is none."""
_FIND_SUMS = f"SELECT {', '.join(COUNTS)} FROM usage WHERE hour = ? AND key = ?"
_SET_SUMS = f"INSERT OR REPLACE INTO usage (hour, key, {', '.join(COUNTS)}) VALUES (?,?,?,?,?,?,?)"


class InUse:
    """The files of an open ledger, as they are found by their names. Removed files take writes, and lose them."""

    def __init__(self, path: Path, lock: Path) -> None:
        self._found = {file: _identity(file) for file in (path, *sqlite_file.side_files(path), lock)}

    def check(self) -> None:
        """Refuse if a file was removed, renamed or replaced since."""
        for file, found in self._found.items():
            if _identity(file) != found:
                raise LedgerUnwritable(
                    f"{file} was removed, renamed or replaced while the ledger was in use: what is written now would "
                    "be lost. Nothing more is released. Put the file back if it was renamed, then restart; rows that "
                    "are missing then are found, and paclm ledger adopt charges for them."
                )


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class SqliteStore(Store):
    """One open ledger file: by its single writer, who holds the lock, or by a reader."""

    why_rows_vanish = "either its write-ahead log (-wal) was removed or the file was rolled back"

    def __init__(self, path: Path, db: sqlite3.Connection, lock: WriterLock | None, notes: HeadNotes | None) -> None:
        self.path, self.name = path, str(path)
        self.db = db
        self._lock = lock
        self._notes = notes
        self._note_read: HeadNote | None = None
        self._in_use: InUse | None = None

    @classmethod
    def create(cls, path: Path, content: Copy, kind: Kind = "live") -> None:
        """Make a ledger in use; the file is complete or absent, also after a crash."""
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
            fill(part, content, kind)
            if kind == "live":
                os.ftruncate(lock.descriptor, HOLDER_BYTES)  # notes left here are about a ledger that was removed
            os.replace(part, path)
            sqlite_file.sync_folder(path.parent)
        finally:
            lock.release()

    @classmethod
    def discard(cls, path: Path) -> None:
        """Remove the target of an unfinished move: nothing was ever released from it."""
        store = cls.open_writer(path)
        try:
            if store.kind != "incoming":
                raise LedgerError(f"{path} is in use, and is not removed.")
            for name in (path.name, path.name + "-wal", path.name + "-shm"):
                path.with_name(name).unlink(missing_ok=True)
        finally:
            store.close()

    @classmethod
    def open_writer(cls, path: Path) -> SqliteStore:
        """Take the lock and open the file for writing; it must be closed to other users."""
        sqlite_file.check_private(path, lock_path(path))
        lock = WriterLock(lock_path(path))
        try:
            notes = HeadNotes(lock.path, lock.descriptor)
            with translated(path):
                return cls(path, sqlite_file.open_writer(path), lock, notes)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_reader(cls, path: Path) -> SqliteStore:
        """Open the file for reading alone, also while another process writes it."""
        note = read_note(lock_path(path))  # before any row is read: a row is noted after it is on the disk
        with translated(path, is_reading=True):
            store = cls(path, sqlite_file.open_reader(path), None, None)
        store._note_read = note
        return store

    def close(self) -> None:
        """Close the file and release the lock."""
        self.db.close()
        if self._lock is not None:
            self._lock.release()

    def append(self, commit: Commit) -> None:
        """Write a row and what belongs to it in one transaction; all is on the disk when this returns."""
        with translated(self.path), transaction(self.db):
            self.db.execute(_ADD_ROW, commit.row)
            add_sums(self.db, commit.row.at, commit.entries)
            if commit.belief is not None:
                self.db.execute(_SET_BELIEF, commit.belief)
            if commit.secret is not None:
                self.db.execute(_SET_SECRET, (commit.secret,))
            if commit.checkpoint is not None:
                self.db.execute(_SET_CHECKPOINT, commit.checkpoint)
        if self._in_use is not None:
            self._in_use.check()

    @property
    def note(self) -> HeadNote | None:
        """The newest row when the ledger was last in use here, as noted in the lock file."""
        return self._note_read if self._notes is None else self._notes.newest

    def note_head(self, head: Head) -> None:
        """Note the newest row in the lock file. Only a writer does."""
        if self._notes is not None:
            self._notes.write(head)

    def migrate(self, at: str) -> None:
        """Apply the migrations that the file lacks."""
        with translated(self.path), transaction(self.db):
            sqlite_file.migrate(self.db, at, self.path)

    def settle(self) -> None:
        """Move the write-ahead log into the file, so that no row is in the log alone."""
        with translated(self.path):
            sqlite_file.empty_log(self.db)
        self._in_use = InUse(self.path, lock_path(self.path))

    def set_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint without a row."""
        with translated(self.path), transaction(self.db):
            self.db.execute(_SET_CHECKPOINT, checkpoint)

    @property
    def kind(self) -> Kind:
        """By SQLite's application_id."""
        return sqlite_file.KINDS.get(int(self._one("PRAGMA application_id")[0]), "none")

    def mark(self, kind: Kind) -> None:
        """Change what this file is."""
        self._one(f"PRAGMA application_id={sqlite_file.IDS[kind]}")

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
            applied = sqlite_file.migrations_of(self.db)  # a copy of an earlier version has fewer
            expected, found = sqlite_file.expected_schema(applied), sqlite_file.schema_of(self.db)
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

    def rows(self, after: int = 0) -> Iterator[Row]:
        """The rows after that one, oldest first."""
        with self._translated():
            found = self.db.execute(f"SELECT {_COLUMNS} FROM events WHERE seq > ? ORDER BY seq", (after,))
            yield from (Row(*row) for row in found)

    def notable_rows(self) -> Iterator[Row]:
        """All rows but engine steps, oldest first."""
        with self._translated():
            found = self.db.execute(f"SELECT {_COLUMNS} FROM events WHERE kind <> 'stepped' ORDER BY seq")
            yield from (Row(*row) for row in found)

    def signers(self) -> tuple[str, ...]:
        """Names of the keys that the rows name as theirs, oldest first."""
        with self._translated():
            found = self.db.execute("SELECT key FROM events GROUP BY key ORDER BY max(seq)")
            return tuple(name for (name,) in found if isinstance(name, str))

    def belief(self) -> tuple[Any, Any]:
        """The row that the stored belief was sealed for, and the sealed bytes; not checked."""
        found = self._one("SELECT seq, sealed FROM belief")
        return (None, None) if found is None else found

    @property
    def epoch(self) -> int | None:
        """None: the lock of the operating system is the fence."""
        return None

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Never: nobody can take a lock from its holder."""

    def secret(self) -> bytes | None:
        """The sealed secret; not checked."""
        found = self._one("SELECT sealed FROM secret") if self._has("secret") else None
        return None if found is None else found[0]

    def checkpoint(self) -> Checkpoint | None:
        """The stored checkpoint; not checked."""
        found = self._one("SELECT seq, digest, key, mac FROM checkpoint") if self._has("checkpoint") else None
        return None if found is None else Checkpoint(*found)

    def _has(self, table: str) -> bool:
        """Whether a file that a reader opened has a table: it may be of an earlier version."""
        return self._one("SELECT 1 FROM sqlite_master WHERE name = ?", table) is not None

    def usage(self) -> UsageTable:
        """The stored sums by hour and key."""
        try:
            with self._translated():
                rows = self.db.execute(f"SELECT hour, key, {', '.join(COUNTS)} FROM usage ORDER BY hour, key")
                return {(hour, key): Usage(key, *map(int, counts)) for hour, key, *counts in rows}
        except (TypeError, ValueError, InvalidInput):
            raise not_a_number() from None

    def usage_by(self, column: Literal["hour", "key"]) -> dict[str, Usage]:
        """The same, added up for each hour or each key."""
        try:
            with self._translated():
                found = self.db.execute(_ADD_UP.format(column)).fetchall()
            if not all(are_numbers for *_, are_numbers in found):
                raise not_a_number()
            return {
                name: Usage(name, tokens, dissent, charged, sum(map(int, units.split(","))), public)
                for name, tokens, dissent, charged, units, public, _ in found
            }
        except (ValueError, InvalidInput):
            raise not_a_number() from None

    def _one(self, statement: str, *arguments: object) -> Any:
        with self._translated():
            return self.db.execute(statement, arguments).fetchone()

    def _translated(self) -> Any:
        return translated(self.path, is_reading=self._lock is None)


def fill(path: Path, content: Copy, kind: Kind) -> None:
    """Write everything into an existing empty file, in one transaction."""
    with translated(path):
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=FULL")
            with transaction(db):
                db.execute(f"PRAGMA application_id={sqlite_file.IDS[kind]}")
                sqlite_file.migrate(db, "", path)
                db.executemany(_ADD_ROW, content.rows)
                db.execute(_SET_BELIEF, content.belief)
                if content.secret is not None:
                    db.execute(_SET_SECRET, (content.secret,))
                if content.checkpoint is not None:
                    db.execute(_SET_CHECKPOINT, content.checkpoint)
                for (hour, key), usage in (content.usage or {}).items():
                    _set_sums(db, hour, key, usage)
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
        _set_sums(db, *place, usage)


def _set_sums(db: sqlite3.Connection, hour: str, key: str, usage: Usage) -> None:
    counts = {name: getattr(usage, name) for name in COUNTS}
    db.execute(_SET_SUMS, (hour, key, *(counts | {"units": str(usage.units)}).values()))


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
