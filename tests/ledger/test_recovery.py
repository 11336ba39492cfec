"""Witness, backup, restore, key rotation: each on the safe side. No path gives budget or an old belief back."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from paclm.errors import (
    LedgerError,
    LedgerFull,
    LedgerRolledBack,
    LedgerStopped,
    LedgerTampered,
    LedgerWrongKey,
    UnsoundState,
    WitnessMissing,
)
from paclm.ledger import ledger as ledger_module
from paclm.ledger import witness as witness_file
from paclm.ledger.events import Usage
from paclm.ledger.recovery import adopt_restored, backup, replace_witness
from paclm.ledger.state import LOST
from paclm.ledger.verify import verify

NEW_KEY = bytes(range(1, 33))


def snapshot(books, name):
    """The ledger's file as a copy by hand has it, after a clean close."""
    copy = books.folder.parent / name
    shutil.copy(books.path, copy)
    return copy


def steps(books, ledger, numbers):
    for n in numbers:
        ledger.commit(books.step(), b"sealed %d" % n)


@pytest.fixture
def rolled_back(books):
    """Three steps, a copy by hand, three more steps, and the copy put back; the witness knows all six."""
    books.with_steps(3, witness=books.witness).close()
    copy = snapshot(books, "old.sqlite")
    with books.open(witness=books.witness) as ledger:
        steps(books, ledger, (4, 5, 6))
        books.account_before = ledger.account
        books.head_before = ledger.head
    books.put_back(copy)
    return books


def test_a_rolled_back_ledger_is_refused_by_its_witness(rolled_back):
    with pytest.raises(LedgerRolledBack, match=r"row 5.*row 8"):
        rolled_back.open(witness=rolled_back.witness)


def test_a_ledger_with_a_witness_never_opens_without(rolled_back):
    with pytest.raises(WitnessMissing, match="PACLM_WITNESS=PATH or --witness PATH"):
        rolled_back.open()
    rolled_back.witness.unlink()
    with pytest.raises(WitnessMissing, match="replace-witness"):
        rolled_back.open(witness=rolled_back.witness)


def test_a_rollback_to_before_the_witness_is_refused_too(books):
    books.with_steps(2).close()
    copy = snapshot(books, "old.sqlite")
    with books.open(witness=books.witness) as ledger:
        steps(books, ledger, (3,))
    books.put_back(copy)
    with pytest.raises(LedgerRolledBack):
        books.open(witness=books.witness)


def test_adopting_with_the_witness_loses_neither_charge_nor_belief(rolled_back):
    books = rolled_back
    event = adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    assert (event.proof, event.last_seq, event.lost_until) == ("witness", 5, 8)
    with books.open(witness=books.witness) as ledger:
        assert ledger.account == books.account_before
        assert ledger.sealed_belief == b"sealed 6"
        assert ledger.head.seq == 9
        assert ledger.state.belief_seq == 8  # what the curator sealed it for
        assert ledger.by_key()[LOST].tokens == 12
        steps(books, ledger, (7,))
    assert verify(books.path, [books.key]).intact


def test_adopting_with_a_witness_that_shows_nothing_is_missing_charges_nothing(books):
    books.with_steps(3, witness=books.witness).close()
    backup(books.path, books.folder / "copy.sqlite")
    books.put_back(books.folder / "copy.sqlite")
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        books.open(witness=books.witness)
    assert adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness).proof == "current"
    with books.open(witness=books.witness) as ledger:
        assert ledger.account.tokens == 12
        steps(books, ledger, (4,))


def test_settings_changed_in_lost_rows_come_back_from_the_witness(books):
    books.with_steps(1, witness=books.witness).close()
    copy = snapshot(books, "old.sqlite")
    with books.open(witness=books.witness) as ledger:
        ledger.extend(2.0**-8, confirmed_by="ada")
        ledger.change_settings(replace(ledger.settings, charge="dissent"))
    books.put_back(copy)
    adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    with books.open(witness=books.witness) as ledger:
        assert (ledger.settings.charge, ledger.account.total_nats) == ("dissent", 2.0**-8)


def test_a_backup_without_a_witness_never_serves_before_it_is_adopted(books):
    with books.with_steps(3) as ledger:
        backup(books.path, books.folder / "copy.sqlite")  # while it is in use
        steps(books, ledger, (4, 5))
    books.put_back(books.folder / "copy.sqlite")
    assert verify(books.path, [books.key]).is_copy
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        books.open()


