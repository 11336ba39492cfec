"""Exchanging the key: everything is readable at every instant, by the key in force and by no other."""

import json
import re

import pytest

from curator.killing import run_driver
from curator.sequential import belief_of, world_of
from paclm.cli.ledger_keys import mac_keys
from paclm.curator import rotation
from paclm.curator.custody import open_custody
from paclm.curator.master_key import KEY_FILE, NEW_KEY_FILE, load_keys, write_key
from paclm.curator.redacted import Redacted
from paclm.curator.rotation import rotate_key
from paclm.curator.sealed import SealedFile
from paclm.curator.secret import unseal_belief
from paclm.errors import CuratorError, LedgerBusy, LedgerWrongKey
from paclm.ledger.verify import verify


def state_of(curator):
    return world_of(curator), belief_of(curator).tobytes(), curator.account


def test_a_new_key_keeps_secret_belief_and_account(each_store, used, open_curator):
    with open_curator(used) as curator:
        before = state_of(curator)
    old = (used.curator_path / KEY_FILE).read_bytes()
    for _ in range(3):
        name, keys = rotate_key(used), load_keys(used.curator_path, may_create=False)
        assert keys.name == name
        assert list(SealedFile(used.curator_path).read()) == [keys.id]
        with open_curator(used) as curator:
            assert state_of(curator) == before
    assert (used.curator_path / KEY_FILE).read_bytes() != old
    assert (used.curator_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    keys = mac_keys(used.path)
    assert len(keys) == 4
    report = verify(used.ledger_address, keys)
    assert report.intact
    assert report.macs_checked
    with open_curator(used) as curator:
        curator.generate("the", 3)
        (sealing,) = SealedFile(used.curator_path).read().values()
        assert sealing.ledger == curator._custody.ledger.ledger_id


def test_a_key_that_the_operator_keeps_is_the_operators_to_change(used, tmp_path, monkeypatch):
    own = (used.curator_path / KEY_FILE).read_text()
    monkeypatch.setenv("PACLM_KEY", own)
    (used.curator_path / KEY_FILE).unlink()
    with pytest.raises(CuratorError, match="PACLM_KEY"):
        rotate_key(used)
    with pytest.raises(CuratorError, match="openssl"):
        rotate_key(used, Redacted(bytes.fromhex(own)))
    name = rotate_key(used, Redacted(b"n" * 32))
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    with pytest.raises(LedgerWrongKey):
        open_custody(used)
    write_key(tmp_path / "elsewhere", Redacted(b"n" * 32))
    monkeypatch.delenv("PACLM_KEY")
    monkeypatch.setenv("PACLM_KEY_FILE", str(tmp_path / "elsewhere"))
    custody = open_custody(used)
    assert custody.keys.name == name
    custody.ledger.close()


def test_nothing_is_exchanged_while_the_workspace_serves(each_store, used, open_curator):
    with open_curator(used), pytest.raises(LedgerBusy):
        rotate_key(used)


class Crash(BaseException):
    pass


STEPS = ["write_key", "SealedFile.write 1", "seal_belief", "_sign_with", "SealedFile.write 2", "settle_own_key"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_one_key_in_force_and_nothing_lost(
    each_store, used, open_curator, monkeypatch, step, after
):
    with open_curator(used) as curator:
        before = state_of(curator)
    name, _, number = step.partition(" ")
    owner = SealedFile if name.startswith("SealedFile") else rotation
    attribute = name.rpartition(".")[2]
    original, count = getattr(owner, attribute), 0

    def crash(*args):
        nonlocal count
        count += 1
        if count != int(number or 1):
            return original(*args)
        if after:
            original(*args)
        raise Crash

    old = load_keys(used.curator_path, may_create=False).name
    monkeypatch.setattr(owner, attribute, crash)
    with pytest.raises(Crash):
        rotate_key(used)
    monkeypatch.undo()
    with open_curator(used) as curator:
        assert state_of(curator) == before
        keys = curator._custody.keys
        in_force = keys.name
    is_past = STEPS.index(step) > 3 or (step == "_sign_with" and after)
    assert (in_force != old) == is_past
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    assert list(SealedFile(used.curator_path).read()) == [keys.id]
    assert rotate_key(used) not in (old, in_force)  # and another exchange goes through
    with open_curator(used) as curator:
        assert state_of(curator) == before
        curator.generate("the", 2)


def test_an_exchange_is_one_row_and_leaves_no_belief_that_the_old_key_opens(make, open_curator, tmp_path):
    workspace, witness = make(), tmp_path / "witness"
    with open_curator(workspace, witness=witness) as curator:
        curator.generate("the", 8)
        custody = curator._custody
        old, before, digest, num_worlds = custody.keys, custody.ledger.head.seq, custody.digest, curator.num_worlds
    rotate_key(workspace, witness=witness)
    custody = open_custody(workspace, witness)
    custody.ledger.close()
    assert custody.ledger.head.seq == custody.ledger.state.belief_row == before + 1
    assert unseal_belief(custody.ledger.sealed_belief, old, digest, num_worlds) is None
    slots = re.findall(rb'"belief":"([0-9a-f]+)"', witness.read_bytes())
    assert len(slots) == 2
    for sealed in slots:
        assert unseal_belief(bytes.fromhex(sealed.decode()), old, digest, num_worlds) is None


@pytest.mark.parametrize("kept", [b"5a" * 16, b"5a" * 32 + b"\n"], ids=["half a key", "another key"])
def test_a_new_key_that_the_disk_did_not_keep_never_comes_into_force(used, open_curator, monkeypatch, kept):
    def lose(path, master):
        write_key(path, master)
        path.write_bytes(kept)

    with open_curator(used) as curator:
        before, in_force, rows = state_of(curator), curator._custody.keys.id, curator._custody.ledger.head.seq
    monkeypatch.setattr(rotation, "write_key", lose)
    with pytest.raises(CuratorError, match=NEW_KEY_FILE):
        rotate_key(used)
    monkeypatch.undo()
    assert not (used.curator_path / NEW_KEY_FILE).exists()
    assert list(SealedFile(used.curator_path).read()) == [in_force]
    with open_curator(used) as curator:
        assert (state_of(curator), curator._custody.keys.id) == (before, in_force)
        assert curator._custody.ledger.head.seq == rows


def killed_at_every_touch(workspace, open_curator, order, where):
    """What was found after each kill; first without an exchange, last after one that came to its end."""
    folder = workspace.path.parent
    with open_curator(workspace, witness=folder / "witness") as curator:
        curator.generate("the", 8)
    return run_driver("rotation_driver.py", workspace.path, folder / "witness", folder / "scratch", order, where)


def check_found(found):
    before = found[0]
    assert all(one["state"] == before["state"] for one in found)
    assert all(one["sealed_for"] == [one["key"]] and not one["new_keys_in_clear"] for one in found)
    is_new = [one["key"] != before["key"] for one in found]
    commit = [one["touch"] for one in found].index("COMMIT")
    assert is_new == [n > commit for n in range(len(found))]  # killed before the commit: the old key, after it the new
    assert all(one["rows_added"] == 0 for one in found)  # whichever key is in force, the belief is sealed with it
    assert all(one["slots"] == [True, True] for one in found)  # and in both slots of the witness


@pytest.mark.parametrize("where", ["kept-here", "kept-elsewhere"])
def test_a_kill_at_any_touch_of_the_disk_leaves_one_key_in_force_and_the_belief_sealed_with_it(
    make, open_curator, where
):
    found = killed_at_every_touch(make(), open_curator, "one-commit", where)
    touches = [one["touch"] for one in found]
    assert {"BEGIN IMMEDIATE", "INSERT INTO events", "INSERT OR REPLACE", "COMMIT", "pwrite", "replace"} <= set(touches)
    assert ("link" in touches) == (where == "kept-here")
    check_found(found)


def test_an_exchange_by_two_commits_that_was_cut_short_between_them_is_found_and_mended(make, open_curator):
    """As earlier versions did it. Nothing is lost, and the check above would have seen it."""
    found = killed_at_every_touch(make(), open_curator, "two-commits", "kept-here")
    assert all(one["state"] == found[0]["state"] for one in found)
    assert any(one["rows_added"] == 1 for one in found)
    with pytest.raises(AssertionError):
        check_found(found)


def test_a_belief_sealed_anew_on_opening_reaches_both_slots_wherever_the_opening_is_killed(make, open_curator):
    found = killed_at_every_touch(make(), open_curator, "on-opening", "kept-here")
    touches = [one["touch"] for one in found]
    assert {"INSERT INTO events", "INSERT OR REPLACE", "COMMIT", "fdatasync"} <= set(touches)
    assert touches.count("pwrite") >= 4  # the holder, two slots, the note
    assert len({json.dumps(one["state"]) for one in found}) == 1
    assert all(one["slots"] == [True, True] for one in found)
    added = [one["rows_added"] for one in found]
    assert added == sorted(added, reverse=True)  # a row until one was committed, and none from then on
    assert set(added) == {0, 1}
