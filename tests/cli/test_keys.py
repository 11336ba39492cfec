"""`paclm keys`: shown once, listed without the key, refused at once, also while a server has the file open."""

from __future__ import annotations

import json
from functools import partial

import pytest

from cli.commands import invoke
from paclm.config import MechanismConfig
from paclm.curator.keys import load_keys
from paclm.errors import InvalidInput, LedgerDamaged, LedgerError, WorkspaceError
from paclm.ledger.ledger import Ledger
from paclm.server.database import service_path
from paclm.server.keys import KeyStore

run = partial(invoke, "keys")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """As much of a workspace as the commands need: the curator's folder."""
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "curator").mkdir(mode=0o700)
    return tmp_path


def give_budget(workspace, tokens):
    key = load_keys(workspace / "curator", may_create=True).mac.reveal()
    settings = MechanismConfig(per_token=2.0**-32, total=tokens * 2.0**-32)
    path = workspace / "curator" / "ledger.sqlite"
    Ledger.create(path, key, workspace="w", num_worlds=8, settings=settings, sealed_belief=b"sealed").close()


def test_add_shows_the_key_once_with_how_to_use_it(workspace):
    shown = run("add", workspace, "ward-3", "--quota", 100_000).output
    (key,) = {word.split("=")[-1] for word in shown.split() if "paclm-" in word}
    assert "OPENAI_API_KEY=" in shown
    assert "cannot be shown again" in shown
    assert "100,000 tokens" in shown
    with KeyStore.open(service_path(workspace)) as store:
        assert store.identify(key).name == "ward-3"
    assert key not in run("list", workspace).output + run("list", workspace, "--json").output


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", "http://127.0.0.1:8000/v1"),
        ("port = 8117", "http://127.0.0.1:8117/v1"),
        ('host = "0.0.0.0"', "http://127.0.0.1:8000/v1"),
        ('host = "::1"', "http://[::1]:8000/v1"),
        ("port = 0", "http://127.0.0.1:PORT/v1"),
    ],
)
def test_add_names_the_address_that_is_set(workspace, settings, expected):
    (workspace / "paclm.toml").write_text(f"[server]\n{settings}\n")
    shown = run("add", workspace, "ward-3").output
    assert f"OPENAI_BASE_URL={expected}\n" in shown
    assert "as set in [server]" in shown


def test_add_as_json_gives_the_key_to_scripts(workspace):
    figures = json.loads(run("add", workspace, "root", "--admin", "--json").output)
    assert (figures["name"], figures["is_admin"], figures["quota_tokens"]) == ("root", True, None)
    with KeyStore.open(service_path(workspace)) as store:
        assert store.identify(figures["key"]).is_admin


def test_list_shows_quota_use_and_state(workspace):
    assert "No keys" in run("list", workspace).output
    run("add", workspace, "alice", "--quota", 5000)
    run("add", workspace, "root", "--admin")
    with KeyStore.open(service_path(workspace)) as store:
        store.reserve("alice", 1200)
        store.settle("alice", reserved=1200, used=1000)
        store.reserve("alice", 300)
    run("revoke", workspace, "root")
    head, alice, root = run("list", workspace).output.splitlines()
    assert head.split() == ["name", "quota", "used", "held", "left", "created", "state"]
    assert alice.split()[:5] == ["alice", "5,000", "1,000", "300", "3,700"]
    assert ("admin" in root, "revoked" in root, "in force" in alice) == (True, True, True)
    figures = json.loads(run("list", workspace, "--json").output)
    assert [key["remaining_tokens"] for key in figures["keys"]] == [3700, None]


def test_revoke_takes_effect_in_a_store_that_a_server_holds_open(workspace):
    key = json.loads(run("add", workspace, "alice", "--json").output)["key"]
    with KeyStore.open(service_path(workspace)) as server:
        assert server.identify(key) is not None
        shown = run("revoke", workspace, "alice").output
        assert server.identify(key) is None
    assert "refused from the next request" in shown
    assert json.loads(run("revoke", workspace, "alice", "--json").output)["revoked_at"] is not None


def test_looking_does_not_settle_what_a_server_has_under_way(workspace):
    run("add", workspace, "alice", "--quota", 10)
    with KeyStore.open(service_path(workspace)) as server:
        server.reserve("alice", 4)
        run("list", workspace)
        server.settle("alice", reserved=4, used=1)


def test_quotas_beyond_the_budget_are_allowed_and_said(workspace):
    give_budget(workspace, 1000)
    assert "first" not in run("add", workspace, "alice", "--quota", 600).output
    assert "1,200 tokens left and the budget 1,000" in run("add", workspace, "bob", "--quota", 600).output
    assert "1,200 tokens left" in run("list", workspace).output
    assert json.loads(run("list", workspace, "--json").output)["budget_remaining_tokens"] == 1000
    run("revoke", workspace, "bob")
    assert "first" not in run("list", workspace).output


def test_a_folder_that_is_no_workspace_is_told_so(tmp_path):
    with pytest.raises(WorkspaceError, match="is not a workspace: it has no manifest"):
        run("list", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_key_in_place_of_its_name_is_refused(workspace):
    with pytest.raises(InvalidInput, match="begin with"):
        run("add", workspace, "paclm-abcdef")


def test_a_damaged_ledger_gets_the_sentence_that_the_ledger_itself_gives(workspace):
    give_budget(workspace, 1000)
    path = workspace / "curator" / "ledger.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))  # the schema is there, and no row
    with pytest.raises(LedgerError) as shown:
        invoke("ledger", "show", workspace)
    with pytest.raises(LedgerDamaged) as listed:
        run("list", workspace)
    assert str(listed.value) == str(shown.value)
