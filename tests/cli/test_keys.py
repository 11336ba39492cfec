"""`paclm keys`: shown once, listed without the key, revoked while a server has the file open."""

import os
import shutil
from functools import partial

import pytest
from typer.testing import CliRunner

from cli.commands import figures_of, invoke
from cli.ledgers import open_ledger
from paclm.cli.main import app
from paclm.errors import InvalidInput, LedgerDamaged, LedgerError, LedgerRolledBack, ServiceError, WorkspaceError
from paclm.ledger.events import Usage
from paclm.server.address import noted
from paclm.server.api_keys import KeyStore
from paclm.server.database import service_path

run = partial(invoke, "keys")
figures = partial(figures_of, "keys")
AS_TEXT_AND_JSON = pytest.mark.parametrize("options", [[], ["--json"]])


@pytest.fixture
def workspace(tmp_path):
    """As much of a workspace as the commands need: the curator's folder."""
    (tmp_path / "curator").mkdir(mode=0o700)
    return tmp_path


def give_budget(workspace, tokens):
    open_ledger(workspace, tokens * 2.0**-32).close()
    return workspace / "curator" / "ledger.sqlite"


def names_in(workspace):
    with KeyStore.open(service_path(workspace)) as store:
        return [key.name for key in store.list()]


def test_add_shows_the_key_once_with_how_to_use_it(workspace):
    shown = run("add", workspace, "ward-3", "--quota", 100_000).output
    (key,) = {word.split("=")[-1] for word in shown.split() if "paclm-" in word}
    assert "OPENAI_API_KEY=" in shown
    assert "100,000 tokens" in shown
    with KeyStore.open(service_path(workspace)) as store:
        assert store.identify(key).name == "ward-3"
    assert key not in run("list", workspace).output + run("list", workspace, "--json").output
    admin = figures("add", workspace, "root", "--admin")
    assert (admin["name"], admin["is_admin"], admin["quota_tokens"]) == ("root", True, None)
    with KeyStore.open(service_path(workspace)) as store:
        assert store.identify(admin["key"]).is_admin


def test_only_the_first_ordinary_key_warns_that_keys_are_needed_from_now_on(workspace):
    warning = "every request needs a key"
    assert warning not in run("add", workspace, "root", "--admin").output
    assert warning in run("add", workspace, "ward-3", "--json").stderr
    run("revoke", workspace, "ward-3")
    assert warning not in run("add", workspace, "ward-4").output


@pytest.mark.parametrize(("given", "tokens"), [("1k", 1000), ("2M", 2_000_000), ("1,000", 1000), ("1e3", 1000)])
def test_a_quota_is_written_like_tokens_of_plan(workspace, given, tokens):
    assert f"{tokens:,} tokens" in run("add", workspace, "alice", "--quota", given).output
    assert figures("list", workspace)["keys"][0]["quota_tokens"] == tokens


@pytest.mark.parametrize("given", ["0", "0.5", "many", "-3"])
def test_a_quota_that_is_no_number_of_tokens_is_refused_and_makes_no_key(workspace, given):
    with pytest.raises(InvalidInput, match=given):
        run("add", workspace, "alice", f"--quota={given}")
    assert names_in(workspace) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *(("", "127.0.0.1:8000"), ("port = 8117", "127.0.0.1:8117"), ("port = 0", "127.0.0.1:PORT")),
        *(('host = "0.0.0.0"', "127.0.0.1:8000"), ('host = "::1"', "[::1]:8000")),
    ],
)
def test_add_shows_the_address_in_the_settings(workspace, settings, expected):
    (workspace / "paclm.toml").write_text(f"[server]\n{settings}\n")
    shown = run("add", workspace, "ward-3").output
    assert f"OPENAI_BASE_URL=http://{expected}/v1\n" in shown
    assert "[server]" in shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:4711", "127.0.0.1:4711"),
        ("0.0.0.0:4711", "127.0.0.1:4711"),
        ("[::]:4711", "[::1]:4711"),
        ("10.0.0.7:80", "10.0.0.7:80"),
    ],
)
def test_add_shows_the_address_of_the_running_server(workspace, url, expected):
    (workspace / "paclm.toml").write_text("[server]\nport = 8117\n")
    run("add", workspace, "ward-1")
    with noted(workspace, f"http://{url}"):
        shown = run("add", workspace, "ward-2").output
        assert f"OPENAI_BASE_URL=http://{expected}/v1\n" in shown
        assert f"process {os.getpid()}" in shown
    assert "8117" in run("add", workspace, "ward-3").output


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_of_keys_that_is_not_the_running_servers_is_refused_before_a_key_is_made(workspace, tmp_path, how):
    run("add", workspace, "ward-1")
    path = service_path(workspace)
    shutil.copy(path, tmp_path / "copy")
    with KeyStore.open(path), noted(workspace, "http://127.0.0.1:4711"):
        path.unlink()
        if how == "replaced":
            shutil.copy(tmp_path / "copy", path)
        for command in (["add", workspace, "ward-2"], ["revoke", workspace, "ward-1"], ["list", workspace]):
            with pytest.raises(ServiceError, match=f"process {os.getpid()}"):
                run(*command)
        assert path.exists() == (how == "replaced")


