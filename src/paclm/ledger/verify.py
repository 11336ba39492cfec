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
    LedgerRolledBack,
    LedgerTampered,
    LedgerUnwritable,
)
from paclm.ledger import sqlite_file
from paclm.ledger.events import LedgerKeys
from paclm.ledger.reading import Contents, check_note, read_all, read_contents
from paclm.ledger.state import UsageTable
from paclm.ledger.store import HeadNote, Store, lock_path, read_note


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
    num_events: int = 0
    signers: tuple[str, ...] = ()
    """Names of the keys that the rows name as theirs, oldest first."""
    contents: Contents | None = None
    """The ledger as of its newest row; None where that row cannot be read."""
    usage: UsageTable = field(default_factory=dict)


def signing_key(path: str | Path) -> str | None:
    """The name of the key that the newest row names as its signer; None where it cannot be read."""
    with closing(Store.open_reader(Path(path))) as store:
        try:
            newest = store.newest_row()
        except LedgerError:
            return None
    return newest.key if newest is not None and isinstance(newest.key, str) else None


def witness_on_record(path: str | Path) -> str | None:
    """The name of the witness that the ledger needs to open; None where it needs none."""
    return _newest(Path(path)).state.witness


def remaining_tokens(path: str | Path) -> int:
    """How many charged tokens the budget has left by the newest row; refused for a file that was rolled back."""
    contents = newest_contents(path)
    return contents.state.account.remaining_tokens(contents.settings.per_token)


def is_backup(path: str | Path) -> bool:
    """Whether the file was made by `backup`."""
    with closing(Store.open_reader(Path(path))) as store:
        return store.kind == sqlite_file.COPY


def newest_contents(path: str | Path) -> Contents:
    """The ledger by its newest row, read without lock and key; refused for a file that was rolled back."""
    path = Path(path)
    return _newest(path, read_note(lock_path(path)))


def _newest(path: Path, note: HeadNote | None = None) -> Contents:
    with closing(Store.open_reader(path)) as store:
        contents = read_contents(store, None)
        if store.kind != sqlite_file.COPY:  # a copy is marked as such, and older than the note
            check_note(store, contents.head.seq, note)
        return contents


def verify(path: str | Path, keys: Sequence[bytes] | None = None) -> Report:
    """Recompute every hash, link, total and sum; with keys (the newest first) also every MAC.

    Also checks that the row noted in the lock file is there and that the newest key signed the head, as opening does.
    Raises where the disk or another program prevents reading: an unread ledger is neither intact nor damaged.
    """
    path = Path(path)
    note = read_note(lock_path(path))  # before any row is read: a row is noted after it is on the disk
    known = LedgerKeys(keys[0], keys[1:]) if keys else None
    report = Report(macs_checked=known is not None)
    try:
        with closing(Store.open_reader(path)) as store:
            store.freeze_view()
            report.is_copy = store.kind == sqlite_file.COPY
            report.num_events, report.signers = store.count_rows(), store.signers()
            report.contents = contents = read_contents(store, None)
            report.usage = store.usage()
            store.check_pages()
            read_all(store, known)
            if not report.is_copy:
                check_note(store, contents.head.seq, note)
                _check_in_force(path, contents.key, known)
    except LedgerMissing:
        raise
    except (LedgerBusy, LedgerFull, LedgerUnwritable) as error:
        raise type(error)(f"The ledger could not be read, so it was not checked. {error}") from None
    except LedgerError as error:
        report.intact, report.problem = False, str(error)
        report.bad_seq = error.seq if isinstance(error, LedgerTampered) else None
    return report


def _check_in_force(path: Path, signer: str, keys: LedgerKeys | None) -> None:
    """Refuse a head signed with a rotated key: others may know that key and could have continued from before."""
    if keys is not None and signer != keys.current:
        raise LedgerRolledBack(
            f"The newest rows of {path} are signed with the key {signer}, which was rotated; {keys.current} is in "
            "force. The file is from before the rotation, or was made with the old key. Restore the newest files, or "
            "adopt this one with paclm ledger adopt, which charges all that can have been spent since."
        )
