"""`paclm keys`: shown once, listed without the key, refused at once, also while a server has the file open."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest
from typer.testing import CliRunner

from cli.commands import invoke
from paclm.cli.main import app
from paclm.config import MechanismConfig
from paclm.curator.master_key import load_keys
from paclm.errors import InvalidInput, LedgerDamaged, LedgerError, LedgerRolledBack, ServiceError, WorkspaceError
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.server.address import noted
from paclm.server.api_keys import KeyStore, service_path

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


def test_the_first_ordinary_key_says_that_keys_are_needed_from_now_on(workspace):
    said = "From now on every request needs a key"
    assert said not in run("add", workspace, "root", "--admin").output
    first = run("add", workspace, "ward-3", "--json")
    assert said in first.stderr
    assert json.loads(first.stdout)["name"] == "ward-3"
    run("revoke", workspace, "ward-3")
    assert said not in run("add", workspace, "ward-4").output  # it has been so since the other one


@pytest.mark.parametrize(("given", "tokens"), [("1k", 1000), ("2M", 2_000_000), ("1,000", 1000), ("1e3", 1000)])
def test_a_quota_is_written_as_plan_writes_tokens(workspace, given, tokens):
    assert f"{tokens:,} tokens in all" in run("add", workspace, "alice", "--quota", given).output
    assert json.loads(run("list", workspace, "--json").output)["keys"][0]["quota_tokens"] == tokens


@pytest.mark.parametrize("given", ["0", "0.5", "many", "-3"])
def test_a_quota_that_is_no_number_of_tokens_is_refused_and_makes_no_key(workspace, given):
    with pytest.raises(InvalidInput, match=given):
        run("add", workspace, "alice", f"--quota={given}")
    assert json.loads(run("list", workspace, "--json").output)["keys"] == []


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
    assert "No server of this workspace is running" in shown
    assert "as set in [server]" in shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:4711", "http://127.0.0.1:4711/v1"),
        ("http://0.0.0.0:4711", "http://127.0.0.1:4711/v1"),
        ("http://[::]:4711", "http://[::1]:4711/v1"),
        ("http://10.0.0.7:80", "http://10.0.0.7:80/v1"),
    ],
)
def test_add_names_the_address_of_the_server_that_runs(workspace, url, expected):
    (workspace / "paclm.toml").write_text("[server]\nport = 8117\n")
    run("add", workspace, "ward-1")
    with noted(workspace, url):
        shown = run("add", workspace, "ward-2").output
        assert f"OPENAI_BASE_URL={expected}\n" in shown
        assert f"running server (process {os.getpid()})" in shown
    assert "8117" in run("add", workspace, "ward-3").output


@pytest.mark.parametrize("how", ["put back", "removed"])
def test_a_file_of_keys_that_is_not_the_running_servers_is_refused_before_a_key_is_made(workspace, tmp_path, how):
    run("add", workspace, "ward-1")
    path = service_path(workspace)
    shutil.copy(path, tmp_path / "copy")
    with KeyStore.open(path), noted(workspace, "http://127.0.0.1:4711"):
        path.unlink()
        if how == "put back":
            shutil.copy(tmp_path / "copy", path)
        for command in (["add", workspace, "ward-2"], ["revoke", workspace, "ward-1"], ["list", workspace]):
            with pytest.raises(ServiceError, match="would reach no server"):
                run(*command)
        assert path.exists() == (how == "put back")


def shown_by(*arguments):
    """All that a command printed, and how it failed."""
    done = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    return done.output + done.stderr, done.exception


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_key_is_made_or_shown_over_a_ledger_that_was_put_back(workspace, tmp_path, options):
    give_budget(workspace, 1000)
    path = workspace / "curator" / "ledger.sqlite"
    shutil.copy(path, tmp_path / "monday")
    with Ledger.open(path, load_keys(workspace / "curator", may_create=False).mac.reveal()) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, 2**28)], b"sealed anew")
    shutil.copy(tmp_path / "monday", path)
    shown, error = shown_by("add", workspace, "ward-3", *options)
    assert isinstance(error, LedgerRolledBack)
    assert "paclm-" not in shown
    with KeyStore.open(service_path(workspace)) as store:
        assert store.list() == []


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_key_is_made_or_shown_where_the_settings_cannot_be_read(workspace, options):
    (workspace / "paclm.toml").write_text("[server\n")
    shown, error = shown_by("add", workspace, "ward-3", *options)
    assert isinstance(error, WorkspaceError)
    assert "paclm-" not in shown
    assert not service_path(workspace).exists()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_key_that_the_file_did_not_keep_is_not_shown(workspace, tmp_path, monkeypatch, options):
    run("add", workspace, "ward-1")
    path = service_path(workspace)
    shutil.copy(path, tmp_path / "copy")
    close = KeyStore.close

    def put_back(store):
        close(store)
        shutil.copy(tmp_path / "copy", path)

    monkeypatch.setattr(KeyStore, "close", put_back)
    shown, error = shown_by("add", workspace, "ward-2", *options)
    assert isinstance(error, ServiceError)
    assert "not there when the file is read again" in str(error)
    assert "paclm-" not in shown


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
    key = json.loads(run("add", workspace, "alice", "--json").stdout)["key"]
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
