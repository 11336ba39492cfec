"""Backup, restore and lost witnesses: each on the safe side. Nothing restores budget or an old belief."""

from dataclasses import replace

import pytest

from ledger.witnesses import BOTH_WITNESSES, IN_A_WITNESS_FILE, shown
from paclm.errors import (
    LedgerError,
    LedgerFull,
    LedgerRolledBack,
    LedgerStopped,
    LedgerTampered,
    UnsoundState,
    WitnessMissing,
)
from paclm.ledger.events import Usage
from paclm.ledger.state import LOST

pytestmark = BOTH_WITNESSES


@pytest.fixture
def rolled_back(setup):
    """Three steps, a copy by hand, three more steps, and a rollback to the copy; the witness records all six."""
    setup.with_steps(3, witness=setup.witness).close()
    copy = setup.copy()
    setup.account_before = setup.resume(4, 5, 6, witness=setup.witness).account
    setup.put(copy)
    return setup


def test_a_rolled_back_ledger_is_refused_by_its_witness_and_never_opens_without(rolled_back):
    with pytest.raises(LedgerRolledBack, match=r"row 5.*row 8"):
        rolled_back.open(witness=rolled_back.witness)
    with pytest.raises(WitnessMissing, match="PACLM_WITNESS=PATH or --witness PATH"):
        rolled_back.open()
    rolled_back.witnesses.remove(rolled_back.witness)
    with pytest.raises(WitnessMissing, match="replace-witness"):
        rolled_back.open(witness=rolled_back.witness)


def test_a_rollback_to_before_the_witness_is_refused_too(setup):
    setup.with_steps(2).close()
    copy = setup.copy()
    setup.resume(3, witness=setup.witness)
    setup.put(copy)
    with pytest.raises(LedgerRolledBack):
        setup.open(witness=setup.witness)


def test_adopting_with_the_witness_loses_neither_charge_nor_belief(rolled_back):
    setup = rolled_back
    event = setup.adopt(witness=setup.witness)
    assert (event.proof, event.last_seq, event.lost_until) == ("witness", 5, 8)
    with setup.open(witness=setup.witness) as ledger:
        assert ledger.account == setup.account_before
        assert ledger.sealed_belief == b"sealed 6"
        assert ledger.head.seq == 9
        assert ledger.state.belief_seq == 8  # the row that the curator sealed it for
        assert ledger.by_key()[LOST].tokens == 12
        setup.commit(ledger, 7)
    assert setup.verify([setup.key]).intact


@pytest.mark.parametrize("is_rotated", [False, True])
def test_adopting_a_backup_that_lacks_nothing_charges_nothing(setup, is_rotated):
    with setup.with_steps(3, witness=setup.witness) as ledger:
        if is_rotated:
            ledger.rotate_key(setup.new_key, b"new seal")
    keys = {"witness": setup.witness} | (setup.new_keys if is_rotated else {})
    setup.back_up()
    setup.put(setup.backup)
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        setup.open(**keys)
    assert setup.adopt(**keys).proof == "current"
    assert setup.resume(**keys).account.tokens == 12
    setup.resume(4, **keys)


def test_settings_changed_in_lost_rows_are_restored_from_the_witness(setup):
    setup.with_steps(1, witness=setup.witness).close()
    copy = setup.copy()
    with setup.open(witness=setup.witness) as ledger:
        ledger.extend(2.0**-8, confirmed_by="ada")
        ledger.change_settings(replace(ledger.settings, charge="dissent"))
    setup.put(copy)
    setup.adopt(witness=setup.witness)
    ledger = setup.resume(witness=setup.witness)
    assert (ledger.settings.charge, ledger.account.total_nats) == ("dissent", 2.0**-8)


@IN_A_WITNESS_FILE
def test_adopting_a_copy_with_a_lowered_total_charges_what_it_may_have_been_raised_to(setup):
    with setup.with_steps(1) as ledger:
        ledger.change_settings(replace(setup.settings, total=setup.settings.total / 4))
        setup.back_up()
        ledger.change_settings(setup.settings)
        setup.commit(ledger, *range(2, 8))
    setup.put(setup.backup)
    setup.adopt(largest_total=setup.settings.total / 4)  # paclm.toml as it was at the time of the copy
    with setup.open() as ledger:
        assert ledger.account.spent_nats == ledger.account.total_nats == setup.settings.total
        with pytest.raises(UnsoundState):
            setup.commit(ledger, 8)
    assert setup.verify([setup.key]).intact


@IN_A_WITNESS_FILE
def test_adopting_without_a_witness_charges_everything_for_good(setup):
    with setup.with_steps(3) as ledger:
        setup.back_up()  # while it is in use
        setup.commit(ledger, 4, 5)
    setup.put(setup.backup)
    assert setup.verify([setup.key]).is_copy
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        setup.open()
    assert setup.adopt().proof == "none"
    with setup.open() as ledger:
        assert ledger.account.remaining_units == 0
        assert ledger.by_key()[LOST].units == ledger.account.total_units - 12 * setup.price
        with pytest.raises(UnsoundState):
            setup.commit(ledger, 6)
        with pytest.raises(UnsoundState):  # the belief is lost: more budget would be spent against a wrong one
            ledger.extend(1.0, confirmed_by="ada")
        ledger.commit([Usage("alice", public_tokens=3)], None)
    assert setup.verify([setup.key]).intact


