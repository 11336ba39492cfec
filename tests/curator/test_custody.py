"""Opening a workspace: what is made, what is restored, and what is refused, each for its own reason."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from curator.deployments import WORLDS, ScriptedEngine
from paclm import Curator, Workspace
from paclm.cli.ledger_keys import mac_keys
from paclm.curator.custody import open_custody
from paclm.curator.master_key import KEY_FILE
from paclm.curator.sealed import SECRET_FILE
from paclm.errors import (
    CuratorError,
    EngineError,
    LedgerBusy,
    LedgerRolledBack,
    LedgerWrongKey,
    WitnessMissing,
)
from paclm.ledger.recovery import adopt_restored, backup
from paclm.worlds.layout import LEDGER_FILE
from paclm.worlds.registry import remember_workspace
from paclm.worlds.user_dirs import state_folder


def belief_of(curator: Curator) -> bytes:
    return curator._custody.belief.reveal().tobytes()


def secret_of(curator: Curator) -> int:
    return curator._custody.secret._Secret__world.reveal()  # type: ignore[attr-defined, no-any-return]


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
            state = (secret_of(first), belief_of(first), first.account)
        assert np.ptp(np.frombuffer(state[1])) > 0  # the belief has moved
        with open_curator(workspace) as second:
            assert (secret_of(second), belief_of(second), second.account) == state


def test_secrets_of_different_workspaces_are_drawn_apart(make, open_curator):
    secrets = set()
    for number in range(12):
        with open_curator(make(f"clinic-{number}")) as curator:
            secrets.add(secret_of(curator))
    assert len(secrets) > 1  # all twelve equal: once in 8^11


def test_a_ledger_from_which_nothing_left_may_get_its_secret_later(used, make):
    """A crash between making the ledger and drawing the secret."""
    workspace = make("crashed")
    open_custody(workspace).ledger.close()
    (workspace.curator_path / SECRET_FILE).unlink()
    open_custody(workspace).ledger.close()
    assert (workspace.curator_path / SECRET_FILE).exists()


def test_a_ledger_with_tokens_whose_secret_is_gone_is_refused(used):
    (used.curator_path / SECRET_FILE).unlink()
    with pytest.raises(CuratorError, match="6 private tokens"):
        open_custody(used)
    assert not (used.curator_path / SECRET_FILE).exists()


def test_a_deleted_ledger_does_not_give_the_budget_back(used):
    for path in used.curator_path.glob(f"{LEDGER_FILE}*"):
        path.unlink()
    with pytest.raises(CuratorError, match=LEDGER_FILE):
        open_custody(used)


def empty_curator(workspace: Workspace) -> None:
    for name in ("ledger.*", SECRET_FILE):
        for path in workspace.curator_path.glob(name):
            path.unlink()


def test_a_ledger_made_anew_after_another_is_told_so_until_it_has_served(make, open_curator, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    workspace = make()
    with open_curator(workspace) as curator:
        assert curator.cautions == []
        curator.generate("the", 6)
    empty_curator(workspace)
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
        empty_curator(workspace)


def test_a_workspace_that_was_moved_is_noted_at_its_new_place(used, open_curator, tmp_path, monkeypatch):
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    remember_workspace(used.manifest.id, used.path, [])
    moved = used.path.rename(used.path.with_name("moved"))
    open_curator(Workspace.open(moved)).close()
    (note,) = (state_folder() / "workspaces").iterdir()
    assert json.loads(note.read_text())["path"] == str(moved)


def test_another_key_is_refused_and_the_right_one_still_opens(used, monkeypatch):
    monkeypatch.setenv("PACLM_KEY", "11" * 32)
    with pytest.raises(LedgerWrongKey):
        open_custody(used)
    monkeypatch.delenv("PACLM_KEY")
    open_custody(used).ledger.close()


def test_a_lost_key_is_not_replaced(used):
    (used.curator_path / KEY_FILE).unlink()
    with pytest.raises(CuratorError):
        open_custody(used)
    assert not (used.curator_path / KEY_FILE).exists()


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
    for path in used.curator_path.iterdir():
        if path.name != KEY_FILE:
            path.unlink()
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
    with open_curator(workspace) as curator:
        curator.generate("the", 2)
        with pytest.raises(LedgerBusy):
            open_custody(workspace)
        done = subprocess.run(
            [sys.executable, "-c", program, str(workspace.path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "LedgerBusy" in done.stderr
        curator.generate("the", 2)
    assert subprocess.run([sys.executable, "-c", program, str(workspace.path)], check=False).returncode == 0


def test_an_engine_that_does_not_repeat_is_refused_and_the_lock_given_back(make, small_tokenizer):
    class Moody(ScriptedEngine):
        def probe(self, context: Any, coins: Any) -> tuple[np.ndarray, np.ndarray]:
            return super().probe(context, coins)[0], np.frombuffer(os.urandom(8))

    workspace = make()
    with pytest.raises(EngineError):
        Curator.open(workspace, engine=Moody(), tokenizer=small_tokenizer)  # type: ignore[arg-type]
    open_custody(workspace).ledger.close()


def test_an_engine_with_other_worlds_or_support_is_refused(make, open_curator):
    with pytest.raises(EngineError, match=r"40.*30"):
        open_curator(make(support_size=30))


def test_a_rolled_back_ledger_is_refused_where_a_witness_knows_better(make, open_curator, tmp_path, monkeypatch):
    workspace, witness = make(), tmp_path / "witness"
    with open_curator(workspace, witness=witness) as curator:
        curator.generate("the", 3)
    old = {path: path.read_bytes() for path in workspace.curator_path.glob(f"{LEDGER_FILE}*")}
    monkeypatch.setenv("PACLM_WITNESS", str(witness))
    with open_curator(workspace) as curator:
        curator.generate("the", 3)
    for path in workspace.curator_path.glob(f"{LEDGER_FILE}*"):
        path.unlink()
    for path, content in old.items():
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(LedgerRolledBack):
        open_curator(workspace)
    monkeypatch.delenv("PACLM_WITNESS")
    with pytest.raises(WitnessMissing):
        open_curator(workspace)


def restore(workspace: Workspace, copy: Path) -> None:
    for path in workspace.curator_path.glob(f"{LEDGER_FILE}*"):
        path.unlink()
    (workspace.curator_path / LEDGER_FILE).write_bytes(copy.read_bytes())
    (workspace.curator_path / LEDGER_FILE).chmod(0o600)


@pytest.mark.parametrize("has_witness", [True, False], ids=["with a witness", "without"])
def test_a_restored_backup_never_gives_budget_or_belief_back(make, open_curator, tmp_path, has_witness):
    workspace, witness = make(), tmp_path / "witness" if has_witness else None
    with open_curator(workspace, witness=witness, engine=ScriptedEngine(dissent=1.0)) as curator:
        curator.generate("the", 3)
        backup(workspace.curator_path / LEDGER_FILE, tmp_path / "copy.sqlite")
        curator.generate("the", 3)
        state = belief_of(curator), curator.account
    restore(workspace, tmp_path / "copy.sqlite")
    with pytest.raises(LedgerRolledBack):
        open_curator(workspace, witness=witness)
    key = mac_keys(workspace.path)[0]
    adopt_restored(workspace.curator_path / LEDGER_FILE, key, confirmed_by="test", witness=witness)
    with open_curator(workspace, witness=witness) as curator:
        if has_witness:
            assert (belief_of(curator), curator.account) == state
            assert curator.generate("the", 2).private_tokens == 2
        else:
            assert curator.account.remaining_units == 0
            assert curator.generate("the", 2).marks == ("public", "public")


def test_a_real_engine_is_loaded_from_the_workspace(make):
    with Curator.open(make().path) as curator:
        out = curator.generate("the patient reports", 5)
    assert len(out.tokens) == len(out.marks) <= 5
    assert out.private_tokens == len(out.tokens)
