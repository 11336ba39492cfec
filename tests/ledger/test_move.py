"""Moving a ledger: everything arrives, the old place is closed, and no crash leaves two that can be used."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ledger.stores import IN_A_FILE, KEY, NEW_KEY, PRICE
from paclm.errors import InvalidInput, LedgerBusy, LedgerError, LedgerMoved, WitnessMissing
from paclm.ledger import move as moving
from paclm.ledger.address import Holding, name_of
from paclm.ledger.events import LedgerKeys, Usage
from paclm.ledger.head_notes import read_note
from paclm.ledger.ledger import Ledger
from paclm.ledger.postgres_store import PostgresStore
from paclm.ledger.recovery import backup
from paclm.ledger.sqlite_file import IDS
from paclm.ledger.sqlite_store import SqliteStore
from paclm.ledger.verify import newest_contents, verify

STALE = 0.2


@pytest.fixture
def target(setup, postgres):
    """The other kind of store."""
    if not isinstance(setup.address, Path):
        yield setup.folder / "ledger.sqlite"
        return
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


def spend(ledger, tokens=2):
    ledger.commit([Usage("alice", tokens, 1, tokens, tokens * PRICE)], b"sealed %d" % ledger.head.seq)


def holding(setup):
    return Holding(setup.folder, STALE)


def start(setup, **options):
    with setup.create(**options) as ledger:
        ledger.seal_secret(b"a sealed secret", "drawn")
        spend(ledger)


def move(setup, source, target, **options):
    options = {"confirmed_by": "ada", "holding": holding(setup)} | options
    return moving.move(source, target, options.pop("keys", LedgerKeys(KEY)), **options)


def open_at(setup, address, **options):
    return Ledger.open(address, KEY, holding=holding(setup), **options)


def test_everything_moves_and_the_old_place_is_closed_to_every_reader_and_writer(setup, target, tmp_path):
    start(setup)
    before, old = newest_contents(setup.address), setup.verify()
    carried = []
    head = move(setup, setup.address, target, carry=lambda: carried.append(moving.kind_at(setup.address)))
    after, report = newest_contents(target), verify(target, [KEY], folder=setup.folder)
    assert carried == ["live"]
    assert (report.intact, after.head) == (True, head)
    assert (report.by_hour, report.by_key) == (old.by_hour, old.by_key) != ({}, {})
    for name in ("opened", "state", "settings", "sealed_belief", "sealed_secret"):
        assert getattr(after, name) == getattr(before, name)
    for use in (setup.open, setup.verify, partial(newest_contents, setup.address), partial(setup.adopt, witness=None)):
        with pytest.raises(LedgerMoved) as refused:
            use()
        assert f"was moved to {name_of(target)}" in str(refused.value)
    with pytest.raises(LedgerMoved):
        backup(setup.address, tmp_path / "late.sqlite")
    with open_at(setup, target) as ledger:
        spend(ledger)
        assert ledger.account.tokens == 4
    assert move(setup, setup.address, target) == ledger.head  # there is nothing left to do


def test_a_ledger_can_move_back_and_nothing_is_overwritten(setup, target):
    start(setup)
    move(setup, setup.address, target)
    with open_at(setup, target) as ledger:
        spend(ledger)
    if isinstance(target, Path):
        with pytest.raises(LedgerError, match="ALTER SCHEMA"):
            move(setup, target, setup.address)
        setup.run("ALTER SCHEMA paclm RENAME TO paclm_before")
    move(setup, target, setup.address)
    with setup.open() as ledger:
        assert ledger.account.tokens == 4
    kept = setup.folder / "ledger.sqlite.moved-1"
    assert kept.exists() == isinstance(setup.address, Path)
    if kept.exists():
        assert moving.kind_at(kept) == "moved"


def test_a_mark_set_back_by_hand_opens_neither_the_old_place_nor_a_third(setup, target, tmp_path):
    """Also a replica that was promoted without the last write: the newest row is signed, the mark is not."""
    start(setup)
    move(setup, setup.address, target)
    in_file = f"PRAGMA application_id={IDS['live']}"
    setup.run(in_file if isinstance(setup.address, Path) else "UPDATE head SET kind = 'live'")
    for use in (
        setup.open,
        setup.verify,
        partial(newest_contents, setup.address),
        partial(setup.adopt, witness=None),
        partial(setup.replace_witness, None),
        partial(backup, setup.address, tmp_path / "late.sqlite"),
        partial(move, setup, setup.address, tmp_path / "third.sqlite"),
    ):
        with pytest.raises(LedgerMoved, match="closed for good"):
            use()
    with open_at(setup, target) as ledger:
        spend(ledger)
    assert move(setup, setup.address, target) == ledger.head


CLOSED = ("after append moved", "after mark moved", "after mark live", "before append arrived")
POINTS = ("before create", "after create", "after carry", "before append moved", *CLOSED, "after append arrived")


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_step_leaves_at_most_one_ledger_and_repeating_finishes(setup, target, point):
    start(setup, witness=setup.witness)
    tokens = 2
    _die_at(point, partial(move, setup, setup.address, target, witness=setup.witness))
    usable = [place for place in (setup.address, target) if _spends(setup, place)]
    assert usable == ([] if point in CLOSED else [target] if point == POINTS[-1] else [setup.address])
    tokens += 2 * len(usable)
    _patiently(partial(move, setup, setup.address, target, witness=setup.witness))
    assert not _spends(setup, setup.address)
    with _patiently(partial(open_at, setup, target, witness=setup.witness)) as ledger:
        assert (ledger.account.tokens, ledger.sealed_secret) == (tokens, b"a sealed secret")
    assert verify(target, [KEY], folder=setup.folder).intact


def _die_at(point, work):
    """Run in a child process that ends there, as by SIGKILL."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            moving.create = _deadly(point, "create", moving.create)
            Ledger.append = _deadly(point, "append", Ledger.append)
            for store in (SqliteStore, PostgresStore):
                store.mark = _deadly(point, "mark", store.mark)
            work(carry=_deadly(point, "carry", lambda: None))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def _deadly(point, step, function):
    def call(*arguments, **options):
        name = step if step in ("create", "carry") else f"{step} {getattr(arguments[1], 'kind', arguments[1])}"
        if point == f"before {name}":
            os._exit(9)
        result = function(*arguments, **options)
        if point == f"after {name}":
            os._exit(9)
        return result

    return call


