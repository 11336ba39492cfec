"""Slots of a witness that a crash cut off or somebody spoiled: what passes, and that no row is hidden so."""

from __future__ import annotations

import os
import shutil

import pytest

from ledger.tearing import SLOT, Crash, tear, torn_commit
from paclm.errors import LedgerError, LedgerRolledBack, LedgerTampered
from paclm.ledger import witness as witness_file
from paclm.ledger.recovery import adopt_restored, replace_witness
from paclm.ledger.witness import Witness

NEW_KEY = bytes(range(1, 33))


LENGTHS = [0, 1, 16, 20, 100, 600, 5000]


@pytest.mark.parametrize("keep", LENGTHS)
def test_a_testimony_that_was_cut_off_is_made_good(books, monkeypatch, keep):
    torn_commit(books, monkeypatch, SLOT, keep, witness=books.witness)
    for n in (3, 4, 5):
        with books.open(witness=books.witness) as ledger:
            assert ledger.sealed_belief == b"sealed %d" % n
            ledger.commit(books.step(), b"sealed %d" % (n + 1))


@pytest.mark.parametrize("keep", [60, 100, 600])
@pytest.mark.parametrize("has_lock", [True, False], ids=["with the lock", "without the lock"])
def test_a_testimony_that_was_cut_off_does_not_let_the_row_before_pass(books, monkeypatch, keep, has_lock):
    """One slot whole, and the ledger put back to where that slot is: the row that the other was about is missing."""
    books.put_back(torn_commit(books, monkeypatch, SLOT, keep, witness=books.witness))
    if not has_lock:
        (books.folder / "ledger.lock").unlink()
    with pytest.raises(LedgerRolledBack):
        books.open(witness=books.witness)
    with pytest.raises(LedgerRolledBack):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    adopt_restored(books.path, books.key, confirmed_by="ada")
    with books.open() as ledger:
        assert ledger.account.remaining_units == 0


def test_a_ledger_a_row_ahead_of_a_testimony_that_was_cut_off_is_adopted_as_current(books, monkeypatch):
    torn_commit(books, monkeypatch, SLOT, 300, witness=books.witness)
    assert adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness).proof == "current"
    with books.open(witness=books.witness) as ledger:
        assert ledger.sealed_belief == b"sealed 3"


def spoil(books, number):
    size = books.witness.stat().st_size // 2
    with books.witness.open("r+b") as file:
        file.seek(number * size + 30)
        file.write(b"spoiled!")


def newest_slot(books):
    content = books.witness.read_bytes()
    half = len(content) // 2
    return max((0, 1), key=lambda n: int(content[n * half :].split(b'"seq":')[1].split(b",")[0]))


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_slot_that_was_spoiled_later_is_refused_where_it_could_hide_a_row(books, is_newest, tmp_path):
    books.with_steps(3, witness=books.witness).close()
    newest = newest_slot(books)
    spoil(books, newest if is_newest else 1 - newest)
    if is_newest:  # the ledger is a row ahead of the other: nothing can be missing
        books.open(witness=books.witness).close()
        return
    with pytest.raises(LedgerRolledBack, match=r"slots.*replace-witness"):
        books.open(witness=books.witness)
    replace_witness(books.path, books.key, confirmed_by="ada", witness=tmp_path / "new.witness")
    books.open(witness=tmp_path / "new.witness").close()


def test_a_backup_is_not_adopted_by_a_witness_whose_newest_slot_was_spoiled(books):
    """It would come back without the charge and the belief of that slot's row."""
    books.fall_back(2)
    (books.folder / "ledger.lock").unlink()
    spoil(books, newest_slot(books))
    with pytest.raises(LedgerRolledBack, match="slots"):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)


@pytest.mark.parametrize("keep", LENGTHS)
def test_an_adopting_whose_testimony_was_cut_off_is_finished_by_another(books, monkeypatch, keep):
    account = books.fall_back(2)
    for _ in range(2):
        tear(monkeypatch, SLOT, keep)
        with pytest.raises(Crash):
            adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
        monkeypatch.undo()
    adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    with books.open(witness=books.witness) as ledger:
        assert (ledger.account, ledger.sealed_belief) == (account, b"sealed 4")


