"""Verify a ledger without the secret, without a key if need be, and while it is in use. Reads only."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
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
from paclm.ledger import database
from paclm.ledger.chain import Keys
from paclm.ledger.lock import Memory, read_remembered
from paclm.ledger.reading import (
    Contents,
    UsageTable,
    check_pages,
    check_remembered,
    read_all,
    read_contents,
    read_usage,
)
from paclm.ledger.writer import lock_path


@dataclass(frozen=True, slots=True)
class Report:
    """What a ledger says, and whether it can be believed."""

    intact: bool
    problem: str | None
    """The first thing that is wrong, as a sentence."""
    bad_seq: int | None
    """The first bad row, where one row can be named."""
    macs_checked: bool
    """False: hashes and sums were checked, but whoever can write the file could have recomputed them."""
    is_copy: bool
    """Made by `backup`; must be adopted before anything is released from it."""
    num_events: int
    signers: tuple[str, ...]
    """Names of the keys that the rows say they were signed with, in the order of the exchanges."""
    contents: Contents | None
    """Where the ledger stands; None where not even its newest row can be read."""
    usage: UsageTable


def signing_key(path: str | Path) -> str | None:
    """The name of the key that the newest row says it was signed with; None where there is none to be read."""
    path = Path(path)
    db = database.open_reader(path)
    try:
        found = db.execute("SELECT key FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    except sqlite3.Error:
        return None
    finally:
        db.close()
    return found[0] if found is not None and isinstance(found[0], str) else None


def witness_on_record(path: str | Path) -> str | None:
    """The name of the witness without which the ledger never opens; None where there is none."""
    return _newest(Path(path)).state.witness


def remaining_tokens(path: str | Path) -> int:
    """How many charged tokens the budget still has, as the newest row tells it; refused for a file put back by hand."""
    path = Path(path)
    contents = _newest(path, read_remembered(lock_path(path)))
    return contents.state.account.remaining_tokens(contents.settings.per_token)


def _newest(path: Path, remembered: Memory | None = None) -> Contents:
    """Where the ledger stands by its newest row; of the others only the remembered one is looked for."""
    db = database.open_reader(path)
    try:
        with database.translated(path, is_reading=True):
            contents = read_contents(db, path, None)
            if not database.is_copy(db):  # a copy is older by its nature, and says so
                check_remembered(db, path, contents.head.seq, remembered)
            return contents
    finally:
        db.close()


def verify(path: str | Path, keys: Sequence[bytes] | None = None) -> Report:
    """Recompute every hash, link, sum and figure; with keys (the newest first) also every MAC.

    Also looks whether the newest row is there that the lock beside the file remembers, and whether the newest key
    signed the head: without these nothing opens it. Raises where the disk or another program keeps it from reading: a
    ledger that nobody could look at is neither intact nor damaged.
    """
    path = Path(path)
    remembered = read_remembered(lock_path(path))  # before any row: one is noted once it is on the disk
    known = Keys(keys[0], keys[1:]) if keys else None
    contents: Contents | None = None
    num_events, is_copy = 0, False
    signers: tuple[str, ...] = ()
    usage: UsageTable = {}
    error: LedgerError | None = None
    try:
        db = database.open_reader(path)
        try:
            with database.translated(path, is_reading=True):
                db.execute("BEGIN")  # one view of the file, whatever a writer does meanwhile
                is_copy = database.is_copy(db)
                (num_events,) = db.execute("SELECT count(*) FROM events").fetchone()
                found = db.execute("SELECT key FROM events GROUP BY key ORDER BY max(seq)")
                signers = tuple(name for (name,) in found if isinstance(name, str))
                contents, usage = read_contents(db, path, None), read_usage(db)
                check_pages(db, path)
                read_all(db, path, known)
                if not is_copy:
                    check_remembered(db, path, contents.head.seq, remembered)
                    _check_in_force(path, contents.key, known)
        finally:
            db.close()
    except LedgerMissing:
        raise
    except (LedgerBusy, LedgerFull, LedgerUnwritable) as problem:
        raise type(problem)(
            f"The ledger could not be checked, which says nothing for or against it. {problem}"
        ) from None
    except LedgerError as problem:
        error = problem
    return Report(
        intact=error is None,
        problem=None if error is None else str(error),
        bad_seq=error.seq if isinstance(error, LedgerTampered) else None,
        macs_checked=known is not None,
        is_copy=is_copy,
        num_events=num_events,
        signers=signers,
        contents=contents,
        usage=usage,
    )


def _check_in_force(path: Path, signed: str, keys: Keys | None) -> None:
    """A key is replaced when others may know it: whoever does can go on from before the exchange, and sign."""
    if keys is not None and signed != keys.current:
        raise LedgerRolledBack(
            f"The newest rows of {path} are signed with the key {signed}, which was replaced; {keys.current} is in "
            "force. The file is from before the exchange of keys, or was made by someone who knows the old one. Put "
            "the newest files back, or adopt this one with paclm ledger adopt, which charges what can have been spent "
            "since."
        )
