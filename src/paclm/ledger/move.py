"""Move a ledger to another store: all or nothing, and never two that can be used.

The target is filled as `incoming`, which nothing opens, and compared with the source; then the source is closed for
good, and only then the target opened. A crash leaves the source in use, or both closed: the same command finishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

from paclm.errors import InvalidInput, LedgerError, LedgerMissing
from paclm.ledger.address import Holding, create, discard, name_of, open_reader, open_writer
from paclm.ledger.events import Head, LedgerKeys, Moved, Row
from paclm.ledger.ledger import Ledger
from paclm.ledger.reading import check_note, read_chain, read_contents, read_row, refuse_if_moved
from paclm.ledger.state import parse_row
from paclm.ledger.store import Address, Kind, Store
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
    """Move the ledger, or finish a move that was interrupted; returns its newest row.

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
    if kind_at(source) == "moved":
        return _finish(source, target, keys, holding)
    with Ledger(source, keys, in_full=True, holding=holding) as ledger:
        check_witness(ledger, witness)
        ledger.settle()
        _make_room(target, ledger, _beside(holding))
        ledger.append(Moved(ledger.name, name_of(target), confirmed_by))
        copy = ledger.store.copy()
        rows = _counted(copy.rows, report("Copying rows", ledger.head.seq))
        create(target, copy._replace(rows=rows), "incoming", _beside(holding))
        with closing(open_writer(target, _beside(holding))) as incoming:
            report("Checking the copy", 0)
            _check_same(ledger.store, incoming, keys)
            carry()
            ledger.store.mark("moved")
            incoming.mark("live")
        return ledger.head


def kind_at(address: Address) -> Kind:
    """What is at an address; `none` where no ledger is."""
    try:
        with closing(open_reader(address)) as store:
            return store.kind
    except LedgerMissing:
        return "none"


def _finish(source: Address, target: Address, keys: LedgerKeys, holding: Holding) -> Head:
    """After a crash between closing the source and opening the target; or nothing is left to do."""
    with closing(open_reader(source)) as old:
        newest = old.newest_row()
        event = None if newest is None else parse_row(newest)[0]
        if newest is None or not isinstance(event, Moved) or event.target != name_of(target):
            refuse_if_moved(old)  # raises: says where it went
        assert newest is not None
        if kind_at(target) == "live":
            with closing(open_reader(target)) as new:
                found = new.row(newest.seq)
            if found is None or found.digest != newest.digest:
                raise LedgerError(f"{name_of(target)} holds another ledger than {old.name}, which was moved there.")
        else:
            with closing(open_writer(target, holding)) as incoming:
                if incoming.kind != "incoming":
                    raise LedgerError(f"{incoming.name} is a backup, or was moved on. Name the place of the newest.")
                _check_same(old, incoming, keys)
                check_note(incoming, newest.seq, incoming.note)
                incoming.mark("live")
        return Head(newest.seq, newest.digest)


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


def _check_same(old: Store, new: Store, keys: LedgerKeys) -> None:
    """Check every row of the copy, and that account, belief, secret, sums and checkpoint are those of the original."""
    contents = read_chain(new, keys)
    whole, same = (contents, new.usage(), new.checkpoint()), (read_contents(old, keys), old.usage(), old.checkpoint())
    if whole != same:
        raise LedgerError(f"The copy in {new.name} is not the same as {old.name}. Nothing was closed: repeat the move.")


def _beside(holding: Holding) -> Holding:
    """To hold the target while the source is held: its rows are noted by the source."""
    return holding._replace(folder=None)


def _counted(rows: Iterable[Row], advance: Callable[[int], None]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield row
        if number % _PART == 0:
            advance(_PART)
