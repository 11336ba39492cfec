"""Key rotation: plain, interrupted, and in a backup from before."""

import pytest

from paclm.errors import LedgerError, LedgerRolledBack, LedgerStopped, LedgerWrongKey
from paclm.ledger import ledger as ledger_module
from paclm.ledger.events import key_name
from paclm.ledger.file_witness import FileWitness

KEYS = [bytes(range(n, n + 32)) for n in (2, 1)]
"""The newest first, without the one that the ledger was made with."""


def crash(*_):
    raise KeyboardInterrupt


def assert_nothing_is_lost(setup, keys, steps):
    with setup.open(**keys) as ledger:
        assert ledger.account == setup.before
        assert ledger.sealed_belief == b"sealed %d" % (2 + steps)
        ledger.commit(setup.step(), b"later")
    report = setup.verify(setup.keys)
    assert report.intact, report.problem


def test_rotation_signs_new_rows_with_the_new_key_and_stores_the_belief_under_its_new_seal(setup):
    keys = setup.new_keys | {"witness": setup.witness}
    with setup.with_steps(2, witness=setup.witness) as ledger:
        ledger.rotate_key(setup.new_key, b"sealed 2 under the new key")
        with pytest.raises(LedgerError):
            ledger.rotate_key(setup.new_key)
    for n in (3, 4):
        with setup.open(**keys) as ledger:
            assert ledger.sealed_belief == (b"sealed 2 under the new key" if n == 3 else b"sealed 3")
            setup.commit(ledger, n)
    assert setup.verify([setup.new_key, setup.key]).intact


def test_after_a_rotation_the_old_key_alone_opens_nothing(setup):
    with setup.with_steps(2) as ledger:
        ledger.rotate_key(setup.new_key)
    with pytest.raises(LedgerWrongKey):
        setup.open()
    with pytest.raises(LedgerError, match="old key"):
        setup.open(mac_key=setup.key, old_keys=[setup.new_key])
    with pytest.raises(LedgerWrongKey):
        setup.open(mac_key=setup.new_key)


@pytest.mark.parametrize("key", ["key", "new_key"])
def test_one_key_of_a_rotation_alone_gives_no_verdict_and_names_the_other(setup, key):
    with setup.with_steps(2) as ledger:
        ledger.rotate_key(setup.new_key)
        setup.commit(ledger, 3)
    missing = key_name(setup.key if key == "new_key" else setup.new_key)
    with pytest.raises(LedgerWrongKey, match=f"not checked.*signed with the key {missing}"):
        setup.verify([getattr(setup, key)])


def test_rows_of_a_key_that_nothing_ties_to_the_one_given_are_forged(setup, monkeypatch):
    """Not a missing key: a thief of the ledger must not turn an alarm into a question about keys."""
    monkeypatch.setattr(ledger_module, "endorse", lambda *_: "00" * 32)
    with setup.with_steps(2) as ledger:
        ledger.rotate_key(setup.new_key)
    assert not setup.verify([setup.key]).intact


def test_a_new_key_that_the_old_one_did_not_endorse_is_found(setup, monkeypatch):
    monkeypatch.setattr(ledger_module, "endorse", lambda *_: "00" * 32)
    with setup.with_steps(2) as ledger:
        ledger.rotate_key(setup.new_key)
    report = setup.verify([setup.new_key, setup.key])
    assert (report.intact, report.bad_seq) == (False, 4)


@pytest.fixture(params=[1, 2], ids=["one rotation", "two rotations"])
def rotated(setup, request):
    """A function: a backup of two steps, then rotations and more steps, and a rollback to the backup."""

    def make(*, with_witness, steps=1, by_hand=False):
        witness = setup.witness if with_witness else None
        setup.with_steps(2, witness=witness).close()
        copy = setup.copy() if by_hand else setup.backup
        if not by_hand:
            setup.back_up()
        setup.keys = [*KEYS[-request.param :], setup.key]
        with setup.open(witness=witness) as ledger:
            for key in reversed(setup.keys[:-1]):
                ledger.rotate_key(key)
            setup.commit(ledger, *range(3, steps + 3))
            setup.before = ledger.account
        setup.put(copy)
        return {"mac_key": setup.keys[0], "old_keys": setup.keys[1:], "witness": witness}

    return make


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_backup_from_before_a_rotation_is_adopted_with_the_witness(setup, rotated, steps):
    keys = rotated(with_witness=True, steps=steps)
    assert setup.adopt(**keys).proof == "witness"
    assert_nothing_is_lost(setup, keys, steps)


