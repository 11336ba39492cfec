"""Promises on record in the ledger's database, for all hosts that share it; each host has a `DpLog` of its own.

Only a holder of the ledger writes them, with its epoch: of a `half` and a `corpus` that start on two hosts at the same
time, the second to take the ledger sees what the first recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime

from paclm.ledger.postgres import connect, name_of, translated
from paclm.ledger.postgres_hold import fenced

_RECORD = """
WITH mine AS (SELECT 1 FROM paclm.head WHERE epoch = %s FOR SHARE),
added AS (INSERT INTO paclm.promises SELECT %s::text, %s::text FROM mine ON CONFLICT (kind) DO NOTHING)
SELECT count(*) FROM mine
"""
_CARRY = """
INSERT INTO paclm.promises SELECT unnest(%s::text[]), %s FROM paclm.head WHERE kind = 'incoming' ON CONFLICT DO NOTHING
"""


def promises_in(url: str) -> set[str]:
    """The kinds on record: `served` once `corpus` was, `mixed` once both were accepted."""
    with closing(connect(url, is_reading=True)) as db, translated(name_of(url), is_reading=True):
        found = db.execute("SELECT to_regclass('paclm.promises') IS NOT NULL").fetchone()
        return {kind for (kind,) in db.execute("SELECT kind FROM paclm.promises")} if found and found[0] else set()


def record_promise(url: str, kind: str, epoch: int) -> None:
    """Put it on record for good; refused where another process took the ledger over."""
    with closing(connect(url)) as db, translated(name_of(url)):
        held = db.execute(_RECORD, (epoch, kind, _today())).fetchone()
    if held is None or held[0] != 1:
        raise fenced(name_of(url))


def carry_promises(url: str, kinds: Iterable[str]) -> None:
    """Put them on record in the target of a move, which nothing opens yet."""
    with closing(connect(url)) as db, translated(name_of(url)):
        db.execute(_CARRY, (sorted(kinds), _today()))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
