"""The service database: keys, quotas and stored replies. It is where the ledger is, so that all of it moves together.

Beside a ledger in a file it is one private SQLite file; in PostgreSQL it is three tables of the ledger's database
(`postgres_database`). Losing it costs no privacy: charges are in the ledger. Who writes it, writes one exclusive
transaction. Statements are those that both databases know, with `?` for values.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from paclm.errors import MissingExtra, ServiceError
from paclm.worlds.layout import CURATOR_FOLDER
from paclm.worlds.settings import ledger_address
from paclm.worlds.storage import refuse_if_others_can_enter

T = TypeVar("T")

BUSY_SECONDS = 5.0
"""How long to wait for another writer."""
_COLUMNS = {
    "keys": "name, digest, is_admin, quota_tokens, used_tokens, reserved_tokens, created, revoked_at",
    "replies": "id, key_name, salt, body_check, state, sealed, expires",
}


def service_path(workspace: Path) -> Path:
    """Path of a workspace's service database, where it is a file."""
    return workspace / CURATOR_FOLDER / "service.sqlite"


def service_address(workspace: Path) -> Path | str:
    """Where a workspace keeps its service database: a path, or the URL of the ledger's database."""
    address = ledger_address(workspace)
    return address if isinstance(address, str) else service_path(workspace)


def service_database(workspace: Path, permit: str | None = None) -> Database:
    """Open the service database of a workspace with the owner's login; a server's own writes show its permit."""
    return open_database(service_address(workspace), permit)


def open_database(address: Path | str, permit: str | None = None, *, is_front: bool = False) -> Database:
    """Open a file, or the tables in the database at a URL; they are made if missing, except by the front."""
    if isinstance(address, Path):
        return SqliteDatabase.open(address)
    try:
        from paclm.server.postgres_database import PostgresDatabase
    except ImportError:
        raise MissingExtra("psycopg") from None
    return PostgresDatabase.open(address, permit, is_front=is_front)


def name_of(url: str) -> str:
    """Host, port and name of a database, without user and password."""
    try:
        from paclm.ledger.postgres import name_of as name_of_url
    except ImportError:
        raise MissingExtra("psycopg") from None
    return name_of_url(url)