def test_a_backup_from_before_a_rotation_is_adopted_without_a_witness(setup, rotated):
    keys = rotated(with_witness=False)
    with pytest.raises(LedgerWrongKey):  # without the key that signed it
        setup.adopt(mac_key=keys["mac_key"])
    assert setup.adopt(**keys).proof == "none"
    assert setup.resume(**keys).account.remaining_units == 0
    report = setup.verify(setup.keys)
    assert report.intact, report.problem


def crash_before_restoring(monkeypatch):
    """As if the process died right before the last row of an adoption."""
    append = ledger_module.Ledger.append
    monkeypatch.setattr(
        ledger_module.Ledger,
        "append",
        lambda self, event, *rest, **more: crash() if event.kind == "restored" else append(self, event, *rest, **more),
    )


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_crash_in_the_middle_of_adopting_leaves_a_copy(setup, rotated, monkeypatch, by_hand):
    """Also for a copy by hand, which had no mark before: the lock's note must not be all there is."""
    keys = rotated(with_witness=False, by_hand=by_hand)
    crash_before_restoring(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        setup.adopt(**keys)
    monkeypatch.undo()
    with pytest.raises(LedgerRolledBack, match="paclm ledger adopt"):
        setup.open(**keys)
    setup.adopt(**keys)
    assert setup.resume(**keys).account.remaining_units == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_adopting_with_the_witness_is_repeated_after_a_crash_and_loses_nothing(setup, rotated, monkeypatch, steps):
    """Without a step the witness has seen as many rows as the copy then has, with another one in the last place."""
    keys = rotated(with_witness=True, steps=steps)
    crash_before_restoring(monkeypatch)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            setup.adopt(**keys)
    monkeypatch.undo()
    assert setup.adopt(**keys).proof == "witness"
    assert_nothing_is_lost(setup, keys, steps)


def test_a_crash_between_the_restore_and_its_witness_is_repaired_by_adopting_again(setup, monkeypatch):
    before = setup.lose_steps(1)
    monkeypatch.setattr(FileWitness, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        setup.adopt(witness=setup.witness)
    monkeypatch.undo()
    half = setup.copy("half.sqlite")
    for start in (half, setup.backup):
        setup.put(start)
        assert setup.adopt(witness=setup.witness).proof == "witness"
        ledger = setup.resume(witness=setup.witness)
        assert (ledger.account, ledger.sealed_belief) == (before, b"sealed 3")
        assert setup.verify([setup.key]).intact


@pytest.mark.parametrize("place", ["make_row", "endorse"])
def test_an_interrupted_rotation_leaves_the_old_key_signing(setup, monkeypatch, place):
    with setup.with_steps(1) as ledger:
        monkeypatch.setattr(ledger_module, place, crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.rotate_key(setup.new_key)
        monkeypatch.undo()
        setup.commit(ledger, 2)
    assert setup.verify([setup.key]).intact
    setup.open().close()


def test_an_interrupt_after_the_rotation_was_written_stops_the_ledger(setup, monkeypatch):
    with setup.with_steps(1) as ledger:
        monkeypatch.setattr(ledger_module.Ledger, "_use_keys", crash)
        with pytest.raises(KeyboardInterrupt):
            ledger.rotate_key(setup.new_key)
        monkeypatch.undo()
        with pytest.raises(LedgerStopped):
            setup.commit(ledger, 2)
    setup.resume(2, **setup.new_keys)
    assert setup.verify([setup.new_key, setup.key]).intact