def refused(error, *arguments):
    """Check how a command fails, and that it printed no key."""
    done = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    assert isinstance(done.exception, error)
    assert "paclm-" not in done.output + done.stderr


@AS_TEXT_AND_JSON
def test_no_key_is_made_or_shown_over_a_ledger_that_was_rolled_back(workspace, tmp_path, options):
    path = give_budget(workspace, 1000)
    shutil.copy(path, tmp_path / "monday")
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, 2**28)], b"sealed again")
    shutil.copy(tmp_path / "monday", path)
    refused(LedgerRolledBack, "add", workspace, "ward-3", *options)
    assert names_in(workspace) == []


@AS_TEXT_AND_JSON
def test_no_key_is_made_or_shown_if_the_settings_cannot_be_read(workspace, options):
    (workspace / "paclm.toml").write_text("[server\n")
    refused(WorkspaceError, "add", workspace, "ward-3", *options)
    assert not service_path(workspace).exists()


@AS_TEXT_AND_JSON
def test_a_key_that_the_file_did_not_keep_is_not_shown(workspace, tmp_path, monkeypatch, options):
    run("add", workspace, "ward-1")
    path = service_path(workspace)
    shutil.copy(path, tmp_path / "copy")
    close = KeyStore.close

    def close_and_roll_back(store):
        close(store)
        shutil.copy(tmp_path / "copy", path)

    monkeypatch.setattr(KeyStore, "close", close_and_roll_back)
    refused(ServiceError, "add", workspace, "ward-2", *options)


def test_list_shows_quota_use_and_state(workspace):
    assert "paclm keys add" in run("list", workspace).output
    run("add", workspace, "alice", "--quota", 5000)
    run("add", workspace, "root", "--admin")
    with KeyStore.open(service_path(workspace)) as store:
        store.reserve("alice", 1200)
        store.settle("alice", reserved=1200, used=1000)
        store.reserve("alice", 300)
        run("revoke", workspace, "root")
        head, alice, root = run("list", workspace).output.splitlines()
        assert [key["remaining_tokens"] for key in figures("list", workspace)["keys"]] == [3700, None]
        store.settle("alice", reserved=300, used=1)  # it would fail if the list had settled it
    assert head.split() == ["name", "quota", "used", "held", "left", "created", "state"]
    assert alice.split()[:5] == ["alice", "5,000", "1,000", "300", "3,700"]
    assert ("admin" in root, "revoked" in root, "in force" in alice) == (True, True, True)


def test_revoke_takes_effect_in_a_store_that_a_server_holds_open(workspace):
    key = figures("add", workspace, "alice")["key"]
    with KeyStore.open(service_path(workspace)) as server:
        assert server.identify(key) is not None
        assert "'alice'" in run("revoke", workspace, "alice").output
        assert server.identify(key) is None
    assert figures("revoke", workspace, "alice")["revoked_at"] is not None


def test_quotas_beyond_the_budget_are_allowed_with_a_note(workspace):
    give_budget(workspace, 1000)
    assert "1,000" not in run("add", workspace, "alice", "--quota", 600).output
    for shown in (run("add", workspace, "bob", "--quota", 600).output, run("list", workspace).output):
        assert "1,200 tokens left and the budget 1,000" in shown
    assert figures("list", workspace)["budget_remaining_tokens"] == 1000
    run("revoke", workspace, "bob")
    assert "1,000" not in run("list", workspace).output


def test_a_folder_that_is_no_workspace_and_a_key_in_place_of_its_name_are_refused(workspace):
    with pytest.raises(InvalidInput, match="paclm-"):
        run("add", workspace, "paclm-abcdef")
    shutil.rmtree(workspace / "curator")
    with pytest.raises(WorkspaceError, match="manifest"):
        run("list", workspace)
    assert list(workspace.iterdir()) == []


def test_a_damaged_ledger_gives_the_same_error_as_the_ledger_itself(workspace):
    path = give_budget(workspace, 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))  # the schema is there, and no row
    with pytest.raises(LedgerError) as shown:
        invoke("ledger", "show", workspace)
    with pytest.raises(LedgerDamaged) as listed:
        run("list", workspace)
    assert str(listed.value) == str(shown.value)


def test_keys_beside_a_ledger_in_postgresql_are_in_its_database(workspace, database, monkeypatch):
    monkeypatch.setenv("PACLM_LEDGER", database)
    key = figures("add", workspace, "alice", "--quota", 5000)["key"]
    with KeyStore.open(database) as server, noted(workspace, "http://127.0.0.1:4711"):
        assert server.identify(key).name == "alice"
        assert [found["remaining_tokens"] for found in figures("list", workspace)["keys"]] == [5000]
        assert f"process {os.getpid()}" in run("add", workspace, "bob").output
        run("revoke", workspace, "alice")
        assert server.identify(key) is None
        monkeypatch.delenv("PACLM_LEDGER")
        with pytest.raises(ServiceError, match="PACLM_LEDGER"):  # they would go into a file that nobody reads
            run("add", workspace, "carol")
    assert not service_path(workspace).exists()
