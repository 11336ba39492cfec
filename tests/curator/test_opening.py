"""Opening a workspace: what is made, what is restored, and what is refused, each for its own reason."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from curator.deployments import SUPPORT, WORLDS, ScriptedEngine, set_mechanism
from paclm import Curator, Workspace
from paclm.cli.ledger_keys import mac_keys
from paclm.config import RELEASES
from paclm.curator import opening, terms
from paclm.curator.keys import KEY_FILE
from paclm.curator.opening import LEDGER_FILE, open_custody
from paclm.curator.sealed import SECRET_FILE
from paclm.curator.terms import WORLDS_FILE, worlds_digest
from paclm.engine import loading
from paclm.errors import (
    CuratorError,
    EngineError,
    InvalidInput,
    LedgerBusy,
    LedgerRolledBack,
    LedgerWrongKey,
    WitnessMissing,
    WorkspaceError,
)
from paclm.ledger.recovery import adopt_restored, backup
from paclm.ledger.verify import verify
from paclm.privacy.releases import RULES

Make = Callable[..., Workspace]
OpenCurator = Callable[..., Curator]


@pytest.fixture
def used(make: Make, open_curator: OpenCurator) -> Workspace:
    """A workspace from which a few private tokens have left."""
    workspace = make()
    with open_curator(workspace) as curator:
        curator.generate("the", 6)
    return workspace


def belief_of(curator: Curator) -> bytes:
    return curator._custody.belief.reveal().tobytes()


def secret_of(curator: Curator) -> int:
    return curator._custody.secret._Secret__world.reveal()  # type: ignore[attr-defined, no-any-return]


def test_a_first_opening_makes_key_ledger_and_secret_for_the_owner_only(make: Make, open_curator: OpenCurator) -> None:
    workspace = make()
    with open_curator(workspace) as curator:
        assert curator.account.spent_units == 0
        assert np.exp(curator._custody.belief.reveal()).tolist() == pytest.approx([1 / WORLDS] * WORLDS)
    for name in (KEY_FILE, LEDGER_FILE, SECRET_FILE):
        assert (workspace.curator_path / name).stat().st_mode & 0o777 == 0o600


def test_a_later_opening_restores_secret_belief_and_account_exactly(make: Make, open_curator: OpenCurator) -> None:
    workspace = make(per_token="2^-6", total="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_curator(workspace) as first:
            first.generate("the", 30)
            state = (secret_of(first), belief_of(first), first.account)
        assert np.ptp(np.frombuffer(state[1])) > 0  # the belief has moved
        with open_curator(workspace) as second:
            assert (secret_of(second), belief_of(second), second.account) == state


def test_secrets_of_different_workspaces_are_drawn_apart(make: Make, open_curator: OpenCurator) -> None:
    secrets = set()
    for number in range(12):
        with open_curator(make(f"clinic-{number}")) as curator:
            secrets.add(secret_of(curator))
    assert len(secrets) > 1  # all twelve equal: once in 8^11


def test_a_ledger_from_which_nothing_left_may_get_its_secret_later(used: Workspace, make: Make) -> None:
    """A crash between making the ledger and drawing the secret."""
    workspace = make("crashed")
    open_custody(workspace).ledger.close()
    (workspace.curator_path / SECRET_FILE).unlink()
    open_custody(workspace).ledger.close()
    assert (workspace.curator_path / SECRET_FILE).exists()


def test_a_ledger_with_tokens_whose_secret_is_gone_is_refused(used: Workspace) -> None:
    (used.curator_path / SECRET_FILE).unlink()
    with pytest.raises(CuratorError, match=r"6 private tokens, and the sealed secret .* is gone"):
        open_custody(used)
    assert not (used.curator_path / SECRET_FILE).exists()


def test_a_deleted_ledger_does_not_give_the_budget_back(used: Workspace) -> None:
    for path in used.curator_path.glob(f"{LEDGER_FILE}*"):
        path.unlink()
    with pytest.raises(CuratorError, match="the ledger beside it is gone"):
        open_custody(used)


def empty_curator(workspace: Workspace) -> None:
    for name in ("ledger.*", SECRET_FILE):
        for path in workspace.curator_path.glob(name):
            path.unlink()


def test_a_ledger_made_anew_after_another_is_told_so_until_it_has_served(
    make: Make, open_curator: OpenCurator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACLM_STATE_DIR", str(tmp_path / "state"))
    workspace = make()
    with open_curator(workspace) as curator:
        assert curator.cautions == []
        curator.generate("the", 6)
    empty_curator(workspace)
    for tokens in (0, 2):  # said at every opening before the first token
        with pytest.warns(UserWarning, match=r"was made on 20\d\d-\d\d-\d\d and is gone from here.*put it back before"):
            curator = open_curator(workspace)
        assert curator.account.spent_units == 0
        if tokens:
            curator.generate("the", tokens)
        curator.close()
    open_curator(workspace).close()


@pytest.mark.parametrize("kind", ["missing", "read-only", "a file"])
def test_where_no_note_can_be_kept_the_workspace_is_served_all_the_same(
    make: Make, open_curator: OpenCurator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    places = {"missing": "/proc/nowhere/state", "read-only": "/proc/state", "a file": str(tmp_path / "file")}
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACLM_STATE_DIR", places[kind])
    workspace = make()
    for _ in range(2):
        with open_curator(workspace) as curator:
            assert len(curator.generate("the", 4).tokens) == 4
        empty_curator(workspace)


def test_another_key_is_refused_and_the_right_one_still_opens(used: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACLM_KEY", "11" * 32)
    with pytest.raises(LedgerWrongKey):
        open_custody(used)
    monkeypatch.delenv("PACLM_KEY")
    open_custody(used).ledger.close()


def test_a_lost_key_is_not_replaced(used: Workspace) -> None:
    (used.curator_path / KEY_FILE).unlink()
    with pytest.raises(CuratorError, match=r"key file .* cannot be read"):
        open_custody(used)
    assert not (used.curator_path / KEY_FILE).exists()


def test_a_secret_of_another_workspace_is_refused(used: Workspace, make: Make, open_curator: OpenCurator) -> None:
    other = make("other")
    open_custody(other).ledger.close()
    (used.curator_path / SECRET_FILE).write_bytes((other.curator_path / SECRET_FILE).read_bytes())
    with pytest.raises(CuratorError, match="was sealed with the key"):
        open_custody(used)


def test_a_secret_of_another_ledger_over_the_same_worlds_is_refused(
    used: Workspace, open_curator: OpenCurator, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(CuratorError, match="belongs to another ledger"):
        open_custody(used)
    (sealing,) = json.loads(old)["sealings"].values()
    file.write_text(old.replace(sealing["ledger"], ledger_id))  # the id in clear is not what binds
    with pytest.raises(CuratorError, match="cannot be opened"):
        open_custody(used)
    file.write_text(own)
    open_custody(used).ledger.close()


def change_adapters(workspace: Workspace) -> None:
    path = workspace.adapters_path / WORLDS_FILE
    content = bytearray(path.read_bytes())
    content[-400:] = bytes(400)
    path.write_bytes(content)


def test_adapters_that_changed_behind_an_open_workspace_are_refused(used: Workspace, open_curator: OpenCurator) -> None:
    change_adapters(used)
    with pytest.raises(WorkspaceError, match="has changed since it was trained"):
        open_curator(used)


def test_adapters_that_changed_and_kept_size_and_time_are_refused(used: Workspace, open_curator: OpenCurator) -> None:
    path = used.adapters_path / WORLDS_FILE
    before = path.stat()
    change_adapters(used)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    Workspace.open(used.path)  # a quick look does not notice
    with pytest.raises(WorkspaceError, match="has changed since it was trained"):
        open_curator(used.path)


def test_files_are_hashed_under_the_lock_and_before_they_are_loaded(
    used: Workspace, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters that change between the first look and the loading: here, when the lock is taken."""
    original = opening.open_ledger

    def change_then_open(*args: Any) -> Any:
        change_adapters(used)
        return original(*args)

    monkeypatch.setattr(opening, "open_ledger", change_then_open)
    monkeypatch.setattr(loading, "load_stack", lambda *_: pytest.fail("loaded what was not verified"))
    with pytest.raises(WorkspaceError, match="has changed since it was trained"):
        Curator.open(used, tokenizer=small_tokenizer)


