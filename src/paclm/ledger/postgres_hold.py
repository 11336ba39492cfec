"""The right to write a ledger in PostgreSQL: an epoch, and a heartbeat by the database's clock.

The epoch is what protects: a write that names an older one is refused by the database. The heartbeat only tells others
whether the holder is alive, so that a standby need not ask. It has a connection of its own, so that a commit that waits
for a standby server does not look like a dead holder.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress

import psycopg

from paclm.errors import LedgerBusy, LedgerError, LedgerFenced, LedgerFull, LedgerHeld, LedgerUnwritable
from paclm.ledger.address import Holding
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import has_schema, migrate

_BEATS = 5
"""Heartbeats in the time after which a holder counts as dead."""
_ANSWER_SECONDS = 2.0
"""For a heartbeat; then its connection counts as lost, and the next one has another."""
_LOCK_WAIT = "10s"
"""For a commit under way, which may wait for a standby server."""
_IDLE_WAIT = "5s"
"""For this process itself, while it has the head locked: one that hangs must not stop the others."""
_UNSYNCED = "SET synchronous_commit = off"
"""A heartbeat is nothing to keep: it must not wait for a disk or for a standby server."""


def fenced(name: str) -> LedgerFenced:
    """The error of a process whose ledger was taken over."""
    return LedgerFenced(
        f"Another process took over the ledger in {name}, so this one stopped: nothing was released that is not in the "
        "ledger. The other one serves now; start this one again only as its standby."
    )


class Hold:
    """Held from `take` to `release`, unless another process takes it over."""

    def __init__(self, url: str, epoch: int, db: LimitedConnection, stale_seconds: float) -> None:
        self.epoch = epoch
        self.name = name_of(url)
        self.failure: LedgerError | None = None
        """Why the right was lost, once it was."""
        self._url, self._db = url, db
        self._interval = stale_seconds / _BEATS
        db.answer_seconds = _ANSWER_SECONDS
        self._watched: LimitedConnection | None = None
        self._call: Callable[[LedgerError], None] | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="ledger heartbeat", daemon=True)
        self._beating.start()

    @classmethod
    def take(cls, url: str, holding: Holding) -> Hold:
        """Take the next epoch; refused while another holder is alive, unless it is to be taken over."""
        name = name_of(url)

        def check(db: LimitedConnection) -> None:
            if not holding.take_over:
                _refuse_if_held(db, name, holding.stale_seconds)

        db = connect(url)
        try:
            with translated(name):
                if has_schema(db):
                    check(db)  # before anything is changed: who may not take it must not block or migrate it
            migrate(db, name, "")
            with translated(name), db.transaction():
                db.execute(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'")
                db.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_WAIT}'")
                db.execute("SELECT 1 FROM paclm.head FOR UPDATE")  # waits for a commit; a front cannot lock it
                check(db)
                epoch = _next_epoch(db, holding.stale_seconds)
            with translated(name):
                db.execute(_UNSYNCED)
        except BaseException:
            db.close()
            raise
        return cls(url, epoch, db, holding.stale_seconds)

    def refuse_if_lost(self) -> None:
        """Raise why the right was lost."""
        if self.failure is not None:
            raise self.failure

    def watch(self, call: Callable[[LedgerError], None], db: LimitedConnection | None = None) -> None:
        """Call this from the heartbeat's thread, once, when another process takes over or this connection is lost."""
        with self._lock:
            self._watched, self._call = db, call
            failure = self.failure
        if failure is not None:
            call(failure)

    def _beat(self) -> None:
        db: LimitedConnection | None = self._db
        while not self._end.wait(self._interval):
            try:
                db = db or self._connect()
                if not self._is_seen(db):
                    db.close()
                    self._lose(fenced(self.name))
                    return
            except LedgerError:  # until a commit fails or a heartbeat arrives, others may take over
                if db is not None:
                    db.close()
                db = None
            if self._watched is not None and _is_cut(self._watched) and not self._end.is_set():
                self._lose(_cut(self.name))
        if db is not None:
            self._let_go(db)
            db.close()

    def _connect(self) -> LimitedConnection:
        db = connect(self._url, answer_seconds=_ANSWER_SECONDS)
        with translated(self.name):
            db.execute(_UNSYNCED)
        return db

    def _is_seen(self, db: LimitedConnection) -> bool:
        with translated(self.name):
            beat = "UPDATE paclm.holder SET seen = clock_timestamp() WHERE epoch = %s"
            return db.execute(beat, (self.epoch,)).rowcount == 1

    def _lose(self, failure: LedgerError) -> None:
        with self._lock:
            call = self._call if self.failure is None else None
            self.failure, self._watched = self.failure or failure, None
        if call is not None:
            call(failure)

    def _let_go(self, db: LimitedConnection) -> None:
        """Tell others that nobody holds the ledger; where that fails they wait a little."""
        with suppress(LedgerError), translated(self.name):
            db.execute("UPDATE paclm.holder SET name = NULL WHERE epoch = %s", (self.epoch,))

    def release(self) -> None:
        """End the heartbeat; it is over when this returns, unless it waits for a server that does not answer."""
        self._end.set()
        if threading.current_thread() is not self._beating:
            self._beating.join(2 * _ANSWER_SECONDS)


