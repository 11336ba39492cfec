"""The witness as a file: one process holds it, one key signs it, and it notices what others write."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import replace

import pytest

from paclm.errors import LedgerBusy, LedgerRolledBack, LedgerStopped, LedgerTampered, LedgerUnwritable
from paclm.ledger import witness as witness_file
from paclm.ledger.events import LedgerKeys
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import adopt_restored
from paclm.ledger.witness import Witness

NEW_KEY = bytes(range(1, 33))


@pytest.fixture
def second(books, tmp_path):
    """The path of a ledger in a copied workspace; both copies name the same witness."""
    books.with_steps(2, witness=books.witness).close()
    shutil.copytree(books.folder, tmp_path / "second")
    return tmp_path / "second" / "ledger.sqlite"


def without_locks(monkeypatch):
    """As on a file system whose locks hold nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def rewritten(payloads, books):
    """Put these payloads into the slots, with correct checksums and no key."""
    size = books.witness.stat().st_size // 2
    slots = [witness_file._pack(payload, bytes(32)) for payload in payloads]
    books.witness.write_bytes(b"".join(slot.ljust(size, b"\0") for slot in slots))


def test_a_copied_workspace_does_not_serve_beside_the_first(books, second):
    with books.open(witness=books.witness):
        with pytest.raises(LedgerBusy, match="witness"):
            Ledger.open(second, books.key, witness=books.witness)
        with pytest.raises(LedgerBusy):
            adopt_restored(second, books.key, confirmed_by="ada", witness=books.witness)
    Ledger.open(second, books.key, witness=books.witness).close()  # one after the other, with nothing in between


def test_a_new_witness_is_held_from_its_first_moment(books):
    with books.create(witness=books.witness), pytest.raises(LedgerBusy):
        Witness(books.witness, LedgerKeys(books.key))


def test_a_refused_opening_lets_the_witness_go(books, second):
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 3")
    for _ in range(2):
        with pytest.raises(LedgerRolledBack):
            Ledger.open(second, books.key, witness=books.witness)
    books.open(witness=books.witness).close()


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_second_copy_that_wrote_the_witness_stops_the_first(books, second, monkeypatch, commits):
    without_locks(monkeypatch)
    ledger, other = books.open(witness=books.witness), Ledger.open(second, books.key, witness=books.witness)
    for n in range(commits):
        other.commit(books.step(), b"other %d" % n)
    with pytest.raises(LedgerRolledBack, match=r"elsewhere\.witness"):
        ledger.commit(books.step(), b"sealed 3")
    with pytest.raises(LedgerStopped):
        ledger.commit(books.step(), b"sealed 4")
    ledger.close()
    other.close()


def test_a_witness_that_cannot_be_locked_is_refused(books, monkeypatch):
    books.create(witness=books.witness).close()

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(LedgerUnwritable, match=r"elsewhere\.witness"):
        Witness(books.witness, LedgerKeys(books.key))


def forge(books, ledger, key):
    """A witness that says what this ledger says, made by someone who knows that key alone."""
    told = ledger.testimony(ledger.state.witness)
    ledger.close()
    books.witness.unlink()
    Witness.create(books.witness, LedgerKeys(key), replace(told, key=LedgerKeys(key).current)).close()


def test_a_key_that_was_replaced_forges_no_witness(books):
    ledger = books.with_steps(2, witness=books.witness)
    ledger.rotate_key(NEW_KEY)
    ledger.commit(books.step(), b"sealed 3")
    forge(books, ledger, books.key)
    with pytest.raises(LedgerTampered, match="key"):
        books.open(mac_key=NEW_KEY, old_keys=[books.key], witness=books.witness)
    with pytest.raises(LedgerTampered, match="key"):
        adopt_restored(books.path, NEW_KEY, old_keys=[books.key], confirmed_by="ada", witness=books.witness)


def test_a_replaced_key_forges_no_witness_of_the_very_row_that_replaced_it(books):
    ledger = books.with_steps(2, witness=books.witness)
    ledger.rotate_key(NEW_KEY)
    forge(books, ledger, books.key)
    with pytest.raises(LedgerTampered, match="key"):
        books.open(mac_key=NEW_KEY, old_keys=[books.key], witness=books.witness)


def test_a_crash_between_a_rotation_and_its_witness_is_made_good(books, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    ledger = books.with_steps(2, witness=books.witness)
    monkeypatch.setattr(Witness, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        ledger.rotate_key(NEW_KEY)
    ledger.close()
    monkeypatch.undo()
    for n in (3, 4):  # the second time the witness is signed with the new key
        with books.open(mac_key=NEW_KEY, old_keys=[books.key], witness=books.witness) as ledger:
            assert ledger.sealed_belief == b"sealed %d" % (n - 1)
            ledger.commit(books.step(), b"sealed %d" % n)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rotation_cut_short_at_either_slot_leaves_no_old_belief_once_the_ledger_was_opened(
    books, monkeypatch, failing
):
    write, count = Witness.write, 0

    def fail(self, testimony):
        nonlocal count
        count += 1
        if count == failing:
            raise LedgerUnwritable("The witness's disk is gone.")
        write(self, testimony)

    ledger = books.with_steps(2, witness=books.witness)
    monkeypatch.setattr(Witness, "write", fail)
    with pytest.raises(LedgerUnwritable):
        ledger.rotate_key(NEW_KEY, b"sealed anew")
    ledger.close()
    monkeypatch.undo()
    assert b"sealed 2".hex().encode() in books.witness.read_bytes()
    with books.open(mac_key=NEW_KEY, old_keys=[books.key], witness=books.witness) as ledger:
        held = books.witness.read_bytes()
        ledger.commit(books.step(), b"sealed 3")
    assert held.count(b"sealed anew".hex().encode()) == 2
    assert not any((b"sealed %d" % n).hex().encode() in held for n in (1, 2))


def test_an_opening_leaves_a_witness_alone_that_tells_all(books):
    books.with_steps(2, witness=books.witness).close()
    before = books.witness.read_bytes()
    books.open(witness=books.witness).close()
    assert books.witness.read_bytes() == before


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b'{"seq":"x"}', b"\xff", b"null"])
def test_a_testimony_that_cannot_be_read_is_refused(books, payload):
    books.with_steps(1, witness=books.witness).close()
    rewritten([payload, payload], books)
    with pytest.raises(LedgerTampered):
        books.open(witness=books.witness)
