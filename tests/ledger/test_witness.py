"""The witness: one key signs it, and writes by others are noticed. As a file it is held by one process."""

import fcntl
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from ledger.stores import IN_A_DATABASE, IN_A_FILE
from ledger.witnesses import BOTH_WITNESSES, IN_A_WITNESS_DATABASE, shown
from paclm.errors import (
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerFenced,
    LedgerRolledBack,
    LedgerStopped,
    LedgerTampered,
    LedgerUnwritable,
    WitnessMissing,
)
from paclm.ledger.events import LedgerKeys
from paclm.ledger.file_witness import FileWitness
from paclm.ledger.postgres_witness import PostgresWitness


@pytest.fixture
def second(setup, tmp_path):
    """The ledger in a copied workspace; both copies name the same witness."""
    setup.with_steps(2, witness=setup.witness).close()
    return setup.second(tmp_path / "second")


def test_a_copied_workspace_does_not_serve_beside_the_first(setup, second):
    with setup.open(witness=setup.witness):
        with pytest.raises(LedgerBusy, match="witness"):
            second.open(witness=setup.witness)
        with pytest.raises(LedgerBusy):
            second.adopt(witness=setup.witness)
    second.open(witness=setup.witness).close()  # one after the other, with nothing in between


def test_a_new_witness_is_locked_from_the_start_and_refused_where_locks_do_not_work(setup, monkeypatch):
    with setup.create(witness=setup.witness), pytest.raises(LedgerBusy):
        FileWitness(setup.witness, LedgerKeys(setup.key))

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(LedgerUnwritable, match=r"elsewhere\.witness"):
        FileWitness(setup.witness, LedgerKeys(setup.key))


@BOTH_WITNESSES
def test_a_refused_opening_releases_the_witness(setup, second):
    setup.resume(3, witness=setup.witness)
    for _ in range(2):
        with pytest.raises(LedgerRolledBack):
            second.open(witness=setup.witness)
    setup.open(witness=setup.witness).close()


@BOTH_WITNESSES
@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_second_copy_that_wrote_the_witness_stops_the_first(setup, second, monkeypatch, commits):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # a file system whose locks hold nothing
    ledger, other = setup.open(witness=setup.witness), second.open(witness=setup.witness)
    for n in range(commits):
        other.commit(setup.step(), b"other %d" % n)
    with pytest.raises(LedgerRolledBack, match=shown(setup.witness)):
        setup.commit(ledger, 3)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 4)
    ledger.close()
    other.close()


def forge(setup, ledger, key):
    """A witness that agrees with this ledger, made with that key alone."""
    testimony = ledger.testimony(ledger.state.witness)
    ledger.close()
    setup.witnesses.remove(setup.witness)
    own = LedgerKeys(key)
    setup.witnesses.kind.create(setup.witness, own, replace(testimony, key=own.current)).close()


@BOTH_WITNESSES
@pytest.mark.parametrize("steps", [0, 1], ids=["of the row that rotated it", "of a later row"])
def test_a_rotated_key_forges_no_witness(setup, steps):
    ledger = setup.with_steps(2, witness=setup.witness)
    ledger.rotate_key(setup.new_key)
    setup.commit(ledger, *range(3, steps + 3))
    forge(setup, ledger, setup.key)
    keys = {"old_keys": [setup.key], "witness": setup.witness}
    for attempt in (setup.open, setup.adopt):
        with pytest.raises(LedgerTampered, match="key"):
            attempt(mac_key=setup.new_key, **keys)


@BOTH_WITNESSES
@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b'{"seq":"x"}', b"\xff", b"null"])
def test_a_testimony_that_cannot_be_read_is_refused(setup, payload):
    setup.with_steps(1, witness=setup.witness).close()
    setup.witnesses.rewrite(setup.witness, lambda _: payload)
    with pytest.raises(LedgerTampered):
        setup.open(witness=setup.witness)


