"""API keys and quotas, in the service database. Keys are stored hashed and shown once. Knows no budget and no secret.

A quota is no privacy bound: all keys share one belief, so the only bound is the global one, at the committed total.
Counters err on the safe side: a reservation is durable before its first token, and what a crashed server had reserved
counts as used.

The service database is one private SQLite file for keys, quotas and stored replies. Losing it costs no privacy: charges
are in the ledger. Deleted content is overwritten, in the file (`secure_delete`) and in its write-ahead log (`scrub`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from paclm.errors import InvalidInput, KeyRefused, QuotaExceeded, ServiceError
from paclm.worlds.layout import CURATOR_FOLDER
from paclm.worlds.storage import refuse_if_others_can_enter

T = TypeVar("T")

KEY_PREFIX = "paclm-"
"""Recognisable to people and secret scanners."""
KEY_BYTES = 32
LOCAL = "local"
"""The caller of a loopback server that needs no key."""
MAX_TOKENS = 2**62
"""Counters are SQLite integers, which end at 2^63."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COLUMNS = "name, is_admin, quota_tokens, used_tokens, reserved_tokens, created, revoked_at"
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
    """One connection to write and one to read, which does not wait for a commit; each is used by one thread at a time.

    Other processes may have the file open as well.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._connection, self._reader = connection, reader
        self._lock, self._reading_lock = threading.RLock(), threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Database:
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

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One exclusive transaction; durable when the block has ended. Inside `together`, a part of its one."""
        db = self._connection
        with self._lock, _translated(self.path), (_savepoint if db.in_transaction else transaction)(db):
            yield db

    def together(self, writes: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Do several writes in one transaction: results or errors, durable now. One that fails leaves the others alone.

        If the transaction itself fails, none was done, and its error is raised.
        """
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key's metadata, without the key."""

    name: str
    is_admin: bool
    quota_tokens: int | None
    """Private tokens this key may use in total; None for no limit of its own."""
    used_tokens: int
    reserved_tokens: int
    """Worst cases of requests in progress."""
    created: str
    revoked_at: str | None

    @property
    def remaining_tokens(self) -> int | None:
        """What is left of the quota beside requests in progress; None without a quota."""
        if self.quota_tokens is None:
            return None
        return max(0, self.quota_tokens - self.used_tokens - self.reserved_tokens)


def _now() -> datetime:
    return datetime.now(UTC)


class KeyStore:
    """The keys of one workspace. Every call sees what another process changed: a revoked key is refused."""

    def __init__(self, db: Database, clock: Callable[[], datetime] = _now) -> None:
        self.database = db
        self._clock = clock
        self._read: tuple[int, Sequence[tuple[bytes, KeyInfo]]] = (-1, [])

    @classmethod
    def open(cls, path: Path) -> KeyStore:
        """Open or create the file. Changes no counter, so that the command line can read it while a server runs."""
        return cls(Database.open(path))

    def recover(self) -> int:
        """Count as used what a crashed server had reserved; returns the tokens.

        For the server that holds the curator's lock, before it takes requests.
        """
        with self.database.writing() as db:
            (tokens,) = db.execute("SELECT coalesce(sum(reserved_tokens), 0) FROM keys").fetchone()
            db.execute("UPDATE keys SET used_tokens = used_tokens + reserved_tokens, reserved_tokens = 0")
        return int(tokens)

    def add(self, name: str, *, admin: bool = False, quota_tokens: int | None = None) -> str:
        """Make a key and return it; it cannot be shown again."""
        _check_name(name)
        if quota_tokens is not None and not 0 < quota_tokens <= MAX_TOKENS:
            raise InvalidInput(f"A quota is a whole number of tokens of at least 1, not {quota_tokens!r}.")
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        with self.database.writing() as db:
            if (found := _find(db, name)) is not None:
                raise InvalidInput(
                    f"There is a key named {name!r} already"
                    + (f", revoked at {found.revoked_at}" if found.revoked_at else "")
                    + ". A name cannot be reused; choose another, for example with a date."
                )
            db.execute(
                "INSERT INTO keys (name, digest, is_admin, quota_tokens, created) VALUES (?, ?, ?, ?, ?)",
                (name, _digest(key), int(admin), quota_tokens, self._stamp()),
            )
        return key

    def list(self) -> list[KeyInfo]:
        """Every key ever made, oldest first."""
        return [key for _, key in self._all()]

    def revoke(self, name: str) -> KeyInfo:
        """Revoke a key for good and delete its stored replies; its counters stay."""
        with self.database.writing() as db:
            key = _find(db, name)
            if key is None:
                known = [row[0] for row in db.execute("SELECT name FROM keys WHERE revoked_at IS NULL ORDER BY name")]
                raise InvalidInput(f"There is no key named {name!r}. Keys in force: {', '.join(known) or 'none'}.")
            key = replace(key, revoked_at=key.revoked_at or self._stamp())
            db.execute("UPDATE keys SET revoked_at = ? WHERE name = ?", (key.revoked_at, name))
            db.execute("DELETE FROM replies WHERE key_name = ?", (name,))
        self.database.scrub()
        return key

    def identify(self, presented: str) -> KeyInfo | None:
        """The key's metadata; None if it is unknown or revoked.

        Compares with every key in constant time: the time taken depends neither on the guess nor on which key it is.
        """
        digest, found = _digest(presented), None
        for stored, key in self._all():
            if hmac.compare_digest(stored, digest):
                found = key
        return found if found is not None and found.revoked_at is None else None

    def has_keys(self) -> bool:
        """Whether any key is in force."""
        return any(key.revoked_at is None for key in self.list())

    def reserve(self, name: str, tokens: int) -> None:
        """Reserve the worst case of a request durably before its first token; refuse what the quota cannot cover."""
        _check_tokens(tokens)
        with self.database.writing() as db:
            key = _find(db, name)
            if key is None or key.revoked_at is not None:
                raise KeyRefused(f"The key {name!r} is {'unknown' if key is None else 'revoked'}.")
            if key.remaining_tokens is not None and tokens > key.remaining_tokens:
                raise QuotaExceeded(
                    name=name,
                    quota_tokens=key.quota_tokens or 0,
                    used_tokens=key.used_tokens,
                    reserved_tokens=key.reserved_tokens,
                    requested=tokens,
                )
            db.execute("UPDATE keys SET reserved_tokens = reserved_tokens + ? WHERE name = ?", (tokens, name))

    def settle(self, name: str, *, reserved: int, used: int) -> None:
        """Free a reservation and count what was used; also for a key revoked meanwhile."""
        _check_tokens(reserved)
        _check_tokens(used)
        with self.database.writing() as db:
            done = db.execute(
                "UPDATE keys SET reserved_tokens = reserved_tokens - ?, used_tokens = used_tokens + ? "
                "WHERE name = ? AND reserved_tokens >= ?",
                (reserved, used, name, reserved),
            )
            if done.rowcount != 1:
                raise ServiceError(f"{reserved:,} tokens were never reserved for the key {name!r}.")

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def _all(self) -> Sequence[tuple[bytes, KeyInfo]]:
        """Digests and keys as of the last commit of any process; read again only if there was one."""
        with self.database.reading() as db:
            (version,) = db.execute("PRAGMA data_version").fetchone()
            if version != self._read[0]:
                rows = db.execute(f"SELECT digest, {_COLUMNS} FROM keys ORDER BY created, name").fetchall()
                self._read = version, [(digest, _info(row)) for digest, *row in rows]
            return self._read[1]

    def _stamp(self) -> str:
        return self._clock().isoformat(timespec="seconds")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _digest(key: str) -> bytes:
    """A key is 32 random bytes, which cannot be guessed: a slow hash would add nothing."""
    return hashlib.sha256(b"paclm api key\n" + key.encode("utf-8", "surrogatepass")).digest()


def _find(db: sqlite3.Connection, name: str) -> KeyInfo | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM keys WHERE name = ?", (name,)).fetchone()
    return None if row is None else _info(row)


def _info(row: Sequence[Any]) -> KeyInfo:
    name, is_admin, *rest = row
    return KeyInfo(name, bool(is_admin), *rest)


def _check_name(name: str) -> None:
    """Names appear in the ledger, logs and metrics; a key pasted by mistake must not."""
    if name.startswith(KEY_PREFIX):
        raise InvalidInput(f"A key's name cannot begin with {KEY_PREFIX!r}: that is how keys themselves begin.")
    if name == LOCAL:
        raise InvalidInput(f"{LOCAL!r} is reserved for callers without a key. Choose another.")
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            "A key's name has 1 to 64 ASCII letters, digits, dots, dashes and underscores and begins with a letter or "
            f"digit; {name[:80]!r} does not."
        )


def _check_tokens(tokens: int) -> None:
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
        raise InvalidInput(f"A number of tokens must be a whole number of at least 0, not {tokens!r}.")
