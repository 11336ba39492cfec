"""Slots of a witness that a crash tore or that were damaged later: no row is hidden this way."""

import pytest

from ledger.tearing import SLOT, Crash, torn, torn_commit
from paclm.errors import LedgerError, LedgerRolledBack, LedgerTampered
from paclm.ledger import file_witness
from paclm.ledger.file_witness import FileWitness

LENGTHS = [0, 1, 16, 20, 100, 600, 5000]


@pytest.mark.parametrize("keep", LENGTHS)
def test_a_torn_testimony_is_repaired(setup, keep):
    torn_commit(setup, SLOT, keep, witness=setup.witness)
    for n in (3, 4, 5):
        with setup.open(witness=setup.witness) as ledger:
            assert ledger.sealed_belief == b"sealed %d" % n
            setup.commit(ledger, n + 1)


@pytest.mark.parametrize("keep", [60, 100, 600])
@pytest.mark.parametrize("has_lock", [True, False], ids=["with the lock", "without the lock"])
def test_a_torn_testimony_does_not_pass_a_ledger_without_its_row(setup, keep, has_lock):
    """One slot is whole, and the ledger was rolled back to its row: the row of the torn slot is missing."""
    setup.put(torn_commit(setup, SLOT, keep, witness=setup.witness))
    if not has_lock:
        setup.lock.unlink()
    for attempt in (setup.open, setup.adopt):
        with pytest.raises(LedgerRolledBack):
            attempt(witness=setup.witness)
    setup.adopt()
    with setup.open() as ledger:
        assert ledger.account.remaining_units == 0


def test_a_ledger_one_row_ahead_of_a_torn_testimony_is_adopted_as_current(setup):
    torn_commit(setup, SLOT, 300, witness=setup.witness)
    assert setup.adopt(witness=setup.witness).proof == "current"
    assert setup.resume(witness=setup.witness).sealed_belief == b"sealed 3"


def damage(setup, number):
    size = setup.witness.stat().st_size // 2
    with setup.witness.open("r+b") as file:
        file.seek(number * size + 30)
        file.write(b"damaged!")


def newest_slot(setup):
    content = setup.witness.read_bytes()
    half = len(content) // 2
    return max((0, 1), key=lambda n: int(content[n * half :].split(b'"seq":')[1].split(b",")[0]))


@pytest.mark.parametrize("is_newest", [True, False])
def test_a_slot_that_was_damaged_later_is_refused_where_it_could_hide_a_row(setup, is_newest, tmp_path):
    setup.with_steps(3, witness=setup.witness).close()
    newest = newest_slot(setup)
    damage(setup, newest if is_newest else 1 - newest)
    if is_newest:  # the ledger is a row ahead of the other: nothing can be missing
        setup.open(witness=setup.witness).close()
        return
    with pytest.raises(LedgerRolledBack, match=r"slots.*replace-witness"):
        setup.open(witness=setup.witness)
    setup.replace_witness(tmp_path / "new.witness")
    setup.open(witness=tmp_path / "new.witness").close()


def test_a_backup_is_not_adopted_by_a_witness_whose_newest_slot_is_damaged(setup):
    """It would lack the charge and the belief of that slot's row."""
    setup.lose_steps(2)
    setup.lock.unlink()
    damage(setup, newest_slot(setup))
    with pytest.raises(LedgerRolledBack, match="slots"):
        setup.adopt(witness=setup.witness)


@pytest.mark.parametrize("keep", LENGTHS)
def test_an_adoption_whose_testimony_was_torn_is_finished_by_another(setup, keep):
    account = setup.lose_steps(2)
    for _ in range(2):
        with torn(SLOT, keep):
            setup.adopt(witness=setup.witness)
    setup.adopt(witness=setup.witness)
    ledger = setup.resume(witness=setup.witness)
    assert (ledger.account, ledger.sealed_belief) == (account, b"sealed 4")


def test_half_an_adoption_is_not_finished_with_a_witness_that_has_seen_more(setup):
    setup.lose_steps(1)
    with torn(SLOT, 0):
        setup.adopt(witness=setup.witness)
    half = setup.copy("half.sqlite")
    setup.put(setup.newest)
    setup.resume(4, witness=setup.witness)
    setup.put(half)
    with pytest.raises(LedgerRolledBack):
        setup.adopt(witness=setup.witness)