def test_half_an_adopting_is_not_finished_with_a_witness_that_has_seen_more(books, monkeypatch):
    books.fall_back(1)
    tear(monkeypatch, SLOT, 0)
    with pytest.raises(Crash):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    monkeypatch.undo()
    half = shutil.copy(books.path, books.folder.parent / "half.sqlite")
    books.put_back(books.newest)
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 4")
    books.put_back(half)
    with pytest.raises(LedgerRolledBack):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)


@pytest.mark.parametrize("how", ["twice", "older", "made up"])
def test_slots_that_do_not_follow_one_another_are_refused(books, how):
    books.with_steps(2, witness=books.witness).close()
    old = books.witness.read_bytes()
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 3")
        ledger.commit(books.step(), b"sealed 4")
        ledger.commit(books.step(), b"sealed 5")
    content, newest = bytearray(books.witness.read_bytes()), newest_slot(books)
    size = len(content) // 2
    other = slice((1 - newest) * size, (2 - newest) * size)
    if how == "twice":
        content[other] = content[newest * size : (newest + 1) * size]
    elif how == "older":
        content[other] = old[other]
    else:
        payload, _ = witness_file._unpack(bytes(content[other]))
        content[other] = witness_file._pack(payload, bytes(32)).ljust(size, b"\0")
    books.witness.write_bytes(content)
    with pytest.raises(LedgerTampered, match="two slots"):
        books.open(witness=books.witness)


RESEALING = {
    "a rotation": lambda ledger: ledger.rotate_key(NEW_KEY, b"sealed anew"),
    "a belief sealed anew": lambda ledger: ledger.reseal(b"sealed anew"),
}


@pytest.mark.parametrize("keep", [0, 100, 600])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("what", RESEALING)
def test_a_belief_sealed_anew_reaches_both_slots_wherever_it_was_cut_off(books, monkeypatch, what, count, keep):
    ledger = books.with_steps(2, witness=books.witness)
    tear(monkeypatch, SLOT, keep, count)
    with pytest.raises(Crash):
        RESEALING[what](ledger)
    ledger.close()
    monkeypatch.undo()
    keys = {"mac_key": NEW_KEY, "old_keys": [books.key]} if what == "a rotation" else {}
    tear(monkeypatch, SLOT, keep)  # and once more while the next opening makes it good
    with pytest.raises(Crash):
        books.open(witness=books.witness, **keys)
    monkeypatch.undo()
    with books.open(witness=books.witness, **keys) as ledger:
        assert ledger.sealed_belief == b"sealed anew"
    assert books.witness.read_bytes().count(b"sealed anew".hex().encode()) == 2
    before = books.witness.read_bytes()
    books.open(witness=books.witness, **keys).close()
    assert books.witness.read_bytes() == before


def test_after_a_belief_was_sealed_anew_a_torn_slot_hides_no_row_either(books, monkeypatch):
    with books.with_steps(2, witness=books.witness) as ledger:
        ledger.reseal(b"sealed anew")
    put_back_later = shutil.copy(books.path, books.folder.parent / "before.sqlite")
    with books.open(witness=books.witness) as ledger:
        tear(monkeypatch, SLOT, 300)
        with pytest.raises(Crash):
            ledger.commit(books.step(), b"sealed 3")
    monkeypatch.undo()
    books.put_back(put_back_later)
    (books.folder / "ledger.lock").unlink()
    with pytest.raises(LedgerRolledBack, match="slots"):
        books.open(witness=books.witness)


def test_a_witness_with_one_write_of_a_new_ledger_is_no_torn_one(books, monkeypatch):
    """Killed right after the witness was made, before it was on record."""
    books.create().close()
    monkeypatch.setattr(Witness, "create", classmethod(made_and_killed(Witness.create)))
    with pytest.raises(Crash):
        books.open(witness=books.witness)
    monkeypatch.undo()
    for _ in range(2):
        with books.open(witness=books.witness) as ledger:
            assert ledger.state.witness is not None


def made_and_killed(create):
    def make(_, *arguments):
        create(*arguments).close()
        raise Crash

    return make


def test_a_witness_that_was_cut_off_by_a_byte_hides_no_row(books, tmp_path):
    books.with_steps(2, witness=books.witness).close()
    copy = shutil.copy(books.path, tmp_path / "before.sqlite")
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 3")
    size = books.witness.stat().st_size
    books.put_back(copy)
    (books.folder / "ledger.lock").unlink()
    for cut in (1, 2, size // 2, size - 10, size):
        os.truncate(books.witness, size - cut)
        with pytest.raises(LedgerError):
            books.open(witness=books.witness)
