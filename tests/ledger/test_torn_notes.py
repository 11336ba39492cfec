"""Notes of the lock that a crash cut off: told apart from a ledger that was put back, and no way around the look."""

from __future__ import annotations

import os
import shutil

import pytest

from ledger.tearing import NOTE, Crash, tear, torn_commit
from paclm.errors import LedgerFull, LedgerRolledBack
from paclm.ledger.recovery import adopt_restored
from paclm.ledger.store import HeadNote, read_note
from paclm.ledger.verify import verify

NOTE_LENGTH = 177


@pytest.mark.parametrize("keep", [*range(0, NOTE_LENGTH, 13), NOTE_LENGTH - 1, NOTE_LENGTH])
def test_a_note_that_was_cut_off_refuses_nothing_that_is_there(books, monkeypatch, keep):
    torn_commit(books, monkeypatch, NOTE, keep)
    assert verify(books.path, [books.key]).intact
    for n in (3, 4, 5):
        with books.open() as ledger:
            assert ledger.sealed_belief == b"sealed %d" % n
            ledger.commit(books.step(), b"sealed %d" % (n + 1))


@pytest.mark.parametrize("keep", [30, 60, 100, NOTE_LENGTH - 1, NOTE_LENGTH])
def test_a_note_that_was_cut_off_still_finds_a_ledger_that_was_put_back(books, monkeypatch, keep):
    """By a single row, even: what was begun to be noted is missing. (The first bytes are those that were there.)"""
    books.put_back(torn_commit(books, monkeypatch, NOTE, keep))
    for _ in range(2):
        with pytest.raises(LedgerRolledBack, match="row"):
            books.open()
        assert not verify(books.path, [books.key]).intact
    adopt_restored(books.path, books.key, confirmed_by="ada")
    with books.open() as ledger:
        assert ledger.account.remaining_units == 0


def test_a_refusal_after_a_note_that_was_cut_off_says_that_it_may_be_that(books, monkeypatch):
    books.put_back(torn_commit(books, monkeypatch, NOTE, 40))
    with pytest.raises(LedgerRolledBack, match=r"ledger\.lock.*ledger\.lock.*adopt"):
        books.open()


def test_of_two_notes_one_is_whole_however_often_a_process_dies_at_the_other(books, monkeypatch):
    torn_commit(books, monkeypatch, NOTE, 50)
    for keep in (3, 90, 170):
        tear(monkeypatch, NOTE, keep)
        with pytest.raises(Crash):
            books.open()
        monkeypatch.undo()
    with books.open() as ledger:
        assert ledger.sealed_belief == b"sealed 3"
    assert read_note(books.folder / "ledger.lock") == HeadNote(ledger.head)


def test_the_same_row_is_not_noted_twice(books, monkeypatch):
    books.with_steps(2).close()
    tear(monkeypatch, NOTE, 40)
    books.open().close()


def test_a_short_write_of_a_note_stops_the_ledger_and_costs_nothing(books, monkeypatch):
    real = os.pwrite
    with books.with_steps(2) as ledger:
        monkeypatch.setattr(os, "pwrite", lambda fd, content, at: real(fd, content[:70], at))
        with pytest.raises(LedgerFull, match="70 of 177"):
            ledger.commit(books.step(), b"sealed 3")
        monkeypatch.undo()
    with books.open() as ledger:
        assert ledger.sealed_belief == b"sealed 3"


def test_an_adopting_whose_note_was_cut_off_is_repeated(books, monkeypatch):
    books.with_steps(2).close()
    copy = shutil.copy(books.path, books.folder.parent / "before.sqlite")
    with books.open() as ledger:
        ledger.commit(books.step(), b"sealed 3")
        ledger.commit(books.step(), b"sealed 4")
    books.put_back(copy)
    tear(monkeypatch, NOTE, 100)
    with pytest.raises(Crash):
        adopt_restored(books.path, books.key, confirmed_by="ada")
    monkeypatch.undo()
    with pytest.raises(LedgerRolledBack, match=r"ledger\.lock.*adopt"):
        books.open()
    adopt_restored(books.path, books.key, confirmed_by="ada")
    with books.open() as ledger:
        assert ledger.account.remaining_units == 0
