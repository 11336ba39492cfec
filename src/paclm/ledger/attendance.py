"""Ledger and witness meet: at every opening both must tell the same story. Decides; reads and writes little."""

from __future__ import annotations

from pathlib import Path

from paclm.errors import LedgerRolledBack, LedgerTampered, WitnessMissing
from paclm.ledger import database
from paclm.ledger.chain import Head
from paclm.ledger.events import Event, KeyRotated, WitnessChanged, reseals
from paclm.ledger.reading import read_row
from paclm.ledger.witness import NAME_IT, Testimony, Witness
from paclm.ledger.writer import Writer


def meet_witness(writer: Writer, path: Path | None) -> None:
    """Compare the heads and keep the witness for later commits; makes and records one that is named the first time."""
    recorded = writer.state.witness
    if path is None:
        if recorded is not None:
            raise WitnessMissing(
                f"{writer.path} has a witness ({recorded}), and none was named. Without it nobody knows whether "
                "this file is the newest. Name it: PACLM_WITNESS=PATH or --witness PATH. If it is lost for good, "
                "declare so with paclm ledger replace-witness."
            )
        writer.compare_with_memory()
        return
    if recorded is None and not path.exists():
        writer.compare_with_memory()
        attach(writer, path, "first use")
        return
    witness = Witness(path, writer.keys)
    try:
        testimony = witness.read(writer.opened.ledger)
        check_name(testimony, path, recorded)
        check_key(writer, testimony, writer.keys.current)
        ahead = rows_ahead(writer, testimony)
        check_whole(writer, witness, testimony)
        writer.compare_with_memory()
    except BaseException:
        witness.close()
        raise
    writer.witness = witness
    if recorded is None:  # a crash came between making the witness and recording it
        writer.append(WitnessChanged(None, testimony.witness, "first use"))
        return
    told = writer.testimony(recorded)
    if ahead and reseals(_newest_event(writer)):
        witness.write_twice(told)
    elif ahead or testimony.is_repeated:  # a crash came before the witness, or between its slots; nothing had left
        witness.write(told)
    if not witness.is_signed_with(writer.keys.current):  # an exchange of keys by an earlier version was cut short
        witness.write(told)


def attach(writer: Writer, path: Path, confirmed_by: str) -> None:
    """Make a witness and record it; a witness on record before is no longer asked for."""
    name = Witness.new_name()
    witness = Witness.create(path, writer.keys, writer.testimony(name))
    writer.witness = witness
    writer.append(WitnessChanged(writer.state.witness, name, confirmed_by))


def check_name(testimony: Testimony, path: Path, recorded: str | None) -> None:
    """A ledger has one witness at a time: those that were replaced know of an older day."""
    if recorded is not None and testimony.witness != recorded:
        raise WitnessMissing(
            f"{path} is the witness {testimony.witness} of this ledger, and {recorded} is on record: it was replaced. "
            f"{NAME_IT}"
        )


def check_whole(writer: Writer, witness: Witness, testimony: Testimony) -> None:
    """A slot that a crash tore was about a row that is in the ledger. Where it is not, nobody knows what has left.

    Nothing left with that row if a crash tore the slot, and something did if the slot was spoiled later on.
    """
    if not witness.has_torn_slot or testimony.is_repeated or writer.head.seq > testimony.head.seq:
        return
    raise LedgerRolledBack(
        f"One of the two slots of the witness {witness.path} is not whole, the other has seen row "
        f"{testimony.head.seq}, and {writer.path} ends at row {writer.head.seq}. A write that a crash cut off leaves "
        "the ledger a row ahead of the whole slot: either the ledger was put back, or the witness was damaged since. "
        "Put the newest files back. If the ledger's file is the newest, declare so with paclm ledger replace-witness; "
        "if it came from a backup, adopt it without the witness."
    )


def _newest_event(writer: Writer) -> Event:
    with database.translated(writer.path):
        return read_row(writer.db, writer.path, writer.head.seq).contents[0]


def check_key(writer: Writer, testimony: Testimony, in_force: str) -> None:
    """A testimony counts by the key in force alone: a key is rotated when others may know it.

    One by the key before is believed where a crash came between the row that rotated it and its witness.
    """
    if testimony.key == in_force:
        return
    with database.translated(writer.path):
        newest = read_row(writer.db, writer.path, writer.head.seq)
    event, before = newest.contents[0], Head(newest.seq - 1, newest.previous)
    if not isinstance(event, KeyRotated) or (event.old_key, before) != (testimony.key, testimony.head):
        raise LedgerTampered(
            f"The witness of {writer.path} is signed with the key {testimony.key}, which was replaced; {in_force} is "
            "in force. Someone who knows the old key can have made it. Name the newest witness; if it is lost for "
            "good, declare so with paclm ledger replace-witness."
        )


def rows_ahead(writer: Writer, testimony: Testimony) -> int:
    """How many rows the ledger has that the witness does not know: 0 or 1; anything else is refused."""
    with database.translated(writer.path):
        found = writer.db.execute("SELECT digest FROM events WHERE seq = ?", (testimony.head.seq,)).fetchone()
        (ahead,) = writer.db.execute("SELECT count(*) FROM events WHERE seq > ?", (testimony.head.seq,)).fetchone()
    if writer.head.seq < testimony.head.seq:
        raise LedgerRolledBack(
            f"{writer.path} ends at row {writer.head.seq}, and its witness has seen row {testimony.head.seq}: the file "
            "was put back to an earlier day, and what was charged since is missing. Put the newest file back, or "
            "adopt this one with paclm ledger adopt, which takes account and belief from the witness."
        )
    if found is None or found[0] != testimony.head.digest:
        raise LedgerRolledBack(
            f"Row {testimony.head.seq} of {writer.path} is not the one its witness has seen: another copy of this "
            "ledger was in use, or paclm ledger adopt was cut short. If it was, adopt this file once more; if not, put "
            "the file back that the witness knows: two histories of one secret cannot be merged."
        )
    if ahead > 1:
        raise LedgerRolledBack(
            f"The witness of {writer.path} is {ahead} rows behind it, where a crash leaves it one behind: the witness "
            "was itself put back to an earlier day. If the ledger's file is the newest, declare so with "
            "paclm ledger replace-witness."
        )
    return int(ahead)