def test_adapters_trained_while_the_workspace_is_being_opened_are_refused(
    used: Workspace, open_curator: OpenCurator, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = opening.open_ledger

    def train_then_open(*args: Any) -> Any:
        change_adapters(used)
        used.with_adapters(WORLDS_FILE)  # a whole manifest, of other adapters than the ledger is about
        return original(*args)

    monkeypatch.setattr(opening, "open_ledger", train_then_open)
    with pytest.raises(CuratorError, match="the adapters were trained again"):
        open_curator(used)


def test_worlds_that_were_trained_again_are_refused(used: Workspace) -> None:
    path = used.adapters_path / WORLDS_FILE
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CuratorError, match=r"the adapters were trained again.*Restore what it was"):
        open_custody(used.with_adapters(WORLDS_FILE))


def test_other_records_are_refused(used: Workspace) -> None:
    manifest = dataclasses.replace(used.manifest, files={**used.manifest.files, "membership.npz": "0" * 64})
    with pytest.raises(CuratorError, match="its records, worlds or base model are others"):
        open_custody(dataclasses.replace(used, manifest=manifest))


def test_as_long_as_nothing_left_the_refusal_says_how_to_start_anew(make: Make) -> None:
    workspace = make()
    open_custody(workspace).ledger.close()
    manifest = dataclasses.replace(workspace.manifest, files={**workspace.manifest.files, "membership.npz": "0" * 64})
    with pytest.raises(CuratorError, match="No token has left yet, so you may start anew"):
        open_custody(dataclasses.replace(workspace, manifest=manifest))