def test_adopting_without_a_witness_charges_everything_for_good(books):
    with books.with_steps(3) as ledger:
        backup(books.path, books.folder / "copy.sqlite")
        steps(books, ledger, (4, 5))
    books.put_back(books.folder / "copy.sqlite")
    assert adopt_restored(books.path, books.key, confirmed_by="ada").proof == "none"
    with books.open() as ledger:
        assert ledger.account.remaining_units == 0
        assert ledger.by_key()[LOST].units == ledger.account.total_units - 12 * books.price
        with pytest.raises(UnsoundState):
            steps(books, ledger, (6,))
        with pytest.raises(UnsoundState):
            ledger.extend(1.0, confirmed_by="ada")  # the belief is lost: more budget would be spent against a wrong one
        ledger.commit([Usage("alice", public_tokens=3)], None)
    assert verify(books.path, [books.key]).intact


def test_adopting_without_a_witness_counts_a_total_that_the_copy_does_not_know(books):
    books.with_steps(1).close()
    backup(books.path, books.folder / "copy.sqlite")
    with books.open() as ledger:
        ledger.extend(2.0**-6, confirmed_by="ada")
    books.put_back(books.folder / "copy.sqlite")
    adopt_restored(books.path, books.key, confirmed_by="ada", largest_total=2.0**-6)
    with books.open() as ledger:
        assert ledger.account.spent_nats == ledger.account.total_nats == 2.0**-6
        assert ledger.bounds == ledger.bounds_for(2.0**-6)


def test_a_restore_never_gives_budget_back(rolled_back):
    spent = []
    for _ in range(2):
        adopt_restored(rolled_back.path, rolled_back.key, confirmed_by="ada", witness=rolled_back.witness)
        with rolled_back.open(witness=rolled_back.witness) as ledger:
            spent.append(ledger.account.spent_units)
    adopt_restored(rolled_back.path, rolled_back.key, confirmed_by="ada")
    with rolled_back.open() as ledger:
        spent.append(ledger.account.spent_units)
    assert rolled_back.account_before.spent_units == spent[0] == spent[1] < spent[2]


def test_two_histories_of_one_secret_are_refused(books, tmp_path):
    books.with_steps(2, witness=books.witness).close()
    copy, old_witness = snapshot(books, "old.sqlite"), tmp_path / "old.witness"
    shutil.copy(books.witness, old_witness)
    with books.open(witness=books.witness) as ledger:
        steps(books, ledger, (3, 4))
    books.put_back(copy)
    (books.folder / "ledger.lock").unlink()
    with books.open(witness=old_witness) as ledger:  # everything was put back: nobody can know
        ledger.commit(books.step(2), b"other 3")
        ledger.commit(books.step(2), b"other 4")
        ledger.commit(books.step(2), b"other 5")
    with pytest.raises(LedgerRolledBack, match="Row 6"):
        books.open(witness=books.witness)