class Sql(Protocol):
    """What executes statements."""

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Execute one statement; returns a cursor."""


class Database(ABC):
    """One connection to write and one to read, which does not wait for a commit; each is used by one thread at a time.

    Other processes may use the database as well.
    """

    name: str
    """For messages: the path, or the URL without its password."""
    is_remote: bool
    """Whether reading waits for a network."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] = lambda: None
        """Called, from any thread, when the connection is lost for good."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[Sql]:
        """Read the newest commit, also of another process."""

    @abstractmethod
    def version(self, db: Sql) -> int:
        """A number that differs after every commit of any process."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[Sql]:
        """One exclusive transaction; durable when the block has ended. Inside `together`, a part of its one."""

    @abstractmethod
    def together(self, writes: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Do several writes in one transaction: results or errors, durable now. One that fails leaves the others alone.

        If the transaction itself fails, none was done, and its error is raised.
        """

    @abstractmethod
    def scrub(self) -> bool:
        """Overwrite deleted content as far as the database can; False if that must be tried again."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def copy_service(source: Database, target: Database) -> None:
    """Copy keys, counters and stored replies, all or nothing. Refused where the target has keys that differ."""
    with source.writing() as old, target.writing() as db:  # nobody adds a key meanwhile
        found = {table: _rows(old, table) for table in _COLUMNS}
        if not set(_rows(db, "keys")) <= set(found["keys"]):
            raise ServiceError(
                f"{target.name} has API keys that differ from those in {source.name}: two sets cannot be joined. "
                "Choose a database without keys, or delete the rows of its tables keys and replies first."
            )
        for table, columns in _COLUMNS.items():
            db.execute(f"DELETE FROM {table}")
            places = ", ".join("?" * (columns.count(",") + 1))
            for row in found[table]:
                db.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", row)


def _rows(db: Sql, table: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in db.execute(f"SELECT {_COLUMNS[table]} FROM {table}").fetchall()]


def m001_initial(db: sqlite3.Connection) -> None:
    """Keys with their counters, and stored replies."""
    db.execute(
        "CREATE TABLE keys (name TEXT PRIMARY KEY, digest BLOB NOT NULL UNIQUE, is_admin INTEGER NOT NULL, "
        "quota_tokens INTEGER, used_tokens INTEGER NOT NULL DEFAULT 0, reserved_tokens INTEGER NOT NULL DEFAULT 0, "
        "created TEXT NOT NULL, revoked_at TEXT) STRICT"
    )
    db.execute(
        "CREATE TABLE replies (id BLOB PRIMARY KEY, key_name TEXT NOT NULL, salt BLOB NOT NULL, body_check BLOB "
        "NOT NULL, state TEXT NOT NULL CHECK (state IN ('running', 'stored', 'lost')), sealed BLOB, "
        "expires REAL NOT NULL) STRICT"
    )
    db.execute("CREATE INDEX replies_expires ON replies (expires)")


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (m001_initial,)


class SqliteDatabase(Database):
    """A file. Deleted content is overwritten in it (`secure_delete`) and in its write-ahead log (`scrub`)."""

    is_remote = False

    def __init__(self, path: Path, connection: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        super().__init__()
        self.path = path
        self.name = str(path)
        self._connection, self._reader = connection, reader
        self._lock, self._reading_lock = threading.RLock(), threading.Lock()

    @classmethod
    def open(cls, path: Path) -> SqliteDatabase:
        """Open the file, or make it with mode 0600, in a folder that only its owner can enter."""
        refuse_if_others_can_enter(path.parent)
        _make_file(path)
        with _translated(path):
            connection, reader = (
                sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
                for _ in range(2)
            )
            try:
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                    connection.execute(f"PRAGMA {pragma}").fetchall()
                _migrate(connection, path)
            except BaseException:
                connection.close()
                reader.close()
                raise
        return cls(path, connection, reader)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read the newest commit, also of another process."""
        with self._reading_lock, _translated(self.path):
            yield self._reader

    def version(self, db: Sql) -> int:
        """SQLite counts the commits of others: here, those over the other connection too."""
        (version,) = db.execute("PRAGMA data_version").fetchone()
        return int(version)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One exclusive transaction; durable when the block has ended. Inside `together`, a part of its one."""
        db = self._connection
        with self._lock, _translated(self.path), (_savepoint if db.in_transaction else transaction)(db):
            yield db

    def together(self, writes: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Do several writes in one transaction."""
        results: list[T | Exception] = []
        with self._lock, _translated(self.path), transaction(self._connection):
            for write in writes:
                try:
                    results.append(write())
                except Exception as error:
                    if not self._connection.in_transaction:  # SQLite has undone all of them
                        raise
                    results.append(error)
        return results

    def scrub(self) -> bool:
        """Checkpoint and truncate the write-ahead log, so that deleted content is gone; False if a reader blocks it."""
        with self._lock, self._reading_lock, _translated(self.path):
            self._connection.execute("PRAGMA busy_timeout=0")
            try:
                (is_busy, *_) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError as error:
                if not (error.sqlite_errorname or "").startswith("SQLITE_BUSY"):
                    raise
                is_busy = True
            finally:
                self._connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
        return not is_busy

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._reading_lock:
            self._reader.close()  # first: the last connection to close removes the write-ahead log
            self._connection.close()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, on the disk when the block has ended. The front loads no module that opens the ledger."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def _savepoint(db: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, as part of a transaction."""
    db.execute("SAVEPOINT one")
    try:
        yield
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK TO one")
            db.execute("RELEASE one")
        raise
    db.execute("RELEASE one")


def _make_file(path: Path) -> None:
    """Create an empty file of mode 0600 unless it exists; SQLite gives its side files the same mode."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be opened ({error.strerror}). It holds API keys and quotas: the folder must be writable."
        ) from None


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ServiceError(f"{path} was made by a newer paclm (version {version}). Update paclm to open it.")
        for step in MIGRATIONS[version:]:
            step(connection)
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as ServiceError."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or "SQLITE_ERROR"
        remedy = "Another program holds it: try again." if name.startswith("SQLITE_BUSY") else "Repair or restore it."
        raise ServiceError(f"{path} cannot be used: SQLite reports {error} ({name}). {remedy}") from error
