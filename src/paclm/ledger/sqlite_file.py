"""The ledger's SQLite file: schema, durable settings, private permissions. Knows no event; errors are SQLite's."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import quote

from paclm.config import in_shell
from paclm.errors import LedgerError, LedgerMissing, LedgerNotDurable, LedgerUnwritable
from paclm.ledger.store import Kind

IDS: dict[Kind, int] = {"live": 0x5061634C, "copy": 0x50616343, "moved": 0x5061634D, "incoming": 0x50616349}
"""SQLite's application_id, by what the file is."""
KINDS: dict[int, Kind] = {number: kind for kind, number in IDS.items()}
BUSY_SECONDS = 5.0
_MIGRATIONS_TABLE = "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, at TEXT NOT NULL) STRICT"


def m001_initial(db: sqlite3.Connection) -> None:
    """Events, the belief, and sums by hour and key."""
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


def m002_secret(db: sqlite3.Connection) -> None:
    """The sealed secret, the signed checkpoint, and where the rows are that are no engine steps."""
    db.execute("CREATE INDEX notable ON events (seq, kind) WHERE kind <> 'stepped'")
    db.execute("CREATE TABLE secret (one INTEGER PRIMARY KEY CHECK (one = 1), sealed BLOB NOT NULL) STRICT")
    db.execute(
        "CREATE TABLE checkpoint (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, "
        "digest BLOB NOT NULL, key TEXT NOT NULL, mac BLOB NOT NULL) STRICT"
    )


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (m001_initial, m002_secret)


def migrate(db: sqlite3.Connection, at: str, path: Path) -> None:
    """Apply missing migrations and record each; a file made by a newer paclm is refused."""
    db.execute(_MIGRATIONS_TABLE)
    applied = migrations_of(db)
    known = [step.__name__ for step in MIGRATIONS]
    if newer := sorted(set(applied) - set(known)):
        raise LedgerError(f"{path} was made by a newer paclm (it has {', '.join(newer)}). Update paclm to open it.")
    for step in MIGRATIONS:
        if step.__name__ not in applied:
            step(db)
            db.execute("INSERT INTO migrations VALUES (?, ?)", (step.__name__, at))


def migrations_of(db: sqlite3.Connection) -> list[str]:
    """Names of the migrations that were applied."""
    return [name for (name,) in db.execute("SELECT name FROM migrations ORDER BY name")]


def schema_of(db: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Every table, index and trigger of a database: type, name, SQL."""
    return [tuple(row) for row in db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL ORDER BY 2")]


def expected_schema(applied: Collection[str]) -> list[tuple[str, str, str]]:
    """The schema of a ledger after these migrations, for comparison."""
    db = sqlite3.connect(":memory:")
    try:
        db.execute(_MIGRATIONS_TABLE)
        for step in MIGRATIONS:
            if step.__name__ in applied:
                step(db)
        return schema_of(db)
    finally:
        db.close()


def open_writer(path: Path) -> sqlite3.Connection:
    """A connection on which a commit is on the disk when it returns."""
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
                f"SQLite reports {name} = {found!r} for {path}, not {expected!r}: a commit might not reach the disk "
                "before a token leaves. Keep the workspace on a local disk."
            )


def empty_log(db: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file; does not wait for readers that still need the log."""
    db.execute("PRAGMA busy_timeout=0")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    db.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection; works while another process writes, and on read-only media."""
    check_exists(path)
    name = f"file:{quote(str(path.absolute()))}?mode=ro"
    try:
        return _check_readable(sqlite3.connect(name, uri=True, timeout=BUSY_SECONDS, isolation_level=None))
    except sqlite3.OperationalError:
        if path.with_name(path.name + "-wal").exists():
            raise
        # The side files that WAL needs cannot be made here, so there is no writer: the file can be read as it is.
        return _check_readable(sqlite3.connect(name + "&immutable=1", uri=True, isolation_level=None))


def _check_readable(db: sqlite3.Connection) -> sqlite3.Connection:
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def create_file(path: Path) -> None:
    """Make an empty file of mode 0600; SQLite gives its side files the same mode."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        raise LedgerUnwritable(
            f"{path} cannot be made ({error.strerror}). The folder must exist and be writable."
        ) from None


def side_files(path: Path) -> list[Path]:
    """The write-ahead log and its index, which SQLite keeps beside a database in use."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]


def check_private(path: Path, lock: Path) -> None:
    """Check that folder and files are writable, closed to other users, and have one name each."""
    check_exists(path)
    for place in (path.parent, path, lock, *side_files(path)):
        if not os.path.lexists(place):  # not the ledger itself: a lock or a log may be missing
            continue
        if place != path.parent:
            _check_one_name(place)
        check_closed(place)
        if not os.access(place, os.W_OK):
            raise LedgerUnwritable(f"{place} cannot be written. Nothing can be released without a durable ledger.")


def _check_one_name(file: Path) -> None:
    """Refuse links: under a second name, with another lock beside it, a second process could write the ledger."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise LedgerError(
            f"{file} is a symbolic link or no plain file. A ledger has one name: a process that opens it by another "
            "one finds no lock. Move the file itself to this place, or link its whole folder."
        )
    if status.st_nlink > 1:
        raise LedgerError(
            f"{file} has {status.st_nlink} names (hard links). A ledger has one name: a process that opens it by "
            "another one finds no lock. Remove the other names."
        )


def refuse_link(file: Path) -> None:
    """Refuse a symbolic link in the place of a file that records the past: it could be turned to an older copy."""
    if file.is_symlink():
        raise LedgerError(
            f"{file} is a symbolic link, which could be turned to an older copy. Name the file itself: {file.resolve()}"
        )


def check_exists(path: Path) -> None:
    """Refuse a path at which there is no ledger."""
    if not path.is_file():
        raise LedgerMissing(f"There is no ledger at {path}. It is made when the workspace first generates a token.")


def check_closed(place: Path) -> None:
    """Check that other users can neither read nor enter."""
    mode = place.stat().st_mode & 0o777
    if mode & 0o077:
        folder = place if place.is_dir() else place.parent
        raise LedgerError(
            f"{place} is open to other users (mode {mode:04o}). Close it: chmod -R go-rwx {in_shell(folder)}"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
