"""SQLite as the ledger uses it: durable settings read back, private files, its errors as ours. Knows no event."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from paclm.config import in_shell
from paclm.errors import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerMissing,
    LedgerNotDurable,
    LedgerUnwritable,
)

LIVE, COPY = 0x5061634C, 0x50616343
"""SQLite's application_id: a ledger in use, and a copy made by `backup`, which must be adopted before it is used."""
BUSY_SECONDS = 5.0


def m001_initial(db: sqlite3.Connection) -> None:
    """Events, the one belief, and figures by hour and key."""
    db.execute(
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, at TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL, "
        "key TEXT NOT NULL, previous BLOB NOT NULL, digest BLOB NOT NULL, mac BLOB NOT NULL) STRICT"
    )
    for verb in ("UPDATE", "DELETE"):
        db.execute(
            f"CREATE TRIGGER events_no_{verb.lower()} BEFORE {verb} ON events "
            "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        )
    db.execute(
        "CREATE TABLE belief (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, "
        "sealed BLOB NOT NULL) STRICT"
    )
    # Units are text: SQLite's integers end at 2^63, which is 8 nats.
    db.execute(
        "CREATE TABLE usage (hour TEXT, key TEXT, tokens INTEGER, dissent_tokens INTEGER, charged_tokens INTEGER, "
        "units TEXT, public_tokens INTEGER, PRIMARY KEY (hour, key)) STRICT, WITHOUT ROWID"
    )


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (m001_initial,)


def migrate(db: sqlite3.Connection, at: str, path: Path) -> None:
    """Bring the tables up to date, each step recorded; refuse what a newer paclm has made."""
    db.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, at TEXT NOT NULL) STRICT")
    applied = [name for (name,) in db.execute("SELECT name FROM migrations ORDER BY name")]
    known = [step.__name__ for step in MIGRATIONS]
    if newer := sorted(set(applied) - set(known)):
        raise LedgerError(f"{path} was made by a newer paclm (it has {', '.join(newer)}). Update paclm to open it.")
    for step in MIGRATIONS:
        if step.__name__ not in applied:
            step(db)
            db.execute("INSERT INTO migrations VALUES (?, ?)", (step.__name__, at))


def schema_of(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Every table, index and trigger, as SQLite wrote it down."""
    return [tuple(row) for row in db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL ORDER BY 2")]


def expected_schema() -> list[tuple[str, str, str]]:
    """The schema of a fresh ledger, for comparison."""
    db = sqlite3.connect(":memory:")
    try:
        migrate(db, "", Path())
        return schema_of(db)
    finally:
        db.close()


def open_writer(path: Path) -> sqlite3.Connection:
    """A connection on which a commit that returned is on the disk. The folder must be closed to others."""
    check_private(path)
    with translated(path):
        db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _make_durable(db, path)
        except BaseException:
            db.close()
            raise
    return db


def _make_durable(db: sqlite3.Connection, path: Path) -> None:
    for name, value, expected in (
        ("journal_mode", "WAL", "wal"),
        ("synchronous", "FULL", 2),
        ("fullfsync", "1", 1),  # macOS: through the drive's cache; elsewhere it changes nothing
        ("checkpoint_fullfsync", "1", 1),
    ):
        db.execute(f"PRAGMA {name}={value}").fetchall()
        (found,) = db.execute(f"PRAGMA {name}").fetchone()
        if found != expected:
            raise LedgerNotDurable(
                f"SQLite answers {name} = {found!r} for {path} where {expected!r} was asked for: a commit might not "
                "reach the disk before a token leaves. Keep the workspace on a local disk."
            )


def empty_log(db: sqlite3.Connection) -> None:
    """Bring what the write-ahead log holds into the file; a reader that needs the log is not waited for."""
    db.execute("PRAGMA busy_timeout=0")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection, also while another process writes, also on read-only media."""
    if not path.is_file():
        raise LedgerMissing(f"There is no ledger at {path}. It is made when the workspace first generates a token.")
    with translated(path, is_reading=True):
        name = f"file:{quote(str(path.absolute()))}?mode=ro"
        try:
            return _reading(sqlite3.connect(name, uri=True, timeout=BUSY_SECONDS, isolation_level=None))
        except sqlite3.OperationalError:
            if path.with_name(path.name + "-wal").exists():
                raise
            # Nobody can be writing here: WAL needs its side files, and they could not be made.
            return _reading(sqlite3.connect(name + "&immutable=1", uri=True, isolation_level=None))


def _reading(db: sqlite3.Connection) -> sqlite3.Connection:
    """The connection if it can read, closed if it cannot."""
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def is_copy(db: sqlite3.Connection) -> bool:
    """Whether the file says that it was made by `backup`."""
    return bool(db.execute("PRAGMA application_id").fetchone() == (COPY,))


def create_file(path: Path) -> None:
    """An empty file of mode 0600; SQLite gives its side files the same mode."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        raise LedgerUnwritable(
            f"{path} cannot be made ({error.strerror}). The folder must be there and writable."
        ) from None


def check_private(path: Path) -> None:
    """The folder and the file belong to one user alone, who can write them."""
    if not path.is_file():
        raise LedgerMissing(f"There is no ledger at {path}. It is made when the workspace first generates a token.")
    for place in (path.parent, path):
        check_closed(place)
        if not os.access(place, os.W_OK):
            raise LedgerUnwritable(f"{place} cannot be written. Nothing can be released without a durable ledger.")


def check_closed(place: Path) -> None:
    """Other users can neither read nor enter."""
    mode = place.stat().st_mode & 0o777
    if mode & 0o077:
        folder = place if place.is_dir() else place.parent
        raise LedgerError(
            f"{place} is open to other users (mode {mode:04o}). Close it: chmod -R go-rwx {in_shell(folder)}"
        )


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the commit is on the disk when the block has ended.

    The lock is taken at once: what is read inside cannot have changed by the time of the write.
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
    """SQLite's errors as the ledger's, by their code; whoever reads only has released nothing and restarts nothing."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translation(path, error, is_reading) from error


def _translation(path: Path, error: sqlite3.Error, is_reading: bool) -> LedgerError:
    name = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
    said = f"SQLite said: {error} ({name})."
    again = "repeat." if is_reading else "restart: nothing was released."
    if name.startswith("SQLITE_FULL"):
        return LedgerFull(f"There is no room left for {path}. {said} Make room, then {again}")
    if name == "SQLITE_IOERR_SHMSIZE":
        return LedgerFull(
            f"There is no room on the disk for {path.name}-shm, which SQLite needs beside {path} also for reading. "
            f"{said} Make room, then {again}"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return LedgerBusy(f"Another program holds {path}. {said} Close it, then {again}")
    if name == "SQLITE_CONSTRAINT_PRIMARYKEY":
        return LedgerBusy(
            f"Another process has written the next row of {path}: it could open the ledger because the lock was "
            f"removed while this one served. {said} Stop one of the two, then restart: nothing was released."
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_CORRUPTFS", "SQLITE_IOERR_DATA")):
        return LedgerDamaged(
            f"{path} is not a whole database: it was cut off or overwritten. {said} Restore a backup and adopt it."
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR", "SQLITE_AUTH")):
        what = "read" if is_reading else "written"
        return LedgerUnwritable(
            f"{path} cannot be {what}. {said} The disk or its permissions are in the way, or a side file (-wal, -shm) "
            f"was replaced. Mend that, then {again}"
        )
    return LedgerDamaged(f"{path} does not answer as a ledger. {said}")