@pytest.mark.parametrize("how", ["twice", "older", "made up"])
def test_slots_that_do_not_follow_one_another_are_refused(setup, how):
    setup.with_steps(2, witness=setup.witness).close()
    old = setup.witness.read_bytes()
    setup.resume(3, 4, 5, witness=setup.witness)
    content, newest = bytearray(setup.witness.read_bytes()), newest_slot(setup)
    size = len(content) // 2
    other = slice((1 - newest) * size, (2 - newest) * size)
    if how == "twice":
        content[other] = content[newest * size : (newest + 1) * size]
    elif how == "older":
        content[other] = old[other]
    else:
        payload, _ = file_witness._unpack(bytes(content[other]))
        content[other] = file_witness._pack(payload, bytes(32)).ljust(size, b"\0")
    setup.witness.write_bytes(content)
    with pytest.raises(LedgerTampered, match="two slots"):
        setup.open(witness=setup.witness)


RESEALING = {
    "a rotation": lambda ledger, key: ledger.rotate_key(key, b"new seal"),
    "a reseal": lambda ledger, key: ledger.reseal(b"new seal"),
}


@pytest.mark.parametrize("keep", [0, 100, 600])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("what", RESEALING)
def test_a_new_seal_reaches_both_slots_wherever_a_crash_came(setup, what, count, keep):
    ledger = setup.with_steps(2, witness=setup.witness)
    with torn(SLOT, keep, count):
        RESEALING[what](ledger, setup.new_key)
    ledger.close()
    keys = setup.new_keys if what == "a rotation" else {}
    with torn(SLOT, keep):  # and again while the next opening repairs it
        setup.open(witness=setup.witness, **keys)
    assert setup.resume(witness=setup.witness, **keys).sealed_belief == b"new seal"
    held = setup.witness.read_bytes()
    assert held.count(b"new seal".hex().encode()) == 2
    assert not any((b"sealed %d" % n).hex().encode() in held for n in (1, 2))
    setup.open(witness=setup.witness, **keys).close()
    assert setup.witness.read_bytes() == held
    for n in (3, 4):
        setup.resume(n, witness=setup.witness, **keys)


def test_after_a_reseal_a_torn_slot_hides_no_row_either(setup):
    with setup.with_steps(2, witness=setup.witness) as ledger:
        ledger.reseal(b"new seal")
    copy = setup.copy()
    with setup.open(witness=setup.witness) as ledger, torn(SLOT, 300):
        setup.commit(ledger, 3)
    setup.put(copy)
    setup.lock.unlink()
    with pytest.raises(LedgerRolledBack, match="slots"):
        setup.open(witness=setup.witness)


def test_a_witness_with_one_write_of_a_new_ledger_is_no_torn_one(setup, monkeypatch):
    """Killed right after the witness was made, before it was on record."""
    setup.create().close()
    create = FileWitness.create

    def create_and_die(*arguments):
        create(*arguments).close()
        raise Crash

    monkeypatch.setattr(FileWitness, "create", create_and_die)
    with pytest.raises(Crash):
        setup.open(witness=setup.witness)
    monkeypatch.undo()
    for _ in range(2):
        assert setup.resume(witness=setup.witness).state.witness is not None


def test_a_witness_that_was_cut_off_or_whose_newest_slot_was_emptied_hides_no_row(setup):
    setup.with_steps(2, witness=setup.witness).close()
    copy = setup.copy()
    setup.resume(3, witness=setup.witness)
    setup.put(copy)
    setup.lock.unlink()
    content, newest, size = setup.witness.read_bytes(), newest_slot(setup), setup.witness.stat().st_size
    emptied = bytearray(content)
    emptied[newest * size // 2 : (newest + 1) * size // 2] = bytes(size // 2)
    for found in (emptied, *(content[: size - cut] for cut in (1, 2, size // 2, size - 10, size))):
        setup.witness.write_bytes(found)
        with pytest.raises(LedgerError):
            setup.open(witness=setup.witness)
