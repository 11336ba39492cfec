"""Read a ledger and check it: the rows that account and belief rest on, or all of them. Never writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from paclm.config import MechanismConfig
from paclm.errors import InvalidInput, LedgerMoved, LedgerRolledBack, LedgerTampered, PaclmError
from paclm.ledger.events import (
    GENESIS,
    BadRow,
    Checkpoint,
    Event,
    Head,
    KeyRotated,
    LedgerKeys,
    Moved,
    Opened,
    Restored,
    Row,
    Stepped,
    Usage,
    check_row,
    endorse,
)
from paclm.ledger.head_notes import HeadNote
from paclm.ledger.state import Price, State, UsageTable, add_usages, apply, new_settings, parse_row, usages
from paclm.ledger.store import Kind, Store

_BEFORE_THE_FIRST = Row(0, "", "", "", "", GENESIS, GENESIS, b"")


@dataclass(frozen=True, slots=True)
class Contents:
    """A ledger as of its newest row."""

    opened: Opened
    head: Head
    key: str
    """The name of the key that signed the head."""
    state: State
    settings: MechanismConfig
    sealed_belief: bytes
    sealed_secret: bytes | None
    """None: none was drawn yet, or it is still in a file of an earlier version."""


def refuse_if_moved(store: Store) -> None:
    """Refuse a ledger that a move closed, and one that a move has not finished."""
    kind = kind_of(store)
    if kind == "incoming":
        raise LedgerMoved(f"{store.name} is the target of paclm ledger move, which did not finish. Repeat the command.")
    if kind == "moved":
        event = moved_by(store)
        target = "another place" if event is None else event.target
        raise LedgerMoved(
            f"The ledger in {store.name} was moved to {target}, and this one is closed for good. Name the new place in "
            "url of [ledger] in paclm.toml or in PACLM_LEDGER; for the SQLite file of the workspace, name none. If the "
            "move did not finish, repeat paclm ledger move."
        )


def kind_of(store: Store) -> Kind:
    """What a store is. Its newest row decides where that is `moved`: the mark is not signed."""
    is_closed = store.kind == "live" and moved_by(store) is not None
    return "moved" if is_closed else store.kind


def moved_by(store: Store) -> Moved | None:
    """The row that closed a ledger, where it is the newest."""
    newest = store.newest_row()
    try:
        event = parse_row(newest)[0] if newest is not None and newest.kind == Moved.kind else None
    except BadRow:  # found by whoever checks it
        return None
    return event if isinstance(event, Moved) else None


def read_contents(store: Store, keys: LedgerKeys | None) -> Contents:
    """The ledger by its newest row; checks that row, the first, and those of settings, belief and secret. O(1)."""
    store.check_schema()
    head = store.newest_row()
    if head is None:
        raise LedgerTampered(f"{store.name} has no rows, not even the first.")
    _, state = _check(store, head, keys)
    opened, _ = _check(store, read_row(store, 1), keys)
    if not isinstance(opened, Opened):
        raise _tampered(store, 1, "does not open a ledger")
    setting, _ = _check(store, read_row(store, state.settings_seq), keys)
    sealing, _ = _check(store, read_row(store, state.belief_row), keys)
    sealed = _read_belief(store, state, sealing)
    try:
        settings = MechanismConfig(**(new_settings(setting) or {}))
    except (TypeError, InvalidInput):
        raise _tampered(store, state.settings_seq, "should hold the settings in force, and does not") from None
    secret = _read_secret(store, state, keys)
    return Contents(opened, Head(head.seq, head.digest), head.key, state, settings, sealed, secret)


def check_recent(store: Store, keys: LedgerKeys | None, contents: Contents) -> int:
    """Check hash, link and MAC of every row since the checkpoint; returns how many those are.

    Without the key nothing shows that a checkpoint is the key holder's: it is believed.
    """
    checkpoint = store.checkpoint()
    if checkpoint is None or (keys is not None and not checkpoint.is_signed(contents.opened.ledger, keys)):
        return _check_chain(store, keys, _BEFORE_THE_FIRST)
    return _check_chain(store, keys, _checked_row(store, checkpoint, contents.head, keys))


def read_chain(store: Store, keys: LedgerKeys | None) -> Contents:
    """The same, after checking every row there is: none was changed since it was written."""
    contents = read_contents(store, keys)
    _check_chain(store, keys, _BEFORE_THE_FIRST)
    checkpoint = store.checkpoint()
    if checkpoint is not None:
        if (
            keys is not None
            and checkpoint.key == keys.current
            and not checkpoint.is_signed(contents.opened.ledger, keys)
        ):
            raise LedgerTampered(f"The checkpoint of {store.name} carries a MAC that the ledger's key did not make.")
        _checked_row(store, checkpoint, contents.head, keys)
    return contents


def _checked_row(store: Store, checkpoint: Checkpoint, head: Head, keys: LedgerKeys | None) -> Row:
    """The row of a checkpoint; refused where it is another one, or missing."""
    row = store.row(checkpoint.seq) if checkpoint.is_whole else None
    if row is None or row.digest != checkpoint.digest:
        raise LedgerRolledBack(
            f"{store.name} ends at row {head.seq}, and its checkpoint is of row {checkpoint.seq}, which is missing or "
            "another one: rows were removed or replaced. Restore the newest state, or adopt this one with paclm ledger "
            "adopt, which charges all that can have been spent since."
        )
    _check(store, row, keys)
    return row


def _check_chain(store: Store, keys: LedgerKeys | None, previous: Row) -> int:
    """Check every row after one; returns how many there are."""
    count = 0
    for row in store.rows(after=previous.seq):
        try:
            check_row(row, keys)
            _check_link(previous, row, keys)
        except BadRow as problem:
            raise _tampered(store, row.seq, str(problem), previous.seq) from None
        previous, count = row, count + 1
    return count


def read_all(store: Store, keys: LedgerKeys | None) -> Contents:
    """The same, after recomputing every price, total and sum too: the rows were right when they were written."""
    contents = read_chain(store, keys)
    state: State | None = None
    price: Price | None = None
    table: UsageTable = {}
    verified = 0
    for row in store.rows():
        try:
            event, after = parse_row(row)
            if isinstance(event, Stepped) and price is not None:
                price.check(event.entries)
            if apply(state, row.seq, event) != after:
                raise BadRow("has running totals that do not follow from the row before")
            if (settings := new_settings(event)) is not None:
                price = Price.of(MechanismConfig(**settings))
        except BadRow as problem:
            raise _tampered(store, row.seq, str(problem), verified) from None
        except (PaclmError, TypeError) as problem:
            raise _tampered(store, row.seq, f"breaks a rule ({problem})", verified) from None
        add_usages(table, row.at, usages(state, after, event))
        state, verified = after, row.seq
    if table != store.usage():
        raise LedgerTampered(f"The sums by hour and key in {store.name} do not match its rows.")
    return contents


def check_sums(store: Store, state: State, sums: Mapping[str, Usage]) -> None:
    """Refuse sums by hour, or by key, that do not add up to the newest row's totals."""
    units, tokens = (sum(getattr(used, name) for used in sums.values()) for name in ("units", "tokens"))
    if (units, tokens) != (state.spent_units, state.tokens):
        raise LedgerTampered(f"The sums by hour and key in {store.name} do not add up to the totals of its newest row.")


