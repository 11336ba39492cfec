"""What a workspace must agree with before it is opened: its worlds, its budgets, the settings its ledger knows."""

import dataclasses
import os
from contextlib import nullcontext

import numpy as np
import pytest

from curator.deployments import SUPPORT, WORLDS, set_mechanism
from paclm import Curator, Workspace
from paclm.config import RELEASES
from paclm.curator import custody, preflight
from paclm.curator.custody import open_custody
from paclm.curator.preflight import WORLDS_FILE, worlds_digest
from paclm.engine import loading
from paclm.errors import CuratorError, InvalidInput, WorkspaceError
from paclm.ledger.verify import verify
from paclm.privacy.releases import RULES
from paclm.worlds.layout import LEDGER_FILE


def change_adapters(workspace):
    path = workspace.adapters_path / WORLDS_FILE
    content = bytearray(path.read_bytes())
    content[-400:] = bytes(400)
    path.write_bytes(content)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_adapters_that_changed_are_refused_also_where_size_and_time_are_kept(used, open_curator, keeps_time):
    path = used.adapters_path / WORLDS_FILE
    before = path.stat()
    change_adapters(used)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        Workspace.open(used.path)  # a quick look does not notice
    with pytest.raises(WorkspaceError):
        open_curator(used.path if keeps_time else used)


@pytest.mark.parametrize("is_trained", [False, True])
def test_adapters_that_change_while_the_workspace_is_opened_are_refused(used, small_tokenizer, monkeypatch, is_trained):
    """Here, when the lock is taken: files are hashed under it and before they are loaded."""
    original = custody.open_ledger

    def change_then_open(*args, **options):
        change_adapters(used)
        if is_trained:
            used.with_adapters(WORLDS_FILE)  # a whole manifest, of other adapters than the ledger is about
        return original(*args, **options)

    monkeypatch.setattr(custody, "open_ledger", change_then_open)
    monkeypatch.setattr(loading, "load_stack", lambda *_: pytest.fail("loaded what was not verified"))
    with pytest.raises(CuratorError if is_trained else WorkspaceError, match="adapters"):
        Curator.open(used, tokenizer=small_tokenizer)


def test_worlds_that_were_trained_again_are_refused(used):
    path = used.adapters_path / WORLDS_FILE
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CuratorError, match="adapters"):
        open_custody(used.with_adapters(WORLDS_FILE))


@pytest.mark.parametrize(("tokens", "named"), [(2, "records"), (0, "delete all but")])
def test_other_records_are_refused_and_before_the_first_token_the_way_to_start_again_is_named(
    make, open_curator, tokens, named
):
    workspace = make()
    with open_curator(workspace) as curator:
        if tokens:
            curator.generate("the", tokens)
    manifest = dataclasses.replace(workspace.manifest, files={**workspace.manifest.files, "membership.npz": "0" * 64})
    with pytest.raises(CuratorError, match=named):
        open_custody(dataclasses.replace(workspace, manifest=manifest))


def test_worlds_must_be_trained_first(make):
    workspace = make()
    untrained = dataclasses.replace(workspace, manifest=dataclasses.replace(workspace.manifest, adapters={}))
    with pytest.raises(WorkspaceError, match="paclm train"):
        open_custody(untrained)
    assert worlds_digest(workspace).startswith(workspace.manifest.digest)


@pytest.mark.parametrize(
    ("mechanism", "reason"),
    [
        ({"per_token": "inf"}, "inf"),
        ({"total": "inf"}, "inf"),
        ({"total": str(np.log(WORLDS))}, "total"),
        ({"total": "9"}, "total"),
        ({"per_token": "2^-5", "total": "2^-6"}, "per_token"),
        ({"per_token": "2^-61", "total": "2^-50"}, "per_token"),
    ],
)
def test_budgets_that_promise_nothing_are_refused(make, mechanism, reason):
    workspace = make(**mechanism)
    with pytest.raises(InvalidInput, match=reason):
        open_custody(workspace)
    assert not list(workspace.curator_path.iterdir())