def _spends(setup, place):
    try:
        with _patiently(partial(open_at, setup, place, witness=setup.witness)) as ledger:
            spend(ledger)
    except LedgerError:
        return False
    return True


def _patiently(work):
    """Wait while a holder that was killed counts as alive."""
    while True:
        with suppress(LedgerBusy):
            return work()


def test_a_move_is_refused_before_anything_is_written(setup, target, tmp_path):
    start(setup, witness=setup.witness)
    head = newest_contents(setup.address).head
    with setup.open(witness=setup.witness), pytest.raises(LedgerBusy):
        move(setup, setup.address, target, witness=setup.witness)
    with pytest.raises(WitnessMissing):
        move(setup, setup.address, target)
    with pytest.raises(LedgerError, match="signed with the key"):
        move(setup, setup.address, target, keys=LedgerKeys(NEW_KEY))
    with pytest.raises(InvalidInput, match="already"):
        move(setup, setup.address, setup.address)
    place = tmp_path / "another.sqlite" if isinstance(target, Path) else target
    Ledger.create(place, KEY, workspace="another", num_worlds=128, settings=setup.settings, sealed_belief=b"b").close()
    if isinstance(target, Path):  # made elsewhere: it would note its own rows in the lock beside it
        place.rename(target)
    with pytest.raises(LedgerError, match="holds a ledger already"):
        move(setup, setup.address, target, witness=setup.witness)
    assert newest_contents(setup.address).head == head
    assert moving.kind_at(target) == "live"


@IN_A_FILE
def test_an_unfinished_move_of_another_ledger_is_not_removed(setup, target, tmp_path):
    (tmp_path / "other").mkdir()
    other = setup.another(tmp_path / "other")
    for place in (setup, other):
        start(place)
    _die_at("after mark moved", partial(move, other, other.address, target))
    with pytest.raises(LedgerError, match="another ledger"):
        _patiently(partial(move, setup, setup.address, target))
    _patiently(partial(move, other, other.address, target))
    with open_at(other, target) as ledger:
        assert ledger.account.tokens == 2


def test_a_copy_that_differs_does_not_close_the_original(setup, target, monkeypatch):
    start(setup)
    head, create = newest_contents(setup.address).head, moving.create

    def forget(place, copy, *rest):
        create(place, copy._replace(usage={}), *rest)

    monkeypatch.setattr(moving, "create", forget)
    with pytest.raises(LedgerError, match="not the same"):
        move(setup, setup.address, target)
    assert (moving.kind_at(setup.address), moving.kind_at(target)) == ("live", "incoming")
    assert newest_contents(setup.address).head == head  # no row is left of a move that failed
    assert _spends(setup, setup.address)


def test_the_note_on_this_machine_goes_on_with_the_moved_ledger(setup, target):
    start(setup)
    head = move(setup, setup.address, target)
    assert read_note(setup.lock).head == head
    with open_at(setup, target) as ledger:
        spend(ledger)
    assert read_note(setup.lock).head == ledger.head