@BOTH_WITNESSES
def test_a_forged_witness_is_refused(setup):
    setup.with_steps(4, witness=setup.witness).close()
    setup.witnesses.rewrite(setup.witness, lambda payload: payload.replace(b'"tokens":', b'"tokens":9'))
    for attempt in (setup.open, setup.adopt):
        with pytest.raises(LedgerTampered, match="MAC"):
            attempt(witness=setup.witness)


def test_an_emptied_witness_is_refused(setup):
    setup.with_steps(4, witness=setup.witness).close()
    setup.witness.write_bytes(bytes(setup.witness.stat().st_size))
    with pytest.raises(LedgerTampered, match="both slots"):
        setup.open(witness=setup.witness)


def test_a_host_that_cannot_reach_the_witness_is_told_of_a_witness_in_a_database(setup):
    setup.with_steps(1, witness=setup.witness).close()
    setup.witnesses.remove(setup.witness)
    with pytest.raises(WitnessMissing, match=r"takes a ledger over.*PACLM_WITNESS=postgresql://"):
        setup.open(witness=setup.witness)


@IN_A_DATABASE
def test_a_takeover_does_not_take_a_witness_file_from_a_live_process(setup):
    holding = setup.holding._replace(take_over=True)
    with setup.with_steps(1, witness=setup.witness) as ledger:
        with pytest.raises(LedgerBusy, match=r"Stop that process.*cannot be taken over"):
            setup.open(witness=setup.witness, holding=holding)
        with pytest.raises(LedgerFenced):
            setup.commit(ledger, 2)
    setup.resume(2, witness=setup.witness)


@IN_A_DATABASE
@IN_A_WITNESS_DATABASE
def test_a_takeover_goes_on_with_a_witness_in_a_database(setup):
    old = setup.with_steps(1, witness=setup.witness)
    with setup.open(witness=setup.witness, holding=setup.holding._replace(take_over=True)) as ledger:
        with pytest.raises(LedgerFenced):
            setup.commit(old, 2)
        setup.commit(ledger, 2)
        old.close()
        setup.commit(ledger, 3)
    assert setup.resume(4, witness=setup.witness).account.tokens == 16


@IN_A_DATABASE
@IN_A_WITNESS_DATABASE
@pytest.mark.parametrize("last_write", ["before the read", "before the write", "after the write"])
def test_a_takeover_between_a_row_and_its_testimony_repeats_or_refuses_the_last_write(setup, monkeypatch, last_write):
    """The row is committed; the old holder's testimony of it comes at some instant of the new one's opening."""
    old, taken = setup.with_steps(1, witness=setup.witness), []
    write, read = PostgresWitness.write, PostgresWitness.read

    def write_late(self, testimony):
        """Of the old holder: another one opens meanwhile."""
        monkeypatch.setattr(PostgresWitness, "write", write)
        monkeypatch.setattr(PostgresWitness, "read", read_between)
        if last_write == "before the read":
            write(self, testimony)
        taken.append(setup.open(witness=setup.witness, holding=setup.holding._replace(take_over=True)))
        if last_write == "after the write":
            write(self, testimony)

    def read_between(self, ledger):
        monkeypatch.setattr(PostgresWitness, "read", read)
        testimony = read(self, ledger)
        if last_write == "before the write":
            write(old.witness, old.testimony(old.state.witness))
        return testimony

    monkeypatch.setattr(PostgresWitness, "write", write_late)
    if last_write == "after the write":  # so the old one's token does not leave
        with pytest.raises(LedgerRolledBack, match="took this ledger over"):
            setup.commit(old, 2)
    else:
        setup.commit(old, 2)
    with pytest.raises(LedgerError):
        setup.commit(old, 3)
    old.close()
    with taken[0] as ledger:
        assert ledger.sealed_belief == b"sealed 2"
        setup.commit(ledger, 3)
    assert setup.resume(4, witness=setup.witness).account.tokens == 16