def test_a_ledger_of_an_older_version_with_a_smaller_charge_is_no_forgery(make, open_curator, monkeypatch):
    """Versions before took any per_token, and charged it as one unit."""
    workspace = make(per_token="2^-70", total="2^-50")
    with monkeypatch.context() as older:
        older.setattr(preflight, "SMALLEST_PER_TOKEN", 0.0)
        with open_curator(workspace) as curator:
            curator.generate("the", 4)
    with pytest.raises(InvalidInput, match="at least 2"):
        open_curator(workspace)
    set_mechanism(workspace.path, per_token="2^-60", total="2^-50", support_size=40)
    with open_curator(Workspace.open(workspace.path)) as curator:
        assert curator.account.spent_units == 4
    assert verify(workspace.curator_path / LEDGER_FILE).intact


def test_a_total_of_ln_2_is_served_with_a_warning(make, open_curator):
    with pytest.warns(UserWarning, match="100.00%"):
        open_curator(make(total="0.7")).close()


@pytest.mark.parametrize("has_charged", [True, False])
def test_a_lowered_total_silences_the_warning_only_before_the_first_charge(make, open_curator, has_charged):
    with pytest.warns(UserWarning, match="1 nats"):
        first = open_curator(make(total="1"))
    with first as curator:
        if has_charged:
            curator.generate("the", 2)
    with pytest.warns(UserWarning, match="1 nats") if has_charged else nullcontext():  # warnings are errors
        lowered = open_curator(make(total="0.5"))
    with lowered as curator:
        assert (curator.generate("the", 2).mia_bound == 1.0) is has_charged
        assert curator.account.total_nats == 0.5


def test_a_missing_budget_says_what_to_write(make):
    workspace = make()
    set_mechanism(workspace.path)
    with pytest.raises(InvalidInput, match=r'per_token = "2\^-32" and total = "2\^-10"'):
        open_custody(Workspace.open(workspace.path))


@pytest.mark.parametrize(
    "change",
    [
        *({"total": "2^-5"}, {"per_token": "2^-20"}, {"temperature": 0.5}, {"decoder": "greedy"}),
        *({"release": "channel"}, {"charge": "dissent"}, {"on_exhausted": "refuse"}, {"support_size": 50}),
    ],
    ids=str,
)
def test_other_settings_hold_from_now_on_and_are_recorded(used, make, open_curator, scripted, change):
    scripted.support_size = change.get("support_size", SUPPORT)
    with open_curator(make(**change)) as curator:
        assert curator.config == make(**change).config
        rows = curator._custody.ledger.head.seq
        curator.generate("the", 2)
    with open_curator(make(**change)) as curator:  # the same again: no further event
        assert curator._custody.ledger.head.seq == rows + 2


def test_a_larger_total_needs_the_command_that_asks(used, make):
    with pytest.raises(InvalidInput, match="paclm ledger extend"):
        open_custody(make(total="2^-3"))
    custody = open_custody(make())
    custody.ledger.extend(2.0**-3, confirmed_by="test")
    custody.ledger.close()
    custody = open_custody(make(total="2^-3"))
    assert custody.ledger.account.total_nats == 2.0**-3
    custody.ledger.close()


def test_a_total_below_what_is_spent_is_refused(used, make):
    with pytest.raises(InvalidInput, match="already"):
        open_custody(make(per_token="2^-24", total="2^-20"))


def test_a_release_that_is_registered_for_studies_only_is_refused_with_the_reason(make, open_curator, monkeypatch):
    assert set(RELEASES) <= set(RULES), "what may be deployed is registered"
    monkeypatch.setitem(RULES, "response", RULES["channel"]._replace(name="response"))
    workspace = make()
    set_mechanism(workspace.path, per_token="2^-8", total="2^-3", support_size=SUPPORT, release="response")
    with pytest.raises(InvalidInput, match="'response'"):
        open_curator(workspace)
    assert not (workspace.curator_path / LEDGER_FILE).exists()
    set_mechanism(workspace.path, per_token="2^-8", total="2^-3", support_size=SUPPORT, release="channel")
    with open_curator(workspace) as curator:  # the twin
        assert curator.config.release == "channel"
