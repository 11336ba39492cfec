"""Keys, quotas and stored replies in the ledger's PostgreSQL database, written by the newest server alone.

A server's transaction first shows its permit, which `postgres_front` draws; the database refuses what comes without.
Once another server has taken over, the permit is void. The owner's command line needs none: making and revoking keys
spends nothing.

A lost connection is not made again: whether its last commit was made is unknown, and a settlement that is repeated
could free what others reserved. The next start counts all that was reserved as used.

Deleted rows are not overwritten: they stay in pages, write-ahead log, replicas and backups until PostgreSQL reuses
them. Replies are encrypted under keys that are not stored, so what stays cannot be read without the client's request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from psycopg.pq import TransactionStatus

from paclm.errors import LedgerError, ServiceError, ServiceStopped
from paclm.ledger.postgres import SCHEMA, LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import migrate
from paclm.server import database
from paclm.server.database import Database, Sql

T = TypeVar("T")

_IDLE_SECONDS = 5
"""A transaction in which nothing happens for this long is undone: others must not wait for a host that hangs."""


class PostgresDatabase(Database):
    """Two connections. With a permit it is a server's, and writes until another server has one."""

    is_remote = True

    def __init__(self, url: str, writer: LimitedConnection, reader: LimitedConnection, permit: str | None) -> None:
        super().__init__()
        self.name = name_of(url)
        self._writer, self._reader, self._permit = writer, reader, permit
        self._lock, self._reading_lock = threading.RLock(), threading.Lock()
        self._lost: ServiceStopped | None = None

    @classmethod
    def open(cls, url: str, permit: str | None = None, *, is_front: bool = False) -> PostgresDatabase:
        """Connect; the owner's login also makes the tables that are missing."""
        opened: list[LimitedConnection] = []
        try:
            for _ in range(2):
                opened.append(db := connect(url))
                if len(opened) == 1 and not is_front:
                    migrate(db, name_of(url), "")
                db.execute(f"SET search_path = {SCHEMA}")
                db.execute(f"SET lock_timeout = '{database.BUSY_SECONDS}s'")
                db.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'")
        except BaseException as error:
            for db in opened:
                db.close()
            if isinstance(error, LedgerError):
                raise ServiceError(f"Keys and quotas cannot be used. {error}") from None
            raise
        writer, reader = opened
        return cls(url, writer, reader, permit)

    @contextmanager
    def reading(self) -> Iterator[Sql]:
        """Read the newest commit, also of another process."""
        with self._reading_lock, self._checked(self._reader):
            yield _Portable(self._reader)

    def version(self, db: Sql) -> int:
        """Every writing transaction adds one."""
        (changes,) = db.execute("SELECT changes FROM writing").fetchone()
        return int(changes)

    @contextmanager
    def writing(self) -> Iterator[Sql]:
        """One exclusive transaction, by permit; inside `together`, a part of its one."""
        with self._lock, self._checked(self._writer):
            is_part = self._writer.info.transaction_status == TransactionStatus.INTRANS
            with self._writer.transaction() if is_part else self._whole():
                yield _Portable(self._writer)

    def together(self, writes: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Do several writes in one transaction."""
        results: list[T | Exception] = []
        with self._lock, self._checked(self._writer), self._whole():
            for write in writes:
                try:
                    results.append(write())
                except Exception as error:
                    if self._lost is not None:
                        raise
                    results.append(error)
        return results

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A transaction: waits for other writers, and is refused after a takeover."""
        with self._writer.transaction():
            if self._permit is None:
                self._writer.execute("UPDATE writing SET changes = changes + 1")
            elif self._writer.execute("SELECT paclm.begin_writing(%s)", (self._permit,)).fetchone() != (True,):
                raise ServiceStopped(  # the curator finds out by itself, and ends with a status of its own
                    f"Another server took over the ledger in {self.name}: keys, quotas and replies are written by "
                    "that one now. This one must stop."
                )
            yield

    @contextmanager
    def _checked(self, db: LimitedConnection) -> Iterator[None]:
        """Raise errors as ServiceError; a connection that is lost stays lost."""
        if self._lost is not None:
            raise self._lost
        try:
            with translated(self.name, is_reading=True):
                yield
        except LedgerError as error:
            if db.closed:
                raise self._stopped(f"Keys and quotas cannot be used any more. {error}") from None
            raise ServiceError(f"Keys and quotas cannot be used. {error}") from None

    def _stopped(self, reason: str) -> ServiceStopped:
        if self._lost is None:
            self._lost = ServiceStopped(reason)
            self.on_lost()
        return self._lost

    def scrub(self) -> bool:
        """Nothing: autovacuum frees deleted rows about once a minute, and nothing overwrites them sooner."""
        return True

    def close(self) -> None:
        """Close both connections."""
        with self._lock, self._reading_lock:
            self._reader.close()
            self._writer.close()


class _Portable:
    """Executes statements that have `?` for values."""

    def __init__(self, db: LimitedConnection) -> None:
        self._db = db

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> Any:
        """Execute one statement; returns a cursor."""
        return self._db.execute(statement.replace("?", "%s"), values)
