"""The witness as a file: one process holds it, one key signs it, and writes by others are noticed."""

import fcntl
from dataclasses import replace

import pytest

from paclm.errors import LedgerBusy, LedgerRolledBack, LedgerStopped, LedgerTampered, LedgerUnwritable
from paclm.ledger import file_witness
from paclm.ledger.events import LedgerKeys
from paclm.ledger.file_witness import FileWitness


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


def test_a_refused_opening_releases_the_witness(setup, second):
    setup.resume(3, witness=setup.witness)
    for _ in range(2):
        with pytest.raises(LedgerRolledBack):
            second.open(witness=setup.witness)
    setup.open(witness=setup.witness).close()


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_second_copy_that_wrote_the_witness_stops_the_first(setup, second, monkeypatch, commits):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # a file system whose locks hold nothing
    ledger, other = setup.open(witness=setup.witness), second.open(witness=setup.witness)
    for n in range(commits):
        other.commit(setup.step(), b"other %d" % n)
    with pytest.raises(LedgerRolledBack, match=r"elsewhere\.witness"):
        setup.commit(ledger, 3)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 4)
    ledger.close()
    other.close()


def forge(setup, ledger, key):
    """A witness that agrees with this ledger, made with that key alone."""
    testimony = ledger.testimony(ledger.state.witness)
    ledger.close()
    setup.witness.unlink()
    FileWitness.create(setup.witness, LedgerKeys(key), replace(testimony, key=LedgerKeys(key).current)).close()


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


def rewrite(setup, change):
    """Change the payload of both slots: with a fresh checksum, and without the key."""
    content = setup.witness.read_bytes()
    half = len(content) // 2
    slots = [file_witness._unpack(content[start : start + half]) for start in (0, half)]
    packed = (file_witness._pack(change(payload), mac) for payload, mac in slots)
    setup.witness.write_bytes(b"".join(slot.ljust(half, b"\0") for slot in packed))


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b'{"seq":"x"}', b"\xff", b"null"])
def test_a_testimony_that_cannot_be_read_is_refused(setup, payload):
    setup.with_steps(1, witness=setup.witness).close()
    rewrite(setup, lambda _: payload)
    with pytest.raises(LedgerTampered):
        setup.open(witness=setup.witness)


def test_a_forged_witness_and_an_emptied_one_are_refused(setup):
    setup.with_steps(4, witness=setup.witness).close()
    rewrite(setup, lambda payload: payload.replace(b'"tokens":', b'"tokens":9'))
    with pytest.raises(LedgerTampered, match="MAC"):
        setup.open(witness=setup.witness)
    setup.witness.write_bytes(bytes(setup.witness.stat().st_size))
    with pytest.raises(LedgerTampered, match="both slots"):
        setup.open(witness=setup.witness)