@IN_A_WITNESS_FILE
def test_adopting_without_a_witness_counts_a_total_that_the_copy_lacks(setup):
    setup.with_steps(1).close()
    setup.back_up()
    with setup.open() as ledger:
        ledger.extend(2.0**-6, confirmed_by="ada")
    setup.put(setup.backup)
    setup.adopt(largest_total=2.0**-6)
    ledger = setup.resume()
    assert ledger.account.spent_nats == ledger.account.total_nats == 2.0**-6
    assert ledger.bounds == ledger.bounds_for(2.0**-6)


def test_a_restore_never_lowers_the_spend(rolled_back):
    spent = []
    for witness in (rolled_back.witness, rolled_back.witness, None):
        rolled_back.adopt(witness=witness)
        spent.append(rolled_back.resume(witness=witness).account.spent_units)
    assert rolled_back.account_before.spent_units == spent[0] == spent[1] < spent[2]


def test_a_testimony_with_a_lower_spend_is_refused(rolled_back, monkeypatch):
    """No honest witness records one; it is refused whatever its MAC."""
    kind = rolled_back.witnesses.kind
    read = kind.read

    def generous(self, ledger):
        testimony = read(self, ledger)
        return replace(testimony, state={**testimony.state, "spent_units": 0})

    monkeypatch.setattr(kind, "read", generous)
    with pytest.raises(LedgerTampered, match="spend"):
        rolled_back.adopt(witness=rolled_back.witness)


def test_two_histories_of_one_secret_are_refused(setup):
    setup.with_steps(2, witness=setup.witness).close()
    copy, old_witness = setup.copy(), setup.witnesses.copy(setup.witness)
    setup.resume(3, 4, witness=setup.witness)
    setup.put(copy)
    setup.lock.unlink()
    with setup.open(witness=old_witness) as ledger:  # everything was rolled back: this cannot be noticed
        for n in range(3):
            ledger.commit(setup.step(2), b"other %d" % n)
    with pytest.raises(LedgerRolledBack, match="Row 6"):
        setup.open(witness=setup.witness)


def test_a_crash_between_commit_and_witness_leaves_the_ledger_one_ahead(setup, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    ledger = setup.with_steps(2, witness=setup.witness)
    monkeypatch.setattr(setup.witnesses.kind, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        setup.commit(ledger, 3)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 4)
    ledger.close()
    monkeypatch.undo()
    for n in (4, 5):
        with setup.open(witness=setup.witness) as ledger:  # the witness catches up
            assert ledger.sealed_belief == b"sealed %d" % (n - 1)
            setup.commit(ledger, n)


def test_a_witness_that_was_rolled_back_is_refused(setup):
    setup.with_steps(1, witness=setup.witness).close()
    old_witness = setup.witnesses.copy(setup.witness)
    setup.resume(2, 3, witness=setup.witness)
    with pytest.raises(LedgerRolledBack, match="2 rows"):
        setup.open(witness=old_witness)


@IN_A_WITNESS_FILE
@pytest.mark.parametrize("has_other_key", [False, True])
def test_the_witness_of_another_ledger_is_refused(setup, tmp_path, has_other_key):
    (tmp_path / "other").mkdir()
    other = setup.another(tmp_path / "other")
    with other.with_steps(1, witness=other.witness) as ledger:
        if has_other_key:
            ledger.rotate_key(setup.new_key)
    setup.with_steps(1).close()
    with pytest.raises(WitnessMissing, match="PACLM_WITNESS=PATH or --witness"):
        setup.open(witness=other.witness)
    with pytest.raises(WitnessMissing):
        setup.adopt(witness=other.witness)


@IN_A_WITNESS_FILE
def test_a_belief_that_outgrows_the_witness_stops_the_ledger(setup):
    with setup.with_steps(1, witness=setup.witness) as ledger:
        with pytest.raises(LedgerFull, match="65536 bytes"):
            ledger.commit(setup.step(), bytes(60_000))
        with pytest.raises(LedgerStopped):
            setup.commit(ledger, 2)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_witness_is_replaced_on_the_operators_word(setup, is_lost):
    setup.with_steps(2, witness=setup.witness).close()
    if is_lost:
        setup.witnesses.remove(setup.witness)
    new = setup.witnesses.new("new.witness")
    setup.replace_witness(new)
    with pytest.raises(WitnessMissing):
        setup.open(witness=setup.witness)
    setup.resume(3, witness=new)
    setup.replace_witness(None)
    setup.open().close()
    assert setup.verify([setup.key]).intact


def test_an_existing_witness_and_an_existing_backup_are_never_overwritten(setup):
    setup.with_steps(1, witness=setup.witness).close()
    with pytest.raises(LedgerRolledBack, match=shown(setup.witness)):
        setup.replace_witness(setup.witness)
    setup.resume(2, witness=setup.witness)
    setup.backup.touch()
    with pytest.raises(LedgerError, match=r"copy\.sqlite"):
        setup.back_up()
