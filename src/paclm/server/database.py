"""The service database: one private SQLite file for API keys, quotas and replies. Knows no budget and no secret.

Losing this file costs no privacy: charges are in the ledger. Deleted content is overwritten, in the file
(`secure_delete`) and in its write-ahead log (`scrub`).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from paclm.errors import ServiceError
from paclm.ledger.store import transaction
from paclm.worlds.layout import CURATOR_FOLDER
from paclm.worlds.storage import refuse_if_others_can_enter

BUSY_SECONDS = 5.0


def service_path(workspace: Path) -> Path:
    """Path of a workspace's service database."""
    return workspace / CURATOR_FOLDER / "service.sqlite"


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


class Database:
    """One connection, shared by threads one at a time. Other processes may have the file open as well."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Database:
        """Open the file, or make it with mode 0600, in a folder that only its owner can enter."""
        refuse_if_others_can_enter(path.parent)
        _make_file(path)
        with _translated(path):
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                    connection.execute(f"PRAGMA {pragma}").fetchall()
                _migrate(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read the newest commit, also of another process."""
        with self._lock, _translated(self.path):
            yield self._connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One exclusive transaction; durable when the block has ended."""
        with self._lock, _translated(self.path), transaction(self._connection):
            yield self._connection

    def scrub(self) -> bool:
        """Checkpoint and truncate the write-ahead log, so that deleted content is gone; False if a reader blocks it."""
        with self._lock, _translated(self.path):
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
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
