"""Read a ledger's rows and check them: the newest ones at every opening, all of them when asked. Never writes."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paclm.config import MechanismConfig
from paclm.errors import InvalidInput, LedgerDamaged, LedgerRolledBack, LedgerTampered, PaclmError
from paclm.ledger.chain import GENESIS, Head, Keys, Row, check_row, endorse
from paclm.ledger.database import expected_schema, schema_of
from paclm.ledger.events import (
    COUNTS,
    BadRow,
    Event,
    Extended,
    KeyRotated,
    Opened,
    Restored,
    Settings,
    SettingsChanged,
    Stepped,
    Usage,
)
from paclm.ledger.lock import Memory
from paclm.ledger.state import Price, State, apply, usages

_COLUMNS = "seq, at, kind, body, key, previous, digest, mac"
UsageTable = dict[tuple[str, str], tuple[int, ...]]
"""(hour, key) → counts, in the order of `COUNTS`."""


_BEFORE_THE_FIRST = Row(0, "", "", "", "", GENESIS, GENESIS, b"")


@dataclass(frozen=True, slots=True)
class Contents:
    """Where a ledger stands: what opening it gives."""

    opened: Opened
    head: Head
    key: str
    """The name of the key that signed the head."""
    state: State
    settings: MechanismConfig
    sealed_belief: bytes


def read_contents(db: sqlite3.Connection, path: Path, keys: Keys | None) -> Contents:
    """The ledger as its newest row tells it; checks that row, the first, the settings' and the belief's. O(1)."""
    _check_schema(db, path)
    last = db.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    if last is None:
        raise LedgerTampered(f"{path} has no rows: not even the one that opens a ledger.")
    head = Row(*last)
    _, state = _checked(head, path, keys)
    opened, _ = _checked(read_row(db, path, 1), path, keys)
    if not isinstance(opened, Opened):
        raise _tampered(path, 1, "does not open a ledger")
    setting, _ = _checked(read_row(db, path, state.settings_seq), path, keys)
    believing, _ = _checked(read_row(db, path, state.belief_row), path, keys)
    sealed = _read_belief(db, path, state, believing)
    try:
        settings = MechanismConfig(**(new_settings(setting) or {}))
    except (TypeError, InvalidInput):
        raise _tampered(path, state.settings_seq, "should hold the settings in force, and does not") from None
    return Contents(opened, Head(head.seq, head.digest), head.key, state, settings, sealed)


def read_chain(db: sqlite3.Connection, path: Path, keys: Keys | None) -> Contents:
    """The same after every row's hash, link and MAC was checked: no row was touched since it was written."""
    contents = read_contents(db, path, keys)
    previous = _BEFORE_THE_FIRST
    for row in _rows(db):
        try:
            check_row(row, keys)
            _check_link(previous, row, keys)
        except BadRow as problem:
            raise _tampered(path, row.seq, str(problem)) from None
        previous = row
    return contents


def read_all(db: sqlite3.Connection, path: Path, keys: Keys | None) -> Contents:
    """The same after every sum was taken and every figure compared, too: the rows were right when they were written."""
    contents = read_chain(db, path, keys)
    state: State | None = None
    price: Price | None = None
    table: UsageTable = {}
    for row in _rows(db):
        try:
            event, after = row.contents
            if isinstance(event, Stepped) and price is not None:
                price.check(event.entries)
            if apply(state, row.seq, event) != after:
                raise BadRow("has running totals that do not follow from the row before")
            if (settings := new_settings(event)) is not None:
                price = Price.of(MechanismConfig(**settings))
        except BadRow as problem:
            raise _tampered(path, row.seq, str(problem)) from None
        except (PaclmError, TypeError) as problem:
            raise _tampered(path, row.seq, f"breaks a rule ({problem})") from None
        add_usages(table, row.at, usages(state, after, event))
        state = after
    if table != read_usage(db):
        raise LedgerTampered(f"The figures by hour and key in {path} do not add up to its rows.")
    return contents


def check_pages(db: sqlite3.Connection, path: Path) -> None:
    """SQLite's own check that the file is whole."""
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise LedgerDamaged(f"{path} is not a whole database: {verdict}. Restore a backup and adopt it.")


def check_remembered(db: sqlite3.Connection, path: Path, newest: int, known: Memory | None) -> None:
    """Refuse a file that lacks the row which was the newest when the ledger was last in use in its folder.

    A note that a crash cut off was begun after its row was on the disk: a file that has no row beyond the other note
    lacks that one.
    """
    if known is None:
        return
    found = db.execute("SELECT digest FROM events WHERE seq = ?", (known.head.seq,)).fetchone()
    if found is None or found[0] != known.head.digest:
        said = f"without the row {known.head.seq} that it had when it was last in use here"
    elif known.is_cut_off and newest <= known.head.seq:
        said = "a later row was being noted in ledger.lock when it was last in use here"
    else:
        return
    torn = (
        " One of the two notes in ledger.lock is not whole. If nothing was put back or removed, its last write was cut "
        "off while paclm ledger adopt ran, or the disk damaged it: adopt then, too."
    )
    raise LedgerRolledBack(
        f"{path} ends at row {newest}, and {said}: "
        f"{path.name}-wal was removed, or the file was put back to an earlier day, and what was charged since is "
        "missing. Put the newest files back, or adopt this one with paclm ledger adopt, which charges what can "
        f"have been spent since.{torn if known.is_cut_off else ''}"
    )


