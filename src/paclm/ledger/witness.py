"""The witness of a ledger, elsewhere: it records the head, and a rolled-back ledger is refused on open.

It is a file (`file_witness`), best on another disk, or a database (`postgres_witness`), best on another server. The
ledger's row is written first, so that after a crash the ledger is at most one row ahead.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from paclm.config import is_postgres
from paclm.errors import InvalidInput, LedgerRolledBack, LedgerTampered, MissingExtra, WitnessMissing
from paclm.ledger.address import name_of
from paclm.ledger.events import Head, KeyRotated, LedgerKeys, WitnessChanged, reseals
from paclm.ledger.file_witness import FileWitness
from paclm.ledger.reading import read_row
from paclm.ledger.state import parse_row
from paclm.ledger.store import Address
from paclm.ledger.testimony import IF_LOST, NAME_IT, Testimony, Witness

if TYPE_CHECKING:
    from paclm.ledger.ledger import Ledger
    from paclm.ledger.postgres_witness import PostgresWitness


def open_witness(ledger: Ledger, place: Address, keys: LedgerKeys) -> Witness:
    """Open the witness at a path or URL."""
    if is_postgres(place):
        return _postgres(ledger, place)(place, keys)
    return FileWitness(Path(place).absolute(), keys)


def has_witness(ledger: Ledger, place: Address) -> bool:
    """Whether there is a witness: a file, or a testimony of this ledger in a database."""
    if is_postgres(place):
        return _postgres(ledger, place).exists(place, ledger.ledger_id)
    return Path(place).exists()


def _postgres(ledger: Ledger, url: str) -> type[PostgresWitness]:
    try:
        from paclm.ledger.postgres_witness import PostgresWitness
    except ImportError:
        raise MissingExtra("psycopg") from None
    if name_of(url) == ledger.name:
        raise InvalidInput(
            f"The witness is in the ledger's own database ({ledger.name}): both would be rolled back together. Name a "
            "database on another server."
        )
    return PostgresWitness


def check_witness(ledger: Ledger, place: Address | None) -> None:
    """Check the ledger's head against the witness on open, and keep the witness for later commits.

    A witness that is named for the first time is made and recorded.
    """
    recorded = ledger.state.witness
    if place is None:
        if recorded is not None:
            raise WitnessMissing(
                f"{ledger.name} has a witness ({recorded}), and none was named. Without it a rolled-back file cannot "
                "be recognized. Name it: PACLM_WITNESS=PATH or --witness PATH. If it is lost for good, declare so with "
                "paclm ledger replace-witness."
            )
        ledger.check_note()
        return
    if recorded is None and not has_witness(ledger, place):
        ledger.check_note()
        attach_witness(ledger, place, "first use")
        return
    ledger.witness = open_witness(ledger, place, ledger.keys)
    try:
        _catch_up(ledger, ledger.witness)
    except LedgerRolledBack:  # or a holder that was taken over wrote its last testimony just now
        _catch_up(ledger, ledger.witness)


def _catch_up(ledger: Ledger, witness: Witness) -> None:
    """Check that ledger and witness belong together, and write what a crash left out."""
    recorded, testimony = ledger.state.witness, witness.read(ledger.ledger_id)
    check_name(testimony, witness.name, recorded)
    check_signer(ledger, testimony, ledger.keys.current)
    is_ahead = is_one_row_ahead(ledger, testimony)
    check_torn_slot(ledger, witness, testimony)
    ledger.check_note()
    if recorded is None:  # a crash came between making the witness and recording it
        ledger.append(WitnessChanged(None, testimony.witness, "first use"))
    elif is_ahead and reseals(parse_row(read_row(ledger.store, ledger.head.seq))[0]):
        witness.write_twice(ledger.testimony(recorded))
    elif is_ahead or testimony.is_repeated:  # a crash came before the write, or between the two of `write_twice`
        witness.write(ledger.testimony(recorded))


def attach_witness(ledger: Ledger, place: Address, confirmed_by: str) -> None:
    """Make a witness and record it in place of the one on record, if any."""
    name = secrets.token_hex(8)
    if is_postgres(place):
        ledger.witness = _postgres(ledger, place).create(place, ledger.keys, ledger.testimony(name))
    else:
        ledger.witness = FileWitness.create(Path(place).absolute(), ledger.keys, ledger.testimony(name))
    ledger.append(WitnessChanged(ledger.state.witness, name, confirmed_by))


def check_name(testimony: Testimony, name: str, recorded: str | None) -> None:
    """Refuse a witness that was replaced: its head is older than the ledger's."""
    if recorded is not None and testimony.witness != recorded:
        raise WitnessMissing(
            f"{name} is the witness {testimony.witness} of this ledger, and {recorded} is on record: it was replaced. "
            f"{NAME_IT}"
        )


def check_torn_slot(ledger: Ledger, witness: Witness, testimony: Testimony) -> None:
    """Refuse a torn slot whose row may be missing: a crash tears a slot only after the row is in the ledger."""
    if not witness.has_torn_slot or testimony.is_repeated or ledger.head.seq > testimony.head.seq:
        return
    raise LedgerRolledBack(
        f"One of the two slots of the witness {witness.name} is not whole, the other records row "
        f"{testimony.head.seq}, and {ledger.name} ends at row {ledger.head.seq}. A write cut off by a crash leaves the "
        "ledger one row ahead of the whole slot: either the ledger was rolled back, or the witness was damaged. "
        "Restore the newest state of both. If the ledger is the newest, declare so with paclm ledger replace-witness; "
        "if it came from a backup, adopt it without the witness."
    )


def check_signer(ledger: Ledger, testimony: Testimony, in_force: str) -> None:
    """Refuse a testimony by a rotated key, which others may know.

    One by the key before is accepted where a crash came between the row that rotated it and its witness.
    """
    if testimony.key == in_force:
        return
    newest = read_row(ledger.store, ledger.head.seq)
    event, before = parse_row(newest)[0], Head(newest.seq - 1, newest.previous)
    if not isinstance(event, KeyRotated) or (event.old_key, before) != (testimony.key, testimony.head):
        raise LedgerTampered(
            f"The witness of {ledger.name} is signed with the key {testimony.key}, which was rotated; {in_force} is in "
            f"force. It can have been forged with the old key. Name the newest witness; {IF_LOST}"
        )


def is_one_row_ahead(ledger: Ledger, testimony: Testimony) -> bool:
    """Whether the ledger has one row more than its witness, as after a crash. Refused unless 0 or 1 of one history."""
    if ledger.head.seq < testimony.head.seq:
        raise LedgerRolledBack(
            f"{ledger.name} ends at row {ledger.head.seq}, and its witness has seen row {testimony.head.seq}: the "
            "ledger was rolled back, and later charges are missing. Restore its newest state, or adopt this one with "
            "paclm ledger adopt, which takes account and belief from the witness."
        )
    found = ledger.store.row(testimony.head.seq)
    if found is None or found.digest != testimony.head.digest:
        raise LedgerRolledBack(
            f"Row {testimony.head.seq} of {ledger.name} is not the one its witness has seen: another copy of this "
            "ledger was in use, or a crash cut paclm ledger adopt off. In that case adopt it again; otherwise "
            "restore the ledger that the witness records: two histories of one secret cannot be merged."
        )
    ahead = ledger.store.count_rows(after=testimony.head.seq)
    if ahead > 1:
        raise LedgerRolledBack(
            f"The witness of {ledger.name} is {ahead} rows behind it, and a crash leaves it one behind: the witness "
            "itself was rolled back. If the ledger is the newest, declare so with paclm ledger replace-witness."
        )
    return ahead == 1