def read_row(store: Store, seq: int) -> Row:
    """One row as stored; refused where it is missing."""
    found = store.row(seq)
    if found is None:
        raise _tampered(store, seq, "is missing")
    return found


def check_note(store: Store, newest: int, note: HeadNote | None) -> None:
    """Refuse a file that lacks the row noted in the lock file as the newest.

    A torn note was begun after its row was on the disk: a file without a row after the other note lacks that row.
    """
    if note is None:
        return
    found = store.row(note.head.seq)
    if found is None or found.digest != note.head.digest:
        problem = f"it lacks row {note.head.seq}, which it had when it was last in use here"
    elif note.is_torn and newest <= note.head.seq:
        problem = "a later row was being noted in ledger.lock when it was last in use here"
    else:
        return
    torn = (
        " One of the two notes in ledger.lock is not whole. If no file was rolled back or removed, a crash cut it off "
        "while paclm ledger adopt ran, or the disk damaged it: adopt in this case, too."
    )
    raise LedgerRolledBack(
        f"{store.name} ends at row {newest}: {problem}. Later charges are missing: {store.why_rows_vanish}. Restore "
        "the newest state, or adopt this one with paclm ledger adopt, which charges all that can have been spent "
        f"since.{torn if note.is_torn else ''}"
    )


def _check_link(previous: Row, row: Row, keys: LedgerKeys | None) -> None:
    expected = previous.seq + 1
    event = parse_row(row)[0] if row.kind in (Restored.kind, KeyRotated.kind) else None
    if isinstance(event, Restored):
        if event.last_seq != previous.seq or event.lost_until < event.last_seq:
            raise BadRow("restores after another row than the one before it")
        expected = event.lost_until + 1
    if row.seq != expected:
        raise BadRow(f"is where row {expected} should be: rows are missing")
    if row.previous != previous.digest:
        raise BadRow(f"does not follow row {previous.seq}: a row was replaced, swapped or removed")
    if isinstance(event, KeyRotated):
        if (event.old_key, event.new_key) != (previous.key, row.key):
            raise BadRow("rotates from or to another key than it names")
        if keys is not None and endorse(keys, event.old_key, event.new_key, row.previous) != event.endorsement:
            raise BadRow("rotates to a key that the old key did not endorse")
    elif previous.seq and row.key != previous.key:
        raise BadRow("is signed with another key, without a rotation")


def _check(store: Store, row: Row, keys: LedgerKeys | None) -> tuple[Event, State]:
    try:
        check_row(row, keys)
        return parse_row(row)
    except BadRow as problem:
        raise _tampered(store, row.seq, str(problem)) from None


def _read_belief(store: Store, state: State, event: Event) -> bytes:
    seq, sealed = store.belief()
    expected = getattr(event, "belief", None)
    if seq != state.belief_seq or not isinstance(sealed, bytes) or hashlib.sha256(sealed).hexdigest() != expected:
        raise LedgerTampered(
            f"The belief stored in {store.name} is not that of row {state.belief_row}. Noise calibrated to another "
            "belief hides too little, so nothing is released. Restore a backup and adopt it.",
            state.belief_row,
        )
    return sealed


def _read_secret(store: Store, state: State, keys: LedgerKeys | None) -> bytes | None:
    if not state.secret_row:
        return None
    event, _ = _check(store, read_row(store, state.secret_row), keys)
    sealed, expected = store.secret(), getattr(event, "secret", None)
    if not isinstance(sealed, bytes) or hashlib.sha256(sealed).hexdigest() != expected:
        raise LedgerTampered(
            f"The sealed secret stored in {store.name} is not that of row {state.secret_row}. The belief belongs to "
            "another secret, so nothing is released. Restore a backup and adopt it.",
            state.secret_row,
        )
    return sealed


def _tampered(store: Store, seq: int, problem: str, verified: int | None = None) -> LedgerTampered:
    return LedgerTampered(
        f"Row {seq} of {store.name} {problem}. Nothing is released from a ledger that fails its checks: restore a "
        "backup and adopt it.",
        seq,
        verified,
    )
