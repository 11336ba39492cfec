"""Opening a workspace: what is made, what is restored, and what is refused, each for its own reason."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest

from curator.deployments import WORLDS, ScriptedEngine
from curator.sequential import belief_of, world_of
from paclm import Curator, Workspace
from paclm.cli.ledger_keys import mac_keys
from paclm.curator.custody import open_custody
from paclm.curator.master_key import KEY_FILE
from paclm.curator.redacted import Redacted
from paclm.curator.sealed import SECRET_FILE, SealedFile, Sealing
from paclm.curator.secret import Secret
from paclm.errors import CuratorError, EngineError, LedgerBusy, LedgerRolledBack, WitnessMissing
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import adopt_restored, backup
from paclm.ledger.verify import newest_contents, sealed_secret
from paclm.worlds.layout import LEDGER_FILE
from paclm.worlds.registry import remember_workspace
from paclm.worlds.user_dirs import state_folder


def test_a_first_opening_makes_key_ledger_and_secret_for_the_owner_only(make, open_curator):
    workspace = make()
    with open_curator(workspace) as curator:
        assert curator.account.spent_units == 0
        assert np.exp(curator._custody.belief.reveal()).tolist() == pytest.approx([1 / WORLDS] * WORLDS)
    for name in (KEY_FILE, LEDGER_FILE, SECRET_FILE):
        assert (workspace.curator_path / name).stat().st_mode & 0o777 == 0o600


def test_a_later_opening_restores_secret_belief_and_account_exactly(make, open_curator):
    workspace = make(per_token="2^-6", total="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_curator(workspace) as first:
            first.generate("the", 30)
            state = (world_of(first), belief_of(first).tobytes(), first.account)
        assert np.ptp(np.frombuffer(state[1])) > 0  # the belief has moved
        with open_curator(workspace) as second:
            assert (world_of(second), belief_of(second).tobytes(), second.account) == state


def test_secrets_of_different_workspaces_are_drawn_apart(make, open_curator):
    secrets = set()
    for number in range(12):
        with open_curator(make(f"clinic-{number}")) as curator:
            secrets.add(world_of(curator))
    assert len(secrets) > 1  # all twelve equal: once in 8^11


@pytest.mark.parametrize("step", ["drawn", "sealed", "copied"])
def test_a_crash_while_the_secret_is_drawn_leaves_one_secret_or_none(make, monkeypatch, step):
    workspace = make()
    owner, name = {"drawn": (Secret, "draw"), "sealed": (Ledger, "seal_secret"), "copied": (SealedFile, "write")}[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_custody(workspace)
    assert not (workspace.curator_path / SECRET_FILE).exists()
    before = sealed_secret(workspace.ledger_path)
    assert (before is not None) == (step == "copied")
    open_custody(workspace).ledger.close()
    assert (workspace.curator_path / SECRET_FILE).read_bytes() == sealed_secret(workspace.ledger_path)
    assert before in (None, sealed_secret(workspace.ledger_path))


def test_the_copy_of_the_secret_is_restored_from_the_ledger(used, open_curator):
    with open_curator(used) as curator:
        world, rows = world_of(curator), curator._custody.ledger.head.seq
    copy = (used.curator_path / SECRET_FILE).read_bytes()
    (used.curator_path / SECRET_FILE).unlink()
    with open_curator(used) as curator:
        assert (world_of(curator), curator._custody.ledger.head.seq) == (world, rows)
    assert (used.curator_path / SECRET_FILE).read_bytes() == copy
    assert (used.curator_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("tokens", [0, 6])
def test_a_copy_with_another_secret_is_refused_and_writes_nothing(make, open_curator, tokens):
    workspace = make()
    with open_curator(workspace) as curator:
        if tokens:
            curator.generate("the", tokens)
        custody, world, rows = curator._custody, world_of(curator), curator._custody.ledger.head.seq
    other = Secret(Redacted((world + 1) % WORLDS), WORLDS)
    sealing = Sealing.make(other, custody.keys, custody.digest, custody.ledger.ledger_id)
    SealedFile(workspace.curator_path).write({custody.keys.id: sealing})
    workspace = make(per_token="2^-17")  # settings of this host, too
    with pytest.raises(CuratorError, match="another secret"):
        open_custody(workspace)
    assert newest_contents(workspace.ledger_path).head.seq == rows


def test_a_used_workspace_of_an_earlier_version_without_its_secret_is_refused(make, open_curator, monkeypatch):
    workspace = make()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "seal_secret", lambda *_: None)
        with open_curator(workspace) as curator:
            curator.generate("the", 6)
    (workspace.curator_path / SECRET_FILE).unlink()
    with pytest.raises(CuratorError, match="6 private tokens"):
        open_custody(workspace)
    assert not (workspace.curator_path / SECRET_FILE).exists()


@pytest.mark.parametrize(("lost", "named"), [(KEY_FILE, None), (f"{LEDGER_FILE}*", LEDGER_FILE)])
def test_a_used_workspace_whose_key_or_ledger_is_gone_is_refused_and_nothing_is_replaced(used, lost, named):
    """A deleted ledger does not give the budget back."""
    remove(used, lost)
    with pytest.raises(CuratorError, match=named):
        open_custody(used)
    assert not list(used.curator_path.glob(lost.replace("*", "")))


def remove(workspace, *patterns):
    for pattern in patterns:
        for path in workspace.curator_path.glob(pattern):
            path.unlink()


def restore_ledger(workspace, copy):
    remove(workspace, f"{LEDGER_FILE}*")
    (workspace.curator_path / LEDGER_FILE).write_bytes(copy.read_bytes())
    (workspace.curator_path / LEDGER_FILE).chmod(0o600)


def test_a_ledger_made_anew_after_another_is_told_so_until_it_has_served(make, open_curator, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    workspace = make()
    with open_curator(workspace) as curator:
        assert curator.cautions == []
        curator.generate("the", 6)
    remove(workspace, "ledger.*", SECRET_FILE)
    for tokens in (0, 2):  # said at every opening before the first token
        with pytest.warns(UserWarning, match=r"20\d\d-\d\d-\d\d"):
            curator = open_curator(workspace)
        assert curator.account.spent_units == 0
        if tokens:
            curator.generate("the", tokens)
        curator.close()
    open_curator(workspace).close()


@pytest.mark.parametrize("kind", ["missing", "read-only", "a file"])
def test_where_no_note_can_be_kept_the_workspace_is_served_all_the_same(
    make, open_curator, tmp_path, monkeypatch, kind
):
    places = {"missing": "/proc/nowhere/state", "read-only": "/proc/state", "a file": str(tmp_path / "file")}
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACLM_STATE_DIR", places[kind])
    workspace = make()
    for _ in range(2):
        with open_curator(workspace) as curator:
            assert len(curator.generate("the", 4).tokens) == 4
        remove(workspace, "ledger.*", SECRET_FILE)


def test_a_workspace_that_was_moved_is_noted_at_its_new_place(used, open_curator, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    remember_workspace(used.manifest.id, used.path, [])
    moved = used.path.rename(used.path.with_name("moved"))
    open_curator(Workspace.open(moved)).close()
    (note,) = (state_folder() / "workspaces").iterdir()
    assert json.loads(note.read_text())["path"] == str(moved)


def test_a_secret_of_another_workspace_is_refused(used, make, open_curator):
    other = make("other")
    open_custody(other).ledger.close()
    (used.curator_path / SECRET_FILE).write_bytes((other.curator_path / SECRET_FILE).read_bytes())
    with pytest.raises(CuratorError):
        open_custody(used)


def test_a_secret_of_another_ledger_over_the_same_worlds_is_refused(used, open_curator, monkeypatch):
    """Same key, same worlds, ledger made anew: an old secret under a new belief would not be the one it is about."""
    file = used.curator_path / SECRET_FILE
    old = file.read_text()
    remove(used, "ledger.*", SECRET_FILE)
    with open_curator(used) as curator:
        curator.generate("the", 2)
        ledger_id = curator._custody.ledger.ledger_id
    own = file.read_text()
    file.write_text(old)
    with pytest.raises(CuratorError, match="ledger"):
        open_custody(used)
    (sealing,) = json.loads(old)["sealings"].values()
    file.write_text(old.replace(sealing["ledger"], ledger_id))  # the id in clear is not what binds
    with pytest.raises(CuratorError):
        open_custody(used)
    file.write_text(own)
    open_custody(used).ledger.close()


def test_a_second_process_is_refused(make, open_curator):
    workspace = make()
    program = (
        "import sys\nfrom paclm.worlds.workspace import Workspace\nfrom paclm.curator.custody import open_custody\n"
        "open_custody(Workspace.open(sys.argv[1]))"
    )

    def open_elsewhere():
        command = [sys.executable, "-c", program, str(workspace.path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with open_curator(workspace) as curator:
        curator.generate("the", 2)
        with pytest.raises(LedgerBusy):
            open_custody(workspace)
        done = open_elsewhere()
        assert done.returncode == 1
        assert "LedgerBusy" in done.stderr
        curator.generate("the", 2)
    assert open_elsewhere().returncode == 0


def test_an_engine_that_does_not_repeat_is_refused_and_the_lock_given_back(make, small_tokenizer):
    class Moody(ScriptedEngine):
        def probe(self, context, coins):
            return super().probe(context, coins)[0], np.frombuffer(os.urandom(8))

    workspace = make()
    with pytest.raises(EngineError):
        Curator.open(workspace, engine=Moody(), tokenizer=small_tokenizer)
    open_custody(workspace).ledger.close()


def test_an_engine_with_other_worlds_or_support_is_refused(make, open_curator):
    with pytest.raises(EngineError, match=r"40.*30"):
        open_curator(make(support_size=30))


def test_a_rolled_back_ledger_is_refused_where_a_witness_knows_better(make, open_curator, tmp_path, monkeypatch):
    workspace, witness = make(), tmp_path / "witness"
    with open_curator(workspace, witness=witness) as curator:
        curator.generate("the", 3)
    old = shutil.copy(workspace.curator_path / LEDGER_FILE, tmp_path / "old")
    monkeypatch.setenv("PACLM_WITNESS", str(witness))
    with open_curator(workspace) as curator:
        curator.generate("the", 3)
    restore_ledger(workspace, old)
    with pytest.raises(LedgerRolledBack):
        open_curator(workspace)
    monkeypatch.delenv("PACLM_WITNESS")
    with pytest.raises(WitnessMissing):
        open_curator(workspace)


@pytest.mark.parametrize("has_witness", [True, False], ids=["with a witness", "without"])
def test_a_restored_backup_never_gives_budget_or_belief_back(make, open_curator, tmp_path, has_witness):
    workspace, witness = make(), tmp_path / "witness" if has_witness else None
    with open_curator(workspace, witness=witness, engine=ScriptedEngine(dissent=1.0)) as curator:
        curator.generate("the", 3)
        backup(workspace.curator_path / LEDGER_FILE, tmp_path / "copy.sqlite")
        curator.generate("the", 3)
        state = belief_of(curator).tobytes(), curator.account
    restore_ledger(workspace, tmp_path / "copy.sqlite")
    with pytest.raises(LedgerRolledBack):
        open_curator(workspace, witness=witness)
    key = mac_keys(workspace.path)[0]
    adopt_restored(workspace.curator_path / LEDGER_FILE, key, confirmed_by="test", witness=witness)
    with open_curator(workspace, witness=witness) as curator:
        if has_witness:
            assert (belief_of(curator).tobytes(), curator.account) == state
            assert curator.generate("the", 2).private_tokens == 2
        else:
            assert curator.account.remaining_units == 0
            assert curator.generate("the", 2).marks == ("public", "public")


def test_a_real_engine_is_loaded_from_the_workspace(make):
    with Curator.open(make().path) as curator:
        out = curator.generate("the patient reports", 5)
    assert len(out.tokens) == len(out.marks) <= 5
    assert out.private_tokens == len(out.tokens)
