"""Keys that change: interrupted, and in a backup from before. The plain case is in `test_recovery.py`."""

from __future__ import annotations

import shutil

import pytest

from paclm.errors import LedgerError, LedgerRolledBack, LedgerStopped, LedgerWrongKey
from paclm.ledger import ledger as ledger_module
from paclm.ledger.recovery import adopt_restored, backup
from paclm.ledger.verify import verify
from paclm.ledger.witness import Witness

KEYS = [bytes(range(n, n + 32)) for n in (2, 1)]
"""The newest first, without the one that the ledger was made with."""


def assert_nothing_is_lost(books, keys, steps):
    with books.open(**keys) as ledger:
        assert ledger.account == books.before
        assert ledger.sealed_belief == b"sealed %d" % (2 + steps)
        ledger.commit(books.step(), b"later")
    report = verify(books.path, books.keys)
    assert report.intact, report.problem


def crash(*_):
    raise KeyboardInterrupt


@pytest.fixture(params=[1, 2], ids=["one rotation", "two rotations"])
def rotated(books, request):
    """A backup of two steps, then rotations and one more step; `go_on` makes the ledger and puts the backup back."""

    def go_on(*, with_witness, steps=1, by_hand=False):
        witness = books.witness if with_witness else None
        copy = books.folder.parent / "copy.sqlite"
        books.with_steps(2, witness=witness).close()
        shutil.copy(books.path, copy) if by_hand else backup(books.path, copy)
        books.keys = [*KEYS[-request.param :], books.key]
        with books.open(witness=witness) as ledger:
            for key in reversed(books.keys[:-1]):
                ledger.rotate_key(key)
            for n in range(steps):
                ledger.commit(books.step(), b"sealed %d" % (n + 3))
            books.before = ledger.account
        books.put_back(copy)
        return {"mac_key": books.keys[0], "old_keys": books.keys[1:], "witness": witness}

    return go_on


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_backup_from_before_a_rotation_is_adopted_with_the_witness(books, rotated, steps):
    keys = rotated(with_witness=True, steps=steps)
    assert adopt_restored(books.path, confirmed_by="ada", **keys).proof == "witness"
    assert_nothing_is_lost(books, keys, steps)


def test_a_backup_from_before_a_rotation_is_adopted_without_a_witness(books, rotated):
    keys = rotated(with_witness=False)
    assert adopt_restored(books.path, confirmed_by="ada", **keys).proof == "none"
    with books.open(**keys) as ledger:
        assert ledger.account.remaining_units == 0
    report = verify(books.path, books.keys)
    assert report.intact, report.problem


def test_a_backup_is_not_adopted_without_the_key_that_signed_it(books, rotated):
    keys = rotated(with_witness=False)
    with pytest.raises(LedgerWrongKey):
        adopt_restored(books.path, keys["mac_key"], confirmed_by="ada")


def crash_before_restoring(monkeypatch):
    """As if the process died right before the row that ends an adopting."""
    append = ledger_module.Ledger.append
    monkeypatch.setattr(
        ledger_module.Ledger,
        "append",
        lambda self, event, *rest, **more: crash() if event.kind == "restored" else append(self, event, *rest, **more),
    )


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_crash_in_the_middle_of_adopting_leaves_a_copy(books, rotated, monkeypatch, by_hand):
    """Also for a copy by hand, which had no mark before: the lock's memory must not be all there is."""
    keys = rotated(with_witness=False, by_hand=by_hand)
    crash_before_restoring(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        adopt_restored(books.path, confirmed_by="ada", **keys)
    monkeypatch.undo()
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        books.open(**keys)
    adopt_restored(books.path, confirmed_by="ada", **keys)
    with books.open(**keys) as ledger:
        assert ledger.account.remaining_units == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_adopting_with_the_witness_is_repeated_after_a_crash_and_loses_nothing(books, rotated, monkeypatch, steps):
    """Without a step the witness has seen as many rows as the copy then has, and another one in the last place."""
    keys = rotated(with_witness=True, steps=steps)
    crash_before_restoring(monkeypatch)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            adopt_restored(books.path, confirmed_by="ada", **keys)
    monkeypatch.undo()
    assert adopt_restored(books.path, confirmed_by="ada", **keys).proof == "witness"
    assert_nothing_is_lost(books, keys, steps)


def test_a_backup_that_ends_with_the_rotation_lacks_nothing(books):
    with books.with_steps(2, witness=books.witness) as ledger:
        ledger.rotate_key(KEYS[0], b"sealed anew")
    copy = books.folder.parent / "copy.sqlite"
    backup(books.path, copy)
    books.put_back(copy)
    keys = {"mac_key": KEYS[0], "old_keys": [books.key], "witness": books.witness}
    assert adopt_restored(books.path, confirmed_by="ada", **keys).proof == "current"


def test_a_crash_between_the_restore_and_its_witness_is_made_good_by_adopting_once_more(books, monkeypatch):
    before = books.fall_back(1)
    again = {"mac_key": books.key, "confirmed_by": "ada", "witness": books.witness}
    monkeypatch.setattr(Witness, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        adopt_restored(books.path, **again)
    monkeypatch.undo()
    half = books.folder.parent / "half.sqlite"
    shutil.copy(books.path, half)
    for start in (half, books.backup):
        books.put_back(start)
        assert adopt_restored(books.path, **again).proof == "witness"
        with books.open(witness=books.witness) as ledger:
            assert (ledger.account, ledger.sealed_belief) == (before, b"sealed 3")
        assert verify(books.path, [books.key]).intact


def test_a_live_ledger_signed_with_an_old_key_is_not_opened(books):
    books.with_steps(1).close()
    with pytest.raises(LedgerError, match="old key"):
        books.open(mac_key=KEYS[0], old_keys=[books.key])


@pytest.mark.parametrize("place", ["make_row", "endorse"])
def test_an_interrupted_rotation_leaves_the_old_key_signing(books, monkeypatch, place):
    with books.with_steps(1) as ledger:
        monkeypatch.setattr(ledger_module, place, crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.rotate_key(KEYS[0])
        monkeypatch.undo()
        ledger.commit(books.step(), b"sealed 2")
    assert verify(books.path, [books.key]).intact
    books.open().close()


def test_an_interrupt_after_the_rotation_was_written_stops_the_ledger(books, monkeypatch):
    with books.with_steps(1) as ledger:
        monkeypatch.setattr(ledger_module.Ledger, "_use_keys", crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.rotate_key(KEYS[0])
        monkeypatch.undo()
        with pytest.raises(LedgerStopped):
            ledger.commit(books.step(), b"sealed 2")
    with books.open(mac_key=KEYS[0], old_keys=[books.key]) as ledger:
        ledger.commit(books.step(), b"sealed 2")
    assert verify(books.path, [KEYS[0], books.key]).intact