def test_a_crash_between_commit_and_witness_leaves_the_ledger_one_ahead(books, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    ledger = books.with_steps(2, witness=books.witness)
    monkeypatch.setattr(witness_file.Witness, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        steps(books, ledger, (3,))
    with pytest.raises(LedgerStopped):
        steps(books, ledger, (4,))
    ledger.close()
    monkeypatch.undo()
    for n in (4, 5):
        with books.open(witness=books.witness) as ledger:  # the witness catches up
            assert ledger.sealed_belief == b"sealed %d" % (n - 1)
            steps(books, ledger, (n,))


def test_a_witness_that_was_put_back_is_refused(books, tmp_path):
    books.with_steps(1, witness=books.witness).close()
    shutil.copy(books.witness, tmp_path / "old.witness")
    with books.open(witness=books.witness) as ledger:
        steps(books, ledger, (2, 3))
    with pytest.raises(LedgerRolledBack, match="2 rows"):
        books.open(witness=tmp_path / "old.witness")


@pytest.mark.parametrize("at", [0, 20, 300, 1000])
def test_a_torn_write_spoils_one_slot_and_the_other_serves(books, at):
    books.with_steps(4, witness=books.witness).close()
    with books.witness.open("r+b") as file:
        content = file.read()
        half = len(content) // 2
        newest = max((0, half), key=lambda start: int(content[start:].split(b'"seq":')[1].split(b",")[0]))
        file.seek(newest + at)
        file.write(bytes(40))
    with books.open(witness=books.witness) as ledger:
        assert ledger.account.tokens == 16
        steps(books, ledger, (5,))
    books.open(witness=books.witness).close()


def test_a_witness_with_both_slots_spoiled_is_refused(books):
    books.with_steps(4, witness=books.witness).close()
    books.witness.write_bytes(bytes(books.witness.stat().st_size))
    with pytest.raises(LedgerTampered, match="both slots"):
        books.open(witness=books.witness)


def test_a_forged_witness_is_refused(books, tmp_path):
    books.with_steps(4, witness=books.witness).close()
    content = bytearray(books.witness.read_bytes())
    half = len(content) // 2
    for start in (0, half):  # another digest and a fresh checksum, but no key
        payload, mac = witness_file._unpack(bytes(content[start : start + half]))
        packed = witness_file._pack(payload.replace(b'"tokens":', b'"tokens":9'), mac)
        content[start : start + len(packed)] = packed
    books.witness.write_bytes(content)
    with pytest.raises(LedgerTampered, match="MAC"):
        books.open(witness=books.witness)


@pytest.mark.parametrize("has_other_key", [False, True])
def test_the_witness_of_another_ledger_is_refused(books, tmp_path, has_other_key):
    (tmp_path / "other").mkdir()
    other = type(books)(tmp_path / "other")
    with other.with_steps(1, witness=other.witness) as ledger:
        if has_other_key:
            ledger.rotate_key(NEW_KEY)
    books.with_steps(1).close()
    with pytest.raises(WitnessMissing, match="PACLM_WITNESS=PATH or --witness"):
        books.open(witness=other.witness)
    with pytest.raises(WitnessMissing):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=other.witness)


def test_a_witness_that_was_replaced_is_refused(books, tmp_path):
    books.with_steps(2, witness=books.witness).close()
    replace_witness(books.path, books.key, confirmed_by="ada", witness=tmp_path / "new.witness")
    with pytest.raises(WitnessMissing, match="on record"):
        books.open(witness=books.witness)
    books.open(witness=tmp_path / "new.witness").close()


def test_a_belief_that_outgrows_the_witness_stops_the_ledger(books):
    with books.with_steps(1, witness=books.witness) as ledger:
        with pytest.raises(LedgerFull, match="65536 bytes"):
            ledger.commit(books.step(), bytes(60_000))
        with pytest.raises(LedgerStopped):
            ledger.commit(books.step(), b"small")


def test_a_lost_witness_is_replaced_on_the_operators_word(books, tmp_path):
    books.with_steps(2, witness=books.witness).close()
    books.witness.unlink()
    with pytest.raises(WitnessMissing):
        books.open(witness=books.witness)
    replace_witness(books.path, books.key, confirmed_by="ada", witness=tmp_path / "new.witness")
    with books.open(witness=tmp_path / "new.witness") as ledger:
        steps(books, ledger, (3,))
    replace_witness(books.path, books.key, confirmed_by="ada", witness=None)
    books.open().close()
    assert verify(books.path, [books.key]).intact


def test_a_witness_that_exists_is_asked_and_not_replaced(rolled_back):
    with pytest.raises(LedgerRolledBack, match=r"elsewhere\.witness"):
        replace_witness(rolled_back.path, rolled_back.key, confirmed_by="ada", witness=rolled_back.witness)


def test_a_backup_never_overwrites_another(books):
    books.create().close()
    (books.folder / "copy.sqlite").touch()
    with pytest.raises(LedgerError, match=r"copy\.sqlite"):
        backup(books.path, books.folder / "copy.sqlite")


def test_rotation_signs_new_rows_with_the_new_key_and_stores_the_belief_sealed_anew(books):
    with books.with_steps(2, witness=books.witness) as ledger:
        ledger.rotate_key(NEW_KEY, b"sealed 2 under the new key")
        steps(books, ledger, (3,))
    with books.open(mac_key=NEW_KEY, old_keys=[books.key], witness=books.witness) as ledger:
        assert ledger.sealed_belief == b"sealed 3"
    assert verify(books.path, [NEW_KEY, books.key]).intact
    with books.open(mac_key=NEW_KEY, witness=books.witness, in_full=False, old_keys=[books.key]) as ledger:
        steps(books, ledger, (4,))


def test_after_a_rotation_the_old_key_alone_opens_nothing(books):
    with books.with_steps(2) as ledger:
        ledger.rotate_key(NEW_KEY)
    with pytest.raises(LedgerWrongKey):
        books.open()
    with pytest.raises(LedgerError, match="old key"):
        books.open(mac_key=books.key, old_keys=[NEW_KEY])
    with pytest.raises(LedgerWrongKey):
        books.open(mac_key=NEW_KEY)


def test_a_new_key_that_the_old_one_does_not_vouch_for_is_found(books, monkeypatch):
    monkeypatch.setattr(ledger_module, "endorse", lambda *_: "00" * 32)
    with books.with_steps(2) as ledger:
        ledger.rotate_key(NEW_KEY)
    report = verify(books.path, [NEW_KEY, books.key])
    assert (report.intact, report.bad_seq) == (False, 4)


def test_rotating_to_the_same_key_is_refused(books):
    with books.create() as ledger, pytest.raises(LedgerError):
        ledger.rotate_key(books.key)


def test_a_testimony_that_would_give_budget_back_is_refused(rolled_back, monkeypatch):
    """No honest witness says so; one that does is not believed, whatever its MAC."""
    books, read = rolled_back, witness_file.Witness.read

    def generous(self, ledger):
        testimony = read(self, ledger)
        return replace(testimony, state={**testimony.state, "spent_units": 0})

    monkeypatch.setattr(witness_file.Witness, "read", generous)
    with pytest.raises(LedgerTampered, match="spend"):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
