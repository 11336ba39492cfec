"""The right to write a ledger in PostgreSQL: an epoch, and a heartbeat by the database's clock.

The epoch is what protects: a write that names an older one is refused by the database. The heartbeat only tells others
whether the holder is alive, so that a standby need not ask. It has a connection of its own, so that a commit that waits
for a standby server does not look like a dead holder.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from paclm.errors import LedgerBusy, LedgerError, LedgerFenced, LedgerHeld
from paclm.ledger.address import Holding
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import migrate

_BEATS = 5
"""Heartbeats in the time after which a holder counts as dead."""


def fenced(name: str) -> LedgerFenced:
    """The error of a process whose ledger was taken over."""
    return LedgerFenced(
        f"Another process took over the ledger in {name}, so this one stopped: nothing was released that is not in the "
        "ledger. The other one serves now; start this one again only as its standby."
    )


class Hold:
    """Held from `take` to `release`, unless another process takes it over; then `on_lost` is called, once."""

    def __init__(self, url: str, epoch: int, holding: Holding) -> None:
        self.epoch = epoch
        self.name = name_of(url)
        self.is_lost = False
        self.on_lost: Callable[[], None] = lambda: None
        self._url, self._holding = url, holding
        self._end = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="ledger heartbeat", daemon=True)
        self._beating.start()

    @classmethod
    def take(cls, url: str, holding: Holding) -> Hold:
        """Take the next epoch; refused while another holder is alive, unless it is to be taken over."""
        db, name = connect(url), name_of(url)
        try:
            migrate(db, name, "")
            with translated(name), db.transaction():
                db.execute("SET LOCAL lock_timeout = '10s'")
                db.execute("SELECT 1 FROM paclm.head FOR UPDATE")  # waits for commits and for writes of a front
                if not holding.take_over:
                    _refuse_if_held(db, name, holding.stale_seconds)
                epoch = _next_epoch(db)
        finally:
            db.close()
        return cls(url, epoch, holding)

    def _beat(self) -> None:
        db: LimitedConnection | None = None
        while not self._end.wait(self._holding.stale_seconds / _BEATS):
            try:
                db = db or connect(self._url)
                with translated(self.name):
                    seen = db.execute(
                        "UPDATE paclm.holder SET seen = clock_timestamp() WHERE epoch = %s", (self.epoch,)
                    ).rowcount
            except LedgerError:  # the next commit finds out; until then others may take over
                db = None
                continue
            if seen == 0 and not self._end.is_set():
                self.is_lost = True
                self.on_lost()
                break
        if db is not None:
            db.close()

    def release(self) -> None:
        """End the heartbeat, and tell others that nobody holds the ledger; where that fails they wait a little."""
        self._end.set()
        with suppress(LedgerError):
            db = connect(self._url)
            try:
                with translated(self.name):
                    db.execute("UPDATE paclm.holder SET name = NULL WHERE epoch = %s", (self.epoch,))
            finally:
                db.close()


def _refuse_if_held(db: LimitedConnection, name: str, stale_seconds: float) -> None:
    found = db.execute(
        "SELECT name, extract(epoch FROM clock_timestamp() - seen) FROM paclm.holder WHERE name IS NOT NULL"
    ).fetchone()
    if found is not None and found[1] < stale_seconds:
        ago = max(0.0, float(found[1]))
        raise LedgerHeld(
            f"The ledger in {name} is in use by {found[0]}, last seen {ago:.0f} s ago. One secret has one writer: "
            "two would each release against a belief that lacks the other's tokens. Stop that process; "
            f"after a crash it counts as dead {stale_seconds:g} s after it was last seen."
        )


def _next_epoch(db: LimitedConnection) -> int:
    found = db.execute("UPDATE paclm.head SET epoch = epoch + 1 RETURNING epoch").fetchone()
    if found is None:
        raise LedgerBusy("The table of the newest row is empty.")
    db.execute(
        "UPDATE paclm.holder SET epoch = %s, name = %s, seen = clock_timestamp()",
        (found[0], f"{socket.gethostname()} process {os.getpid()}"),
    )
    return int(found[0])
