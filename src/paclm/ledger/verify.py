"""Verify a ledger without the secret, with or without its key, also while it is in use. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from paclm.errors import (
    LedgerBusy,
    LedgerError,
    LedgerFull,
    LedgerMissing,
    LedgerMoved,
    LedgerRolledBack,
    LedgerTampered,
    LedgerUnwritable,
    LedgerWrongKey,
)
from paclm.ledger.address import open_reader
from paclm.ledger.events import BadRow, KeyRotated, LedgerKeys, Row, Usage, check_row, endorse
from paclm.ledger.reading import (
    Contents,
    check_note,
    check_recent,
    check_sums,
    read_all,
    read_contents,
    refuse_if_moved,
)
from paclm.ledger.state import parse_row
from paclm.ledger.store import Address


@dataclass(slots=True)
class Report:
    """The figures of a ledger, and whether it passed every check."""

    macs_checked: bool
    """False: hashes and sums were checked, which anyone with write access could have recomputed."""
    intact: bool = True
    problem: str | None = None
    """The first check that failed, as a sentence."""
    bad_seq: int | None = None
    """The first bad row, where one row can be named."""
    is_copy: bool = False
    """Made by `backup`; must be adopted before anything is released from it."""
    verified_through: int = 0
    """The last row of the part that `intact` speaks of: checked now, or behind a checkpoint."""
    trusted_through: int = 0
    """Rows up to this one were not checked: a checkpoint vouches for them, whose own MAC needs the key."""
    num_events: int = 0
    """0 if only the newest rows were checked: counting takes as long as reading all."""
    signers: tuple[str, ...] = ()
    """Names of the keys that the rows name as theirs, oldest first."""
    contents: Contents | None = None
    """The ledger as of its newest row; None where that row cannot be read."""
    by_hour: dict[str, Usage] = field(default_factory=dict)
    """The sums of each hour (UTC)."""
    by_key: dict[str, Usage] = field(default_factory=dict)


def signing_key(address: Address) -> str | None:
    """The name of the key that the newest row names as its signer; None where it cannot be read."""
    with closing(open_reader(address)) as store:
        try:
            newest = store.newest_row()
        except LedgerError:
            return None
    return newest.key if newest is not None and isinstance(newest.key, str) else None


def sealed_secret(address: Address) -> bytes | None:
    """The sealed secret as stored, not checked; None where there is none."""
    with closing(open_reader(address)) as store:
        return store.secret()


def witness_on_record(address: Address) -> str | None:
    """The name of the witness that the ledger needs to open; None where it needs none."""
    with closing(open_reader(address)) as store:
        store.freeze_view()
        return read_contents(store, None).state.witness


def remaining_tokens(address: Address, folder: Path | None = None) -> int:
    """How many charged tokens the budget has left by the newest row; refused where rows vanished."""
    contents = newest_contents(address, folder)
    return contents.state.account.remaining_tokens(contents.settings.per_token)


def is_backup(address: Address) -> bool:
    """Whether it was made by `backup`."""
    with closing(open_reader(address)) as store:
        return store.kind == "copy"


def check_not_moved(address: Address) -> None:
    """Refuse a ledger that was moved: what is kept beside it moved too. Other troubles do not matter here."""
    try:
        with closing(open_reader(address)) as store:
            refuse_if_moved(store)
    except LedgerMoved:
        raise
    except LedgerError:
        return


def newest_contents(address: Address, folder: Path | None = None) -> Contents:
    """The ledger by its newest row, read without lock and key; refused where rows vanished.

    Of a ledger in a database, `folder` has the note by which that is noticed.
    """
    with closing(open_reader(address, folder)) as store:
        store.freeze_view()  # head and belief of one commit, also while the ledger is in use
        refuse_if_moved(store)
        contents = read_contents(store, None)
        if store.kind != "copy":  # a copy is marked as such, and older than the note
            check_note(store, contents.head.seq, store.note)
        return contents


def verify(
    address: Address,
    keys: Sequence[bytes] | None = None,
    *,
    only_recent: bool = False,
    hours: bool = True,
    folder: Path | None = None,
) -> Report:
    """Recompute every hash, link, total and sum; with keys (the newest first) also every MAC.

    Also checks that the row noted on this machine (for a database: in that folder) is there and that the newest key
    signed the head, as opening does. `only_recent` checks the rows since the last checkpoint, and the totals of the
    sums; without `hours` the sums by hour are not read. Raises where the disk, another program or a missing key
    prevents checking: an unread ledger is neither intact nor damaged.
    """
    known = LedgerKeys(keys[0], keys[1:]) if keys else None
    report = Report(macs_checked=known is not None)
    try:
        with closing(open_reader(address, folder)) as store:
            store.freeze_view()
            refuse_if_moved(store)
            report.is_copy = store.kind == "copy"
            if not only_recent:
                report.num_events, report.signers = store.count_rows(), store.signers()
            report.contents = contents = read_contents(store, None)
            report.by_key = store.usage_by("key")
            report.by_hour = store.usage_by("hour") if hours else {}
            if only_recent:
                checkpoint = store.checkpoint()
                if known is None and checkpoint is not None and checkpoint.is_whole:
                    report.trusted_through = checkpoint.seq
                check_recent(store, known, contents if known is None else read_contents(store, known))
                check_sums(store, contents.state, report.by_key)
            else:
                store.check_pages()
                read_all(store, known)
            report.verified_through = contents.head.seq
            if not report.is_copy:
                check_note(store, contents.head.seq, store.note)
                _check_in_force(store.name, contents.key, known)
    except (LedgerMissing, LedgerMoved):
        raise
    except LedgerWrongKey as error:
        contradiction = _contradiction(address, folder)  # rows that were all forged name another key, too
        if known is not None and not contradiction and _lacks_key(address, known):
            raise LedgerWrongKey(f"The ledger was not checked, for want of the right key. {error}") from None
        report.intact, report.problem = False, contradiction or str(error)
    except (LedgerBusy, LedgerFull, LedgerUnwritable) as error:
        raise type(error)(f"The ledger could not be read, so it was not checked. {error}") from None
    except LedgerError as error:
        report.intact, report.problem = False, str(error)
        report.bad_seq = error.seq if isinstance(error, LedgerTampered) else None
        if isinstance(error, LedgerTampered) and error.verified is not None:
            report.verified_through = error.verified
    return report


def _contradiction(address: Address, folder: Path | None) -> str:
    """What this machine's note says against the rows; empty where there is no note, or it agrees."""
    with closing(open_reader(address, folder)) as store:
        try:
            if store.kind != "copy":
                check_note(store, read_contents(store, None).head.seq, store.note)
        except LedgerError as error:
            return str(error)
    return ""


