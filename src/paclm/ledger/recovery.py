"""Backup, restore and a lost witness: rare, explicit, recorded, and always on the safe side.

A restored file lacks the charges made after it was copied, and the belief that they left. With a witness both come
back exactly. Without one nobody knows how much has left: everything counts as spent, for good.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from paclm.errors import LedgerError, LedgerRolledBack
from paclm.ledger import database
from paclm.ledger.attendance import attach, check_key, check_name, check_whole, rows_ahead
from paclm.ledger.chain import Keys
from paclm.ledger.events import KeyRotated, Restored, WitnessChanged
from paclm.ledger.reading import read_row
from paclm.ledger.witness import Testimony, Witness
from paclm.ledger.writer import Clock, Writer, hash_belief, utc_now
from paclm.privacy.accounting import units_down


def backup(path: str | Path, to: str | Path) -> None:
    """Copy a ledger, also one in use, as of one moment. The copy is marked: it never opens before it is adopted."""
    source_path, target_path = Path(path).absolute(), Path(to).absolute()
    part = target_path.with_name(target_path.name + ".part")
    if target_path.exists():
        raise LedgerError(f"{target_path} is there already. A backup never overwrites another: choose a new name.")
    part.unlink(missing_ok=True)
    source = database.open_reader(source_path)
    try:
        database.create_file(part)
        with database.translated(part):
            target = sqlite3.connect(part, isolation_level=None)
            try:
                source.backup(target)
                target.execute("PRAGMA journal_mode=DELETE").fetchall()  # one file, that can be carried anywhere
                target.execute("PRAGMA synchronous=FULL")
                target.execute(f"PRAGMA application_id={database.COPY}")
            finally:
                target.close()
    finally:
        source.close()
    os.replace(part, target_path)
    database.sync_folder(target_path.parent)


def adopt_restored(
    path: str | Path,
    mac_key: bytes,
    *,
    confirmed_by: str,
    old_keys: Sequence[bytes] = (),
    witness: str | Path | None = None,
    largest_total: float | None = None,
    clock: Clock = utc_now,
) -> Restored:
    """Declare that this file came back from a backup, and charge all that can have been spent since.

    With the witness: account and belief as the witness has them, nothing guessed. Without: the whole budget is spent
    and nothing can be charged any more, because noise calibrated to an old belief protects less than it says; pass
    `largest_total` if the total was ever extended beyond what this file knows. A copy from before a rotation goes on
    under `mac_key`, as long as the key that signed it is among `old_keys`.
    """
    keys = Keys(mac_key, old_keys)
    writer = Writer(Path(path), keys, in_full=True, accept_copy=True, clock=clock)
    try:
        if witness is None:
            total = writer.state.total_units if largest_total is None else units_down(largest_total)
            _rotate_to(writer, keys)
            event = _restored(writer, "none", confirmed_by, total_units=total)
            writer.append(event)
        else:
            event = _adopt_with_witness(writer, Witness(Path(witness).absolute(), keys), confirmed_by)
        _mark(writer, database.LIVE)
        writer.settle()
        return event
    finally:
        writer.close()


def _adopt_with_witness(writer: Writer, witness: Witness, confirmed_by: str) -> Restored:
    keys, is_current = witness.keys, False
    try:
        testimony = witness.read(writer.opened.ledger)
        check_name(testimony, witness.path, writer.state.witness)
        check_key(writer, testimony, keys.current)
        _check_remembered(writer, testimony)
        done = _was_cut_short(writer, testimony, keys)
        if done is None:
            check_whole(writer, witness, testimony)
            is_current = _is_current(writer, testimony)
            _rotate_to(writer, keys)  # the witness must not hear of it yet: it alone knows what the copy lacks
    except BaseException:
        witness.close()
        raise
    writer.witness = witness
    if done is not None:
        witness.write(writer.testimony(testimony.witness))
        return done
    if is_current:
        event = _restored(writer, "current", confirmed_by)
        writer.append(event)
    else:
        event = _restored(writer, "witness", confirmed_by, testimony=testimony)
        writer.append(event, testimony.sealed_belief, seq=event.lost_until + 1)
    return event


def _is_current(writer: Writer, testimony: Testimony) -> bool:
    """Whether the copy has every row that the witness knows; refuses a witness that cannot say."""
    if writer.head.seq < testimony.head.seq:
        return False
    if _was_only_rotated(writer, testimony):
        return False
    rows_ahead(writer, testimony)  # the same history, or refused
    return True


def _check_remembered(writer: Writer, testimony: Testimony) -> None:
    """Refuse a witness that is older than what the lock remembers."""
    if writer.remembered is not None and (noted := writer.remembered.head.seq) > testimony.head.seq:
        raise LedgerRolledBack(
            f"The witness has seen row {testimony.head.seq} of {writer.path}, and row {noted} was the newest when "
            "the ledger was last in use here: the witness was put back to an earlier day. Name the newest one, or "
            "adopt without a witness."
        )


def _was_cut_short(writer: Writer, testimony: Testimony, keys: Keys) -> Restored | None:
    """The row that an adopting wrote from this very testimony, where a crash came before the witness knew it."""
    with database.translated(writer.path):
        event = read_row(writer.db, writer.path, writer.head.seq).contents[0]
    if not isinstance(event, Restored) or {writer.keys.current, testimony.key} != {keys.current}:
        return None
    taken = event.proof, event.lost_until, event.state, event.settings, event.belief
    told = "witness", testimony.head.seq, testimony.state, testimony.settings, hash_belief(testimony.sealed_belief)
    return event if taken == told else None


def _was_only_rotated(writer: Writer, testimony: Testimony) -> bool:
    """Whether an adopting was cut short after `_rotate_to`: without that row the copy is older than the testimony."""
    if writer.head.seq != testimony.head.seq or writer.head.digest == testimony.head.digest:
        return False
    with database.translated(writer.path):
        row = read_row(writer.db, writer.path, writer.head.seq)
        return database.is_copy(writer.db) and row.kind == KeyRotated.kind


def _rotate_to(writer: Writer, keys: Keys) -> None:
    """Bring a copy from before a rotation under the key in force; until it is adopted it stays marked as a copy."""
    if writer.keys.current != keys.current:
        _mark(writer, database.COPY)
        writer.rotate(keys)


def _mark(writer: Writer, kind: int) -> None:
    with database.translated(writer.path):
        writer.db.execute(f"PRAGMA application_id={kind}")


def _restored(
    writer: Writer,
    proof: str,
    confirmed_by: str,
    *,
    total_units: int | None = None,
    testimony: Testimony | None = None,
) -> Restored:
    return Restored(
        proof=proof,
        last_seq=writer.head.seq,
        lost_until=writer.head.seq if testimony is None else max(writer.head.seq, testimony.head.seq),
        total_units=writer.state.total_units if total_units is None else total_units,
        state=None if testimony is None else testimony.state,
        settings=None if testimony is None else testimony.settings,
        belief=None if testimony is None else hash_belief(testimony.sealed_belief),
        confirmed_by=confirmed_by,
    )


def replace_witness(
    path: str | Path,
    mac_key: bytes,
    *,
    confirmed_by: str,
    old_keys: Sequence[bytes] = (),
    witness: str | Path | None,
    clock: Clock = utc_now,
) -> None:
    """Declare that the witness on record is lost and that this file is the newest; name a new witness, or None.

    The declaration is recorded with its author. It is the operator's word alone: a file that did come from a backup
    must be adopted instead.
    """
    writer = Writer(Path(path), Keys(mac_key, old_keys), in_full=True, clock=clock)
    try:
        place = None if witness is None else Path(witness).absolute()
        if place is not None and place.exists():
            raise LedgerRolledBack(
                f"{place} is there already. A new witness starts from nothing; one that exists is asked, not replaced."
            )
        writer.compare_with_memory()
        if place is None:
            writer.append(WitnessChanged(writer.state.witness, None, confirmed_by))
        else:
            attach(writer, place, confirmed_by)
    finally:
        writer.close()