def read_usage(db: sqlite3.Connection) -> UsageTable:
    """The stored figures by hour and key."""
    rows = db.execute(f"SELECT hour, key, {', '.join(COUNTS)} FROM usage ORDER BY hour, key")
    try:
        return {(hour, key): tuple(int(count) for count in counts) for hour, key, *counts in rows}
    except (TypeError, ValueError):
        raise LedgerTampered("The figures by hour and key hold something that is not a number.") from None


def add_usages(table: UsageTable, at: str, entries: tuple[Usage, ...]) -> None:
    """Add what an event at that time had to the figures by hour and key."""
    for entry in entries:
        place = hour_of(at), entry.key
        old = table.get(place, (0,) * len(COUNTS))
        table[place] = tuple(count + getattr(entry, name) for count, name in zip(old, COUNTS, strict=True))


def hour_of(at: str) -> str:
    """The hour of a timestamp, in UTC: 2026-11-20T14."""
    return at[:13]


def new_settings(event: Event) -> Settings | None:
    """The settings that an event puts in force, if any."""
    match event:
        case Opened() | Extended() | Restored():
            return event.settings
        case SettingsChanged():
            return event.new
        case _:
            return None


def _check_link(previous: Row, row: Row, keys: Keys | None) -> None:
    expected = previous.seq + 1
    event = row.contents[0] if row.kind in (Restored.kind, KeyRotated.kind) else None
    if isinstance(event, Restored):
        if event.last_seq != previous.seq or event.lost_until < event.last_seq:
            raise BadRow("restores after another row than the one before it")
        expected = event.lost_until + 1
    if row.seq != expected:
        raise BadRow(f"comes where row {expected} should be: rows are missing")
    if row.previous != previous.digest:
        raise BadRow(f"does not follow row {previous.seq}: a row was replaced, swapped or removed")
    if isinstance(event, KeyRotated):
        if (event.old_key, event.new_key) != (previous.key, row.key):
            raise BadRow("changes from or to another key than it says")
        if keys is not None and endorse(keys, event.old_key, event.new_key, row.previous) != event.endorsement:
            raise BadRow("brings a new key that the old one does not vouch for")
    elif previous.seq and row.key != previous.key:
        raise BadRow("is signed with another key, and no row changed it")


def _checked(row: Row, path: Path, keys: Keys | None) -> tuple[Event, State]:
    try:
        check_row(row, keys)
        return row.contents
    except BadRow as problem:
        raise _tampered(path, row.seq, str(problem)) from None


def read_row(db: sqlite3.Connection, path: Path, seq: int) -> Row:
    """One row, as stored."""
    can_be = 0 < seq < 2**63  # SQLite's own integers: a forged row may name any number
    found = db.execute(f"SELECT {_COLUMNS} FROM events WHERE seq = ?", (seq,)).fetchone() if can_be else None
    if found is None:
        raise _tampered(path, seq, "is missing")
    return Row(*found)


def _rows(db: sqlite3.Connection) -> Iterator[Row]:
    return (Row(*found) for found in db.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq"))


def _read_belief(db: sqlite3.Connection, path: Path, state: State, event: Event) -> bytes:
    found = db.execute("SELECT seq, sealed FROM belief").fetchone()
    expected = getattr(event, "belief", None)
    is_whole = found is not None and found[0] == state.belief_seq and isinstance(found[1], bytes)
    if not is_whole or hashlib.sha256(found[1]).hexdigest() != expected:
        raise LedgerTampered(
            f"The belief stored in {path} is not the one that row {state.belief_row} left. Noise calibrated to another "
            "belief hides too little, so nothing is released. Restore a backup and adopt it.",
            state.belief_row,
        )
    sealed: bytes = found[1]
    return sealed


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    expected, found = expected_schema(), schema_of(db)
    if found != expected:
        names = sorted({name for _, name, _ in set(expected) ^ set(found)})
        raise LedgerTampered(f"The tables and triggers of {path} are not a ledger's: {', '.join(names)} differ.")


def _tampered(path: Path, seq: int, problem: str) -> LedgerTampered:
    return LedgerTampered(
        f"Row {seq} of {path} {problem}. Nothing is released from a ledger that cannot be trusted: "
        "restore a backup and adopt it.",
        seq,
    )
