"""The one place that writes: a row, its figures and the belief in one transaction, then the witness.

After any failure it refuses everything, because nobody knows then what reached the disk: only a new opening finds out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from paclm.config import MechanismConfig
from paclm.errors import LedgerDamaged, LedgerError, LedgerRolledBack, LedgerStopped, LedgerTampered, UnsoundState
from paclm.ledger import database
from paclm.ledger.chain import GENESIS, Head, Keys, endorse, make_row
from paclm.ledger.events import COUNTS, BadRow, Event, KeyRotated, Opened, Usage, reseals
from paclm.ledger.lock import Memory, WriterLock
from paclm.ledger.reading import (
    UsageTable,
    add_usages,
    check_pages,
    check_remembered,
    new_settings,
    read_chain,
    read_contents,
    read_usage,
)
from paclm.ledger.state import apply, to_state_fields, usages
from paclm.ledger.usage import Sums
from paclm.ledger.witness import Testimony, Witness

Clock = Callable[[], datetime]

_ADD_ROW = "INSERT INTO events VALUES (?,?,?,?,?,?,?,?)"
_SET_BELIEF = "INSERT OR REPLACE INTO belief VALUES (1, ?, ?)"
_FIND_FIGURES = f"SELECT {', '.join(COUNTS)} FROM usage WHERE hour = ? AND key = ?"
_SET_FIGURES = f"INSERT OR REPLACE INTO usage (hour, key, {', '.join(COUNTS)}) VALUES (?,?,?,?,?,?,?)"


def utc_now() -> datetime:
    """The time of a row: for people and for figures by day; nothing is decided by it."""
    return datetime.now(UTC)


def stamp(clock: Clock) -> str:
    """Now, in UTC, as rows have it."""
    return clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Writer:
    """An open ledger file and its lock, from its opening to `close`."""

    def __init__(
        self, path: Path, keys: Keys, *, in_full: bool, accept_copy: bool = False, clock: Clock = utc_now
    ) -> None:
        """Open without asking the witness; every caller has its own questions for it."""
        self.path = path.absolute()
        self.keys = keys
        self.witness: Witness | None = None
        self._clock = clock
        self._process = os.getpid()
        self._failure: str | None = None
        self._sums: Sums | None = None
        self.one_at_a_time = threading.RLock()
        database.check_private(self.path)
        self._lock = WriterLock(lock_path(self.path))
        try:
            self.db = database.open_writer(self.path)
            try:
                self._load(in_full, accept_copy)
            except BaseException:
                self.db.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def _load(self, in_full: bool, accept_copy: bool) -> None:
        with database.translated(self.path):
            (kind,) = self.db.execute("PRAGMA application_id").fetchone()
            if kind == database.COPY and not accept_copy:
                raise LedgerRolledBack(
                    f"{self.path} is a backup copy: tokens may have left after it was made. Adopt it with "
                    "paclm ledger adopt, which charges what can have been spent since."
                )
            if kind not in (database.LIVE, database.COPY):
                raise LedgerDamaged(f"{self.path} is not a ledger: it was overwritten or emptied. Restore a backup.")
            if in_full:
                check_pages(self.db, self.path)
            with database.transaction(self.db):
                database.migrate(self.db, stamp(self._clock), self.path)
            contents = (read_chain if in_full else read_contents)(self.db, self.path, self.keys)
        if contents.key != self.keys.current and accept_copy:  # a copy from before the key was rotated
            self.keys = self.keys.led_by(contents.key)
        elif contents.key != self.keys.current:
            raise LedgerError(f"The newest rows of {self.path} are signed with an old key. Pass the newest key first.")
        self.opened = contents.opened
        self.head = contents.head
        self.state = contents.state
        self.settings = contents.settings
        self.sealed_belief = contents.sealed_belief

    @property
    def remembered(self) -> Memory | None:
        """The newest row when the ledger was last in use in this folder, where that was noted."""
        return self._lock.remembered

    def compare_with_memory(self) -> None:
        """Refuse a file that lacks the row which was the newest when the ledger was last in use in this folder."""
        with database.translated(self.path):
            check_remembered(self.db, self.path, self.head.seq, self.remembered)

    def settle(self) -> None:
        """Once the ledger is believed: note its head, and leave no history in the write-ahead log alone."""
        self._lock.remember(self.head)
        with database.translated(self.path):
            database.empty_log(self.db)

    @property
    def sums(self) -> Sums:
        """Figures by hour and key; hold `one_at_a_time` while reading them. Only the first call reads the file."""
        with self.one_at_a_time:
            self.refuse_if_stopped()
            if self._sums is None:
                with database.translated(self.path):
                    self._sums = Sums(read_usage(self.db))
            return self._sums

    def append(
        self, event: Event, sealed_belief: bytes | None = None, seq: int | None = None, keys: Keys | None = None
    ) -> None:
        """Write one event durably. When this returns it is on the disk, and the witness knows.

        Other `keys` sign this row and all that follow, once it is on the disk.
        """
        with self.one_at_a_time:
            self.refuse_if_stopped()
            seq = self.head.seq + 1 if seq is None else seq
            try:
                after = apply(self.state, seq, event)
            except BadRow as problem:
                raise LedgerTampered(f"A new row for {self.path} {problem}. Nothing was written.") from None
            row = make_row(self.head, seq, stamp(self._clock), event, after, keys or self.keys)
            entries, sums = usages(self.state, after, event), self._sums
            try:
                with database.translated(self.path), database.transaction(self.db):
                    self.db.execute(_ADD_ROW, row)
                    add_figures(self.db, row.at, entries)
                    if sealed_belief is not None:
                        self.db.execute(_SET_BELIEF, (after.belief_seq, sealed_belief))
                if keys is not None:
                    self._use_keys(keys)
                self.head, self.state = Head(seq, row.digest), after
                if sums is not None:
                    sums.add(row.at, entries)
                self._sums = sums  # whoever first asked in mid-commit saw this row already: read anew
                if sealed_belief is not None:
                    self.sealed_belief = sealed_belief
                if (settings := new_settings(event)) is not None:
                    self.settings = MechanismConfig(**settings)
                if self.witness is not None and self.state.witness is not None:
                    told = self.testimony(self.state.witness)
                    if reseals(event):  # in its other slot too: the belief there is sealed with the old key
                        self.witness.write_twice(told)
                    else:
                        self.witness.write(told)
                self._lock.remember(self.head)
            except BaseException as failure:
                self._failure = str(failure) or type(failure).__name__
                raise

    def rotate(self, keys: Keys, sealed_belief: bytes | None = None) -> None:
        """Sign with other keys from the row on that says so; the old key vouches for the new one inside it."""
        with self.one_at_a_time:
            old = self.keys.current
            vouched = endorse(keys, old, keys.current, self.head.digest)
            belief = None if sealed_belief is None else hash_belief(sealed_belief)
            self.append(KeyRotated(old, keys.current, vouched, belief), sealed_belief, keys=keys)

    def _use_keys(self, keys: Keys) -> None:
        self.keys = keys
        if self.witness is not None:
            self.witness.keys = keys

    def testimony(self, witness: str) -> Testimony:
        """What a witness of that name should know now."""
        return Testimony(
            witness,
            self.opened.ledger,
            self.head,
            to_state_fields(self.state),
            dataclasses.asdict(self.settings),
            self.sealed_belief,
            self.keys.current,
        )

    def refuse_if_stopped(self) -> None:
        """Nothing is written after a failure, after `close`, or in a process that was forked off."""
        if self._failure is not None:
            raise LedgerStopped(f"This ledger stopped: {self._failure} Restart to go on from what is on the disk.")
        if os.getpid() != self._process:
            raise LedgerStopped("This ledger was opened before the process forked. One secret has one writer.")

    def close(self) -> None:
        """Close files and let the next writer in; closing twice is fine."""
        with self.one_at_a_time:
            if self._failure == _CLOSED:
                return
            self._failure = _CLOSED
            if self.witness is not None:
                self.witness.close()
            self.db.close()
            self._lock.release()

    def __reduce__(self) -> NoReturn:
        raise UnsoundState("An open ledger cannot be pickled or copied: one secret has one writer.")


_CLOSED = "it was closed."


def write_first_row(path: Path, event: Opened, sealed_belief: bytes, keys: Keys, clock: Clock) -> None:
    """A new file with the row that opens a ledger, durable."""
    database.create_file(path)
    at = stamp(clock)
    with database.translated(path):
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous=FULL")
            with database.transaction(db):
                db.execute(f"PRAGMA application_id={database.LIVE}")
                database.migrate(db, at, path)
                row = make_row(Head(0, GENESIS), 1, at, event, apply(None, 1, event), keys)
                db.execute(_ADD_ROW, row)
                db.execute(_SET_BELIEF, (1, sealed_belief))
        finally:
            db.close()


def add_figures(db: sqlite3.Connection, at: str, entries: tuple[Usage, ...]) -> None:
    """Add an event's entries to the figures by hour and key."""
    added: UsageTable = {}
    add_usages(added, at, entries)
    for place, counts in added.items():
        found = db.execute(_FIND_FIGURES, place).fetchone()
        if found is not None:
            counts = tuple(int(old) + new for old, new in zip(found, counts, strict=True))
        stored = (str(n) if name == "units" else n for name, n in zip(COUNTS, counts, strict=True))
        db.execute(_SET_FIGURES, (*place, *stored))


def lock_path(path: Path) -> Path:
    """The lock beside a ledger."""
    return path.with_name("ledger.lock")


def hash_belief(sealed: bytes) -> str:
    """What the rows say of a sealed belief."""
    return hashlib.sha256(sealed).hexdigest()
