"""Move a ledger to another store: all or nothing, and never two that can be used.

The target is filled as `incoming`, which nothing opens, and compared with the source. Then the row `Moved` closes the
source for good: nothing opens a ledger whose newest row that is, whatever its marks say. Then the target gets the same
row and `Arrived` after it, and is in use. A crash leaves the source in use, or both closed: the same command finishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

from paclm.errors import InvalidInput, LedgerError, LedgerMissing
from paclm.ledger.address import Holding, create, discard, name_of, open_reader, open_writer
from paclm.ledger.events import Arrived, Head, LedgerKeys, Moved, Row
from paclm.ledger.ledger import Ledger
from paclm.ledger.reading import kind_of, moved_by, read_chain, read_contents, read_row, refuse_if_moved
from paclm.ledger.store import Address, Commit, Kind, Store
from paclm.ledger.witness import check_witness

Report = Callable[[str, int], Callable[[int], None]]
"""Begins a stage with its name and number of rows; returns a function that counts them."""

_PART = 1000
"""Rows after which progress is reported."""


def move(
    source: Address,
    target: Address,
    keys: LedgerKeys,
    *,
    confirmed_by: str,
    holding: Holding,
    witness: Address | None = None,
    carry: Callable[[], None] = lambda: None,
    report: Report = lambda _, __: lambda _: None,
) -> Head:
    """Move the ledger, or finish a move that was interrupted; returns the newest row of the target.

    `carry` copies what is kept beside the ledger; it is called before the source is closed.
    """
    source, target = (Path(place).absolute() if isinstance(place, Path) else place for place in (source, target))
    if name_of(source) == name_of(target):
        raise InvalidInput(
            f"The workspace names {name_of(target)} as the place of its ledger already. To finish a move that was "
            "interrupted, first name the place it is moved from: url of [ledger] in paclm.toml, or PACLM_LEDGER."
        )
    if witness is not None and name_of(witness) == name_of(target):
        raise InvalidInput(f"{name_of(target)} holds the ledger's witness. Name a database on another server.")
    if kind_at(source) != "moved":
        with Ledger(source, keys, in_full=True, holding=holding) as ledger:
            check_witness(ledger, witness)
            ledger.settle()
            _make_room(target, ledger, _beside(holding))
            copy = ledger.store.copy()
            rows = _counted(copy.rows, report("Copying rows", ledger.head.seq))
            create(target, copy._replace(rows=rows), "incoming", _beside(holding))
            with closing(open_writer(target, _beside(holding))) as incoming:
                report("Checking the copy", 0)
                _check_same(ledger.store, incoming, keys, ledger.head)
                carry()
                ledger.append(Moved(ledger.name, name_of(target), confirmed_by))  # closes the source, signed
                ledger.store.mark("moved")
    return _arrive(source, target, keys, holding, witness)


def kind_at(address: Address) -> Kind:
    """What is at an address; `none` where no ledger is."""
    try:
        with closing(open_reader(address)) as store:
            return kind_of(store)
    except LedgerMissing:
        return "none"


def _arrive(source: Address, target: Address, keys: LedgerKeys, holding: Holding, witness: Address | None) -> Head:
    """Open the target of a source that is closed, also after a crash; or nothing is left to do."""
    with closing(open_reader(source)) as old:
        closing_row, event = old.newest_row(), moved_by(old)
        if closing_row is None or event is None or event.target != name_of(target):
            refuse_if_moved(old)  # raises: says where it went
        assert closing_row is not None
        assert event is not None
        with closing(open_reader(target)) as new:
            kind, found, newest = new.kind, new.row(closing_row.seq), new.newest_row()
        if kind == "incoming":
            with closing(open_writer(target, _beside(holding))) as incoming:
                _check_same(old, incoming, keys, Head(closing_row.seq - 1, closing_row.previous))
                if incoming.row(closing_row.seq) is None:
                    incoming.append(Commit(closing_row, closing_row.seq - 1))
                incoming.mark("live")
        elif kind != "live" or found is None or found.digest != closing_row.digest:
            raise LedgerError(f"{name_of(target)} holds another ledger than {old.name}, which was moved there.")
        elif newest is not None and newest.seq > closing_row.seq:
            return Head(newest.seq, newest.digest)
    with Ledger(target, keys, in_full=False, accept_moved=True, holding=holding) as ledger:
        check_witness(ledger, witness)
        if ledger.head.digest != closing_row.digest:
            raise LedgerError(f"{ledger.name} went on while it was moved there. Nothing was changed.")
        ledger.settle()
        ledger.append(Arrived(event.source, event.target))
        return ledger.head


def _make_room(target: Address, ledger: Ledger, holding: Holding) -> None:
    """Refuse a target in use. What an interrupted move left is removed: it was never in use, and the source has it."""
    kind = kind_at(target)
    if kind == "none" and not (isinstance(target, Path) and target.exists()):
        return
    if kind == "incoming":
        with closing(open_reader(target)) as incoming:
            newest = read_row(incoming, read_contents(incoming, None).head.seq)
        found = ledger.store.row(newest.seq)
        if found is None or found.digest != newest.digest:
            raise LedgerError(
                f"{name_of(target)} holds an unfinished move of another ledger, which may be the only copy. Finish "
                "that one, or choose another place."
            )
        discard(target, holding)
    elif kind == "moved" and isinstance(target, Path):
        set_aside(target)
    else:
        raise LedgerError(
            f"{name_of(target)} holds a ledger already ({kind}). A ledger never replaces another: choose an empty "
            f"database. One that was moved away can be renamed: ALTER SCHEMA paclm RENAME TO paclm_{ledger.head.seq}"
        )


def set_aside(path: Path) -> None:
    """Keep a file that is no longer used, if there is one, under another name, with its side files."""
    number = next(n for n in count(1) if not path.with_name(f"{path.name}.moved-{n}").exists())
    for suffix in ("-wal", "-shm", ""):
        if (old := path.with_name(path.name + suffix)).exists():
            os.replace(old, path.with_name(f"{path.name}.moved-{number}{suffix}"))


def _check_same(old: Store, new: Store, keys: LedgerKeys, last: Head) -> None:
    """Check every row of the copy, and that it ends there with account, belief, secret and sums of the original."""
    contents, row = read_chain(new, keys), new.row(last.seq)
    same = replace(read_contents(old, keys), head=contents.head), old.usage()
    if (contents, new.usage()) != same or row is None or row.digest != last.digest:
        raise LedgerError(f"The copy in {new.name} is not the same as {old.name}, and is not used. Repeat the move.")


def _beside(holding: Holding) -> Holding:
    """To hold the target while the source is held: its rows are noted by the source."""
    return holding._replace(folder=None)


def _counted(rows: Iterable[Row], advance: Callable[[int], None]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield row
        if number % _PART == 0:
            advance(_PART)
