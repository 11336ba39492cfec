"""Notes in the lock file that a crash cut off: they refuse no ledger that is whole, and pass none that lost rows."""

import os

import pytest

from ledger.stores import IN_A_FILE
from ledger.tearing import NOTE, torn, torn_commit
from paclm.errors import LedgerFull, LedgerRolledBack
from paclm.ledger.head_notes import HeadNote, read_note

pytestmark = IN_A_FILE

NOTE_LENGTH = 177


@pytest.mark.parametrize("keep", [*range(0, NOTE_LENGTH, 13), NOTE_LENGTH - 1, NOTE_LENGTH])
def test_a_torn_note_does_not_refuse_a_whole_ledger(setup, keep):
    torn_commit(setup, NOTE, keep)
    assert setup.verify([setup.key]).intact
    for n in (3, 4, 5):
        with setup.open() as ledger:
            assert ledger.sealed_belief == b"sealed %d" % n
            setup.commit(ledger, n + 1)


@pytest.mark.parametrize("keep", [30, 60, 100, NOTE_LENGTH - 1, NOTE_LENGTH])
def test_a_torn_note_still_finds_a_rolled_back_ledger(setup, keep):
    """Even by a single row. (The first bytes of both notes are the same: fewer leave the old note whole.)"""
    setup.put(torn_commit(setup, NOTE, keep))
    for _ in range(2):
        with pytest.raises(LedgerRolledBack, match=r"ledger\.lock.*adopt" if keep < NOTE_LENGTH - 1 else "row"):
            setup.open()
        assert not setup.verify([setup.key]).intact
    setup.adopt()
    with setup.open() as ledger:
        assert ledger.account.remaining_units == 0


def test_one_note_stays_whole_however_often_a_process_dies_at_the_other(setup):
    torn_commit(setup, NOTE, 50)
    for keep in (3, 90, 170):
        with torn(NOTE, keep):
            setup.open()
    with setup.open() as ledger:
        assert ledger.sealed_belief == b"sealed 3"
    assert read_note(setup.lock) == HeadNote(ledger.head)


def test_the_same_row_is_neither_noted_nor_witnessed_twice(setup):
    setup.with_steps(2, witness=setup.witness).close()
    before = setup.lock.read_bytes(), setup.witness.read_bytes()
    setup.open(witness=setup.witness).close()
    assert (setup.lock.read_bytes(), setup.witness.read_bytes()) == before


def test_a_short_write_of_a_note_stops_the_ledger_and_costs_nothing(setup, monkeypatch):
    real = os.pwrite
    with setup.with_steps(2) as ledger:
        monkeypatch.setattr(os, "pwrite", lambda fd, content, at: real(fd, content[:70], at))
        with pytest.raises(LedgerFull, match="70 of 177"):
            setup.commit(ledger, 3)
        monkeypatch.undo()
    assert setup.resume().sealed_belief == b"sealed 3"


def test_an_adoption_whose_note_was_torn_is_repeated(setup):
    setup.with_steps(2).close()
    copy = setup.copy()
    setup.resume(3, 4)
    setup.put(copy)
    with torn(NOTE, 100):
        setup.adopt()
    with pytest.raises(LedgerRolledBack, match=r"ledger\.lock.*adopt"):
        setup.open()
    setup.adopt()
    assert setup.resume().account.remaining_units == 0