def test_worlds_must_be_trained_first(make: Make) -> None:
    workspace = make()
    untrained = dataclasses.replace(workspace, manifest=dataclasses.replace(workspace.manifest, adapters={}))
    with pytest.raises(WorkspaceError, match="paclm train"):
        open_custody(untrained)
    assert worlds_digest(workspace).startswith(workspace.manifest.digest)


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        ({"per_token": "inf"}, "studies only"),
        ({"total": "inf"}, "studies only"),
        ({"total": str(np.log(WORLDS))}, "promises nothing"),
        ({"total": "9"}, "promises nothing"),
        ({"per_token": "2^-5", "total": "2^-6"}, "Not one token fits"),
        ({"per_token": "2^-61", "total": "2^-50"}, r"per_token must be at least 2\^-60 nats"),
    ],
)
def test_budgets_that_promise_nothing_are_refused(make: Make, mechanism: dict[str, str], reason: str) -> None:
    workspace = make(**mechanism)
    with pytest.raises(InvalidInput, match=reason):
        open_custody(workspace)
    assert not list(workspace.curator_path.iterdir())


def test_a_ledger_of_an_older_version_with_a_smaller_charge_is_no_forgery(
    make: Make, open_curator: OpenCurator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before took any per_token, and charged it as one unit."""
    workspace = make(per_token="2^-70", total="2^-50")
    with monkeypatch.context() as older:
        older.setattr(terms, "SMALLEST_PER_TOKEN", 0.0)
        with open_curator(workspace) as curator:
            curator.generate("the", 4)
    with pytest.raises(InvalidInput, match="at least 2"):
        open_curator(workspace)
    set_mechanism(workspace.path, per_token="2^-60", total="2^-50", support_size=40)
    with open_curator(Workspace.open(workspace.path)) as curator:
        assert curator.account.spent_units == 4
    assert verify(workspace.curator_path / LEDGER_FILE).intact


def test_a_total_of_ln_2_is_served_with_a_warning(make: Make, open_curator: OpenCurator) -> None:
    with pytest.warns(UserWarning, match="membership attacks is 100.00%"):
        open_curator(make(total="0.7")).close()


def test_lowering_the_total_after_the_first_charge_does_not_silence_the_warning(
    make: Make, open_curator: OpenCurator
) -> None:
    with pytest.warns(UserWarning, match="The committed total, 1 nats"), open_curator(make(total="1")) as curator:
        curator.generate("the", 2)
    with pytest.warns(UserWarning, match="The committed total, 1 nats"):
        lowered = open_curator(make(total="0.5"))
    with lowered as curator:
        assert curator.generate("the", 2).mia_bound == 1.0
        assert curator.account.total_nats == 0.5


def test_a_total_lowered_before_the_first_charge_needs_no_warning(make: Make, open_curator: OpenCurator) -> None:
    with pytest.warns(UserWarning, match="The committed total, 1 nats"):
        open_curator(make(total="1")).close()
    open_curator(make(total="0.5")).close()  # warnings are errors


def test_a_missing_budget_says_what_to_write(make: Make) -> None:
    workspace = make()
    set_mechanism(workspace.path)
    with pytest.raises(InvalidInput, match=r'per_token = "2\^-32" and total = "2\^-10"'):
        open_custody(Workspace.open(workspace.path))


@pytest.mark.parametrize(
    "change",
    [
        {"total": "2^-5"},
        {"per_token": "2^-20"},
        {"temperature": 0.5},
        {"decoder": "greedy"},
        {"release": "channel"},
        {"charge": "dissent"},
        {"on_exhausted": "refuse"},
    ],
)
def test_other_settings_hold_from_now_on_and_are_recorded(
    used: Workspace, make: Make, open_curator: OpenCurator, change: dict[str, Any]
) -> None:
    with open_curator(make(**change)) as curator:
        assert curator.config == make(**change).config
        rows = curator._custody.ledger.head.seq
        curator.generate("the", 2)
    with open_curator(make(**change)) as curator:  # the same again: no further event
        assert curator._custody.ledger.head.seq == rows + 2


def test_a_larger_support_is_a_setting_too(used: Workspace, make: Make, small_tokenizer: Any) -> None:
    engine = ScriptedEngine()
    engine.support_size = 50
    with Curator.open(make(support_size=50), engine=engine, tokenizer=small_tokenizer) as curator:
        curator.generate("the", 2)


def test_a_larger_total_needs_the_command_that_asks(used: Workspace, make: Make) -> None:
    with pytest.raises(InvalidInput, match="paclm ledger extend"):
        open_custody(make(total="2^-3"))
    custody = open_custody(make())
    custody.ledger.extend(2.0**-3, confirmed_by="test")
    custody.ledger.close()
    custody = open_custody(make(total="2^-3"))
    assert custody.ledger.account.total_nats == 2.0**-3
    custody.ledger.close()


def test_a_total_below_what_is_spent_is_refused(used: Workspace, make: Make) -> None:
    with pytest.raises(InvalidInput, match="already"):
        open_custody(make(per_token="2^-24", total="2^-20"))


def test_a_second_process_is_refused(make: Make, open_curator: OpenCurator) -> None:
    workspace = make()
    program = (
        "import sys\nfrom paclm.worlds.workspace import Workspace\nfrom paclm.curator.opening import open_custody\n"
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


def test_an_engine_that_does_not_repeat_is_refused_and_the_lock_given_back(make: Make, small_tokenizer: Any) -> None:
    class Moody(ScriptedEngine):
        def probe(self, context: Any, coins: Any) -> tuple[np.ndarray, np.ndarray]:
            return super().probe(context, coins)[0], np.frombuffer(os.urandom(8))

    workspace = make()
    with pytest.raises(EngineError, match="not repeatable"):
        Curator.open(workspace, engine=Moody(), tokenizer=small_tokenizer)  # type: ignore[arg-type]
    open_custody(workspace).ledger.close()


def test_an_engine_with_other_worlds_or_support_is_refused(make: Make, open_curator: OpenCurator) -> None:
    with pytest.raises(EngineError, match="support of 40; the workspace has 8 and 30"):
        open_curator(make(support_size=30))


def test_a_rolled_back_ledger_is_refused_where_a_witness_knows_better(
    make: Make, open_curator: OpenCurator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_restored_backup_never_gives_budget_or_belief_back(
    make: Make, open_curator: OpenCurator, tmp_path: Path, has_witness: bool
) -> None:
    workspace, witness = make(), tmp_path / "witness" if has_witness else None
    with open_curator(workspace, witness=witness, engine=ScriptedEngine(dissent=1.0)) as curator:
        curator.generate("the", 3)
        backup(workspace.curator_path / LEDGER_FILE, tmp_path / "copy.sqlite")
        curator.generate("the", 3)
        state = belief_of(curator), curator.account
    restore(workspace, tmp_path / "copy.sqlite")
    with pytest.raises(LedgerRolledBack, match="backup copy"):
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


def test_a_real_engine_is_loaded_from_the_workspace(make: Make) -> None:
    with Curator.open(make().path) as curator:
        out = curator.generate("the patient reports", 5)
    assert len(out.tokens) == len(out.marks) <= 5
    assert out.private_tokens == len(out.tokens)


def test_a_release_that_is_registered_for_studies_only_is_refused_with_the_reason(
    make: Make, open_curator: OpenCurator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(RELEASES) <= set(RULES), "what may be deployed is registered"
    monkeypatch.setitem(RULES, "response", RULES["channel"]._replace(name="response"))
    workspace = make()
    set_mechanism(workspace.path, per_token="2^-8", total="2^-3", support_size=SUPPORT, release="response")
    with pytest.raises(InvalidInput, match="'response': a deployment takes releases whose leak is proven"):
        open_curator(workspace)
    assert not (workspace.curator_path / LEDGER_FILE).exists()
    set_mechanism(workspace.path, per_token="2^-8", total="2^-3", support_size=SUPPORT, release="channel")
    with open_curator(workspace) as curator:  # the twin
        assert curator.config.release == "channel"