def refuse_if_held(url: str, stale_seconds: float) -> None:
    """Raise `LedgerHeld` while a holder is alive. Reads only: whoever may take the ledger is decided by `Hold.take`."""
    name = name_of(url)
    db = connect(url, is_reading=True)
    try:
        with translated(name, is_reading=True):
            if has_schema(db):
                _refuse_if_held(db, name, stale_seconds)
    finally:
        db.close()


def refuse_if_fenced(url: str, epoch: int) -> None:
    """Raise `LedgerFenced` where a later epoch was taken; a database that cannot be asked refuses nothing."""
    with suppress(LedgerUnwritable, LedgerFull), closing(connect(url, is_reading=True)) as db:
        with translated(name_of(url), is_reading=True):
            found = db.execute("SELECT epoch FROM paclm.head").fetchone()
        if found is not None and found[0] != epoch:
            raise fenced(name_of(url))


def _is_cut(db: LimitedConnection) -> bool:
    """Whether the other end has closed it. Reads nothing: another thread may be waiting for an answer."""
    try:
        poll = select.poll()
        poll.register(db.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        return bool(poll.poll(0))
    except (psycopg.Error, OSError, ValueError):
        return True


def _cut(name: str) -> LedgerUnwritable:
    return LedgerUnwritable(
        f"The connection to {name} was lost while nothing was being written. Nothing was released that is not in the "
        "ledger. Check the server and the network, then restart."
    )


def _refuse_if_held(db: LimitedConnection, name: str, stale_seconds: float) -> None:
    found = db.execute(
        "SELECT name, extract(epoch FROM clock_timestamp() - seen), stale_seconds FROM paclm.holder "
        "WHERE name IS NOT NULL"
    ).fetchone()
    if found is None:
        return
    stale_seconds = max(stale_seconds, float(found[2]))  # the holder's heart may beat more slowly than ours
    if -stale_seconds < found[1] < stale_seconds:  # a time to come is none of a living holder's, but of another clock
        ago = max(0.0, float(found[1]))
        raise LedgerHeld(
            f"The ledger in {name} is in use by {found[0]}, last seen {ago:.0f} s ago. One secret has one writer: "
            "two would each release against a belief that lacks the other's tokens. Stop that process; "
            f"after a crash it counts as dead {stale_seconds:g} s after it was last seen."
        )


def _next_epoch(db: LimitedConnection, stale_seconds: float) -> int:
    found = db.execute("UPDATE paclm.head SET epoch = epoch + 1 RETURNING epoch").fetchone()
    if found is None:
        raise LedgerBusy("The table of the newest row is empty.")
    db.execute(
        "UPDATE paclm.holder SET epoch = %s, name = %s, seen = clock_timestamp(), stale_seconds = %s",
        (found[0], f"{socket.gethostname()} process {os.getpid()}", stale_seconds),
    )
    return int(found[0])