def _lacks_key(address: Address, keys: LedgerKeys) -> bool:
    """Whether another key is needed, rather than a row forged.

    No row names a given key; or a rotation that a given key endorsed, or signed, names another one.
    """
    with closing(open_reader(address)) as store:
        if not any(name in keys for name in store.signers()):
            return True
        return any(_is_tied(row, keys) for row in store.notable_rows() if row.kind == KeyRotated.kind)


def _is_tied(row: Row, keys: LedgerKeys) -> bool:
    try:
        event = parse_row(row)[0]
        if not isinstance(event, KeyRotated) or (event.old_key in keys) == (event.new_key in keys):
            return False
        if event.old_key in keys:
            return endorse(keys, event.old_key, event.new_key, row.previous) == event.endorsement
        check_row(row, keys)
        return True
    except (BadRow, LedgerWrongKey):
        return False


def _check_in_force(name: str, signer: str, keys: LedgerKeys | None) -> None:
    """Refuse a head signed with a rotated key: others may know that key and could have continued from before."""
    if keys is not None and signer != keys.current:
        raise LedgerRolledBack(
            f"The newest rows of {name} are signed with the key {signer}, which was rotated; {keys.current} is in "
            "force. The ledger is from before the rotation, or was made with the old key. Restore its newest state, or "
            "adopt this one with paclm ledger adopt, which charges all that can have been spent since."
        )
