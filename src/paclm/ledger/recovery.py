"""Backup, restore and a lost witness: explicit, recorded, and always on the safe side.

A restored file lacks the charges made after it was copied, and the belief after them. A witness restores both exactly.
Without one it is unknown what was released since: the whole budget counts as spent, for good.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from paclm.errors import LedgerError, LedgerRolledBack
from paclm.ledger import sqlite_file
from paclm.ledger.address import Holding, open_reader
from paclm.ledger.events import KeyRotated, LedgerKeys, Restored, WitnessChanged
from paclm.ledger.ledger import Ledger, hash_sealed
from paclm.ledger.reading import read_row, refuse_if_moved
from paclm.ledger.sqlite_store import fill
from paclm.ledger.state import parse_row
from paclm.ledger.store import Address
from paclm.ledger.testimony import Testimony, Witness
from paclm.ledger.witness import (
    attach_witness,
    check_name,
    check_signer,
    check_torn_slot,
    is_one_row_ahead,
    open_witness,
)
from paclm.privacy.accounting import units_down


def backup(address: Address, to: str | Path) -> None:
    """Copy a ledger, also one in use, as of one moment into a file.

    The copy is marked, and does not open before it is adopted.
    """
    target_path = Path(to).absolute()
    part = target_path.with_name(target_path.name + ".part")
    if target_path.exists():
        raise LedgerError(f"{target_path} already exists. A backup never overwrites a file: choose a new name.")
    part.unlink(missing_ok=True)
    with closing(open_reader(address)) as source:
        source.freeze_view()
        refuse_if_moved(source)
        sqlite_file.create_file(part)
        fill(part, source.copy(), "copy")
    os.replace(part, target_path)
    sqlite_file.sync_folder(target_path.parent)


def adopt_restored(
    address: Address,
    mac_key: bytes,
    *,
    confirmed_by: str,
    old_keys: Sequence[bytes] = (),
    witness: Address | None = None,
    largest_total: float | None = None,
    holding: Holding | None = None,
) -> Restored:
    """Declare that this file was restored from a backup, and charge all that can have been spent since.

    With the witness: account and belief exactly as the witness records them. Without: the whole budget counts as spent
    and nothing can be charged any more, because noise calibrated to an old belief hides too little; pass
    `largest_total` if the total was ever extended beyond what this file shows. A copy from before a rotation continues
    under `mac_key`, if the key that signed it is among `old_keys`.
    """
    keys = LedgerKeys(mac_key, old_keys)
    with Ledger(address, keys, in_full=True, accept_copy=True, holding=holding) as ledger:
        if witness is None:
            named = 0 if largest_total is None else units_down(largest_total)
            total = max(named, ledger.state.committed_units)  # a lowered total may have been raised again up to that
            _rotate_to(ledger, keys)
            event = Restored("none", ledger.head.seq, ledger.head.seq, total, None, None, None, confirmed_by)
            ledger.append(event)
        else:
            event = _adopt_with_witness(ledger, open_witness(ledger, witness, keys), confirmed_by)
        ledger.store.mark("live")
        ledger.settle()
        return event


def _adopt_with_witness(ledger: Ledger, witness: Witness, confirmed_by: str) -> Restored:
    keys, is_current = witness.keys, False
    try:
        testimony = witness.read(ledger.ledger_id)
        check_name(testimony, witness.name, ledger.state.witness)
        check_signer(ledger, testimony, keys.current)
        _check_noted(ledger, testimony)
        done = _restored_before(ledger, testimony, keys)
        if done is None:
            check_torn_slot(ledger, witness, testimony)
            is_current = _is_current(ledger, testimony)
            _rotate_to(ledger, keys)  # not yet in the witness: it alone records what the copy lacks
    except BaseException:
        witness.close()
        raise
    ledger.witness = witness
    if done is not None:
        witness.write(ledger.testimony(testimony.witness))
        return done
    last, total = ledger.head.seq, ledger.state.total_units
    if is_current:
        event = Restored("current", last, last, total, None, None, None, confirmed_by)
        ledger.append(event)
        return event
    belief, lost_until = hash_sealed(testimony.sealed_belief), max(last, testimony.head.seq)
    event = Restored("witness", last, lost_until, total, testimony.state, testimony.settings, belief, confirmed_by)
    ledger.append(event, testimony.sealed_belief, seq=lost_until + 1)
    return event


def _is_current(ledger: Ledger, testimony: Testimony) -> bool:
    """Whether the copy has every row that the witness records; another history is refused."""
    if ledger.head.seq < testimony.head.seq or _was_only_rotated(ledger, testimony):
        return False
    is_one_row_ahead(ledger, testimony)
    return True


def _check_noted(ledger: Ledger, testimony: Testimony) -> None:
    """Refuse a witness that is older than the note in the lock file."""
    note = ledger.store.note
    if note is not None and note.head.seq > testimony.head.seq:
        raise LedgerRolledBack(
            f"The witness has seen row {testimony.head.seq} of {ledger.name}, and row {note.head.seq} was the newest "
            "when the ledger was last in use here: the witness was rolled back. Name the newest one, or adopt without "
            "a witness."
        )


def _restored_before(ledger: Ledger, testimony: Testimony, keys: LedgerKeys) -> Restored | None:
    """The row that an earlier adoption wrote from this testimony, where a crash came before its witness write."""
    event = parse_row(read_row(ledger.store, ledger.head.seq))[0]
    if not isinstance(event, Restored) or {ledger.keys.current, testimony.key} != {keys.current}:
        return None
    written = event.proof, event.lost_until, event.state, event.settings, event.belief
    expected = "witness", testimony.head.seq, testimony.state, testimony.settings, hash_sealed(testimony.sealed_belief)
    return event if written == expected else None


def _was_only_rotated(ledger: Ledger, testimony: Testimony) -> bool:
    """Whether a crash came after `_rotate_to`: without that row the copy is older than the testimony."""
    if ledger.head.seq != testimony.head.seq or ledger.head.digest == testimony.head.digest:
        return False
    kind = read_row(ledger.store, ledger.head.seq).kind
    return ledger.store.kind == "copy" and kind == KeyRotated.kind


def _rotate_to(ledger: Ledger, keys: LedgerKeys) -> None:
    """Rotate a copy from before a rotation to the key in force; until it is adopted it stays marked as a copy."""
    if ledger.keys.current != keys.current:
        ledger.store.mark("copy")
        ledger.rotate_to(keys)


def replace_witness(
    address: Address,
    mac_key: bytes,
    *,
    confirmed_by: str,
    old_keys: Sequence[bytes] = (),
    witness: Address | None,
    holding: Holding | None = None,
) -> None:
    """Declare that the witness on record is lost and that this file is the newest; name a new witness, or None.

    The declaration is recorded with its author, and nothing can check it: a file from a backup must be adopted instead.
    """
    with Ledger(address, LedgerKeys(mac_key, old_keys), in_full=True, holding=holding) as ledger:
        ledger.check_note()
        if witness is None:
            ledger.append(WitnessChanged(ledger.state.witness, None, confirmed_by))
        else:
            attach_witness(ledger, witness, confirmed_by)