@IN_A_WITNESS_DATABASE
def test_one_database_witnesses_several_ledgers(setup, tmp_path):
    (tmp_path / "other").mkdir()
    other = setup.another(tmp_path / "other")
    for n in (1, 2):
        for one in (setup, other):
            (one.with_steps if n == 1 else one.resume)(n, witness=setup.witness).close()
    assert len(setup.witnesses.run(setup.witness, "SELECT ledger FROM paclm_witness.testimony")) == 2
    with setup.open(witness=setup.witness) as ledger:
        theirs = "(SELECT payload FROM paclm_witness.testimony WHERE ledger <> %s)"
        change = f"UPDATE paclm_witness.testimony SET payload = {theirs} WHERE ledger = %s"
        setup.witnesses.run(setup.witness, change, ledger.ledger_id, ledger.ledger_id)
    with pytest.raises(WitnessMissing, match="another ledger"):
        setup.open(witness=setup.witness)


@IN_A_WITNESS_DATABASE
@pytest.mark.parametrize("change", ["turn = turn + 1", "mac = payload", "turn = 0"])
def test_a_testimony_that_was_changed_in_its_database_is_neither_read_nor_replaced(setup, change):
    with setup.with_steps(2, witness=setup.witness) as ledger:
        setup.witnesses.run(setup.witness, f"UPDATE paclm_witness.testimony SET {change}")
        with pytest.raises(LedgerRolledBack):
            setup.commit(ledger, 3)
    with pytest.raises(LedgerTampered):
        setup.open(witness=setup.witness)


@IN_A_WITNESS_DATABASE
@pytest.mark.parametrize("command", ["rotate", "reseal"])
def test_a_new_seal_replaces_the_testimony_in_a_database(setup, command):
    with setup.with_steps(2, witness=setup.witness) as ledger:
        ledger.rotate_key(setup.new_key, b"new seal") if command == "rotate" else ledger.reseal(b"new seal")
    [[payload]] = setup.witnesses.run(setup.witness, "SELECT payload FROM paclm_witness.testimony")
    assert b"new seal".hex().encode() in payload
    keys = setup.new_keys if command == "rotate" else {}
    assert setup.resume(3, witness=setup.witness, **keys).account.tokens == 12


@IN_A_WITNESS_DATABASE
def test_a_witness_database_that_is_lost_at_a_commit_stops_the_ledger(setup):
    ledger = setup.with_steps(2, witness=setup.witness)
    setup.witnesses.cut(setup.witness)
    with pytest.raises(LedgerUnwritable) as lost:
        setup.commit(ledger, 3)
    assert shown(setup.witness).replace("\\", "") in str(lost.value)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 4)
    ledger.close()
    with setup.open(witness=setup.witness) as ledger:  # the row was charged; the witness catches up
        assert ledger.sealed_belief == b"sealed 3"
        setup.commit(ledger, 4)


@IN_A_WITNESS_DATABASE
def test_a_witness_whose_commits_might_not_last_is_refused(setup):
    setup.with_steps(1, witness=setup.witness).close()
    with setup.open(witness=setup.witness) as ledger:
        ledger.witness._db.execute("SET synchronous_commit = off")  # as a pooler might leave it
        with pytest.raises(LedgerRolledBack):
            setup.commit(ledger, 2)
    setup.resume(3, witness=setup.witness)


@IN_A_FILE
@IN_A_WITNESS_DATABASE
def test_a_witness_database_that_is_down_is_named_without_its_password(setup, postgres):
    setup.with_steps(1, witness=setup.witness).close()
    postgres.stop()
    try:
        for attempt in (setup.open, setup.adopt):
            with pytest.raises(WitnessMissing, match="replace-witness") as refused:
                attempt(witness=setup.witness)
            assert str(postgres.port) in str(refused.value)
            assert urlsplit(setup.witness).password not in str(refused.value)
    finally:
        postgres.start()
    setup.resume(2, witness=setup.witness)


@IN_A_DATABASE
def test_a_witness_in_the_ledgers_own_database_is_refused(setup):
    setup.with_steps(1).close()
    for attempt in (setup.open, setup.adopt):
        with pytest.raises(InvalidInput, match="another server"):
            attempt(witness=setup.address)
    with pytest.raises(InvalidInput, match="another server"):
        setup.replace_witness(setup.address)
