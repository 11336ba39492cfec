"""`paclm ledger move`: asks, says what to set, takes API keys along, and every command then works at the new place."""

import pytest

from cli.commands import figures_of, invoke
from cli.ledgers import PRICE, figures, make_used_workspace, open_ledger, run, write_manifest, write_total
from paclm.cli.ledger_move import has_password
from paclm.errors import InvalidInput, LedgerMoved
from paclm.ledger.address import Holding, promises_in, record_promise, take_hold
from paclm.ledger.dp_log import DpLog
from paclm.ledger.events import Usage
from paclm.worlds.layout import dp_log_path
from paclm.worlds.settings import ledger_config


@pytest.fixture
def workspace(tmp_path):
    return make_used_workspace(tmp_path / "clinic")


@pytest.fixture
def bare(database, monkeypatch):
    """The database's address without its password, which is in the environment."""
    head, _, tail = database.partition("@")
    user, _, password = head.removeprefix("postgresql://").partition(":")
    monkeypatch.setenv("PGPASSWORD", password)
    return f"postgresql://{user}@{tail}"


def test_there_and_back_with_everything_and_the_settings_written(workspace, bare, tmp_path):
    write_manifest(workspace, worlds=128)
    key = invoke("keys", "add", workspace, "alice", "--quota", "100").stdout
    before = figures("show", workspace)
    assert run("move", workspace, "--to", bare, input="n\n").exit_code == 1
    moved = figures("move", workspace, "--to", bare, "--write", "--yes")
    assert (moved["row"], moved["is_written"]) == (8, True)
    assert ledger_config(workspace).url == bare
    assert figures("show", workspace) == before | {"verified_through": 8}
    assert figures("verify", workspace)["macs_checked"]
    write_total(workspace, "2^-9", f'[ledger]\nurl = "{bare}"\n')
    run("extend", workspace, "--yes")
    run("backup", workspace, tmp_path / "copy.sqlite")
    run("replace-witness", workspace, tmp_path / "witness", "--yes")
    with open_ledger(workspace, witness=tmp_path / "witness") as ledger:
        ledger.commit([Usage("bob", 5, 0, 5, 5 * PRICE)], b"more")
    assert [key["name"] for key in figures_of("keys", "list", workspace)["keys"]] == ["alice"]
    back = run("move", workspace, "--to", "sqlite", "--yes", "--witness", tmp_path / "witness")
    assert "Take url out of [ledger]" in back.output
    with pytest.raises(LedgerMoved, match="name none"):
        run("show", workspace)
    with pytest.raises(LedgerMoved):
        invoke("keys", "revoke", workspace, "alice")
    write_total(workspace, "2^-9")
    assert figures("show", workspace)["private_tokens"] == before["private_tokens"] + 5
    assert [key["quota_tokens"] for key in figures_of("keys", "list", workspace)["keys"]] == [100]
    assert figures("verify", workspace)["intact"]
    moves = [step["text"] for step in figures("explain", workspace)["history"] if step["kind"] == "moved"]
    assert len(moves) == 2
    assert key not in str(moves)


def test_a_password_is_neither_written_nor_shown(workspace, database):
    assert has_password(database)
    with pytest.raises(InvalidInput, match="password"):
        run("move", workspace, "--to", database, "--write", "--yes")
    password = database.removeprefix("postgresql://").partition("@")[0].partition(":")[2]
    moved = run("move", workspace, "--to", database, "--yes")
    assert "Set PACLM_LEDGER to the address that you passed" in " ".join(moved.output.split())
    with pytest.raises(LedgerMoved) as refused:
        run("show", workspace)
    assert password not in moved.output + str(refused.value)
    with pytest.raises(InvalidInput, match="--to must be"):
        run("move", workspace, "--to", "/somewhere/else.sqlite", "--yes")


def test_promises_that_were_served_are_on_record_at_the_new_place(workspace, bare):
    """Also one that another host served, which the log of this one lacks."""
    log = DpLog(dp_log_path(workspace))
    log.append("served")
    log.append("mixed", accepted="elsewhere")  # with another workspace: nothing was accepted here
    run("move", workspace, "--to", bare, "--write", "--yes")
    assert promises_in(bare) == {"served"}
    hold = take_hold(bare, Holding())
    record_promise(bare, "mixed", hold.epoch)
    hold.release()
    run("move", workspace, "--to", "sqlite", "--yes")
    assert [event["kind"] for event in log.events()] == ["served", "mixed", "mixed"]


def test_a_backup_of_a_database_brings_what_other_hosts_served_into_the_log_beside_it(workspace, bare, tmp_path):
    run("move", workspace, "--to", bare, "--write", "--yes")
    hold = take_hold(bare, Holding())
    record_promise(bare, "served", hold.epoch)
    hold.release()
    done = run("backup", workspace, tmp_path / "copy.sqlite")
    assert [event["kind"] for event in DpLog(dp_log_path(workspace)).events()] == ["served"]
    assert "dp.jsonl: back it up together" in " ".join(done.output.split())
