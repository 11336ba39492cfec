"""`paclm ledger`: figures as in the contract, bounds at the committed total only, and a question before extending."""

from __future__ import annotations

import json
import resource
import sqlite3

import pytest

from cli.ledgers import PRICE, make_used_workspace, open_ledger, run, write_total
from paclm.cli.ledger import picture
from paclm.errors import (
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerFull,
    LedgerMissing,
    WorkspaceError,
)
from paclm.ledger.events import Usage
from paclm.privacy.bounds import format_bound, success_bound
from paclm.worlds.manifest import Manifest


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)
    return make_used_workspace(tmp_path / "clinic")


def test_show_prints_the_figures_of_the_contract(workspace):
    figures = json.loads(run("show", workspace, "--json").output)
    expected = {
        "private_tokens": 60,
        "public_tokens": 15,
        "dissent_tokens": 10,
        "charged_tokens": 60,
        "spent_nats": 60 * 2.0**-32,
        "total_nats": 2.0**-10,
        "remaining_tokens": 2**22 - 60,
        "mia_bound": success_bound(2.0**-10, 1 / 2),
        "world_id_bound": success_bound(2.0**-10, 1 / 128),
        "witness": None,
        "intact": True,
    }
    assert list(figures.items()) == list(expected.items())


def test_show_tells_people_by_day_by_key_and_in_a_picture(workspace):
    shown = run("show", workspace).output
    for text in (
        "Spent so far",
        "2026-11-15",
        "alice",
        "bob",
        "█",
        "committed total of 2^-10",
        "52.21%",
        "1.21%",
        "intact",
    ):
        assert text in shown
    assert format_bound(success_bound(60 * 2.0**-32, 1 / 2)) not in shown  # never a bound at the spend
    assert "no attack on whether a record was in the secretly drawn half" in shown
    assert shown.endswith("\nWhether a record is in the corpus at all is not hidden.\n")


def test_show_and_extend_speak_of_the_group_where_the_workspace_has_groups(workspace, tmp_path):
    arguments = {"worlds": 128, "group_by": "patient"}
    Manifest(format=1, id="", created="", versions={}, arguments=arguments, summary={}, files={}, base={}).write(
        workspace
    )
    unit = "whether the records of one patient were in the"
    assert f"no attack on {unit} secretly drawn half" in run("show", workspace).output
    run("backup", workspace, tmp_path / "one.sqlite")  # which knows of no groups
    assert "no attack on whether a record was in" in run("show", tmp_path / "one.sqlite").output
    write_total(workspace, "2^-9")
    assert unit in run("extend", workspace, "--yes").output


def test_show_and_backup_say_whether_there_is_a_witness(workspace, tmp_path, monkeypatch):
    assert "Witness         none: a folder that is put back" in run("show", workspace).output
    assert "No witness: a folder that is put back" in run("backup", workspace, tmp_path / "one.sqlite").output
    with open_ledger(workspace, witness=tmp_path / "witness") as ledger:
        name = ledger.state.witness
    assert json.loads(run("show", workspace, "--json").output)["witness"] == name
    assert f"{name}; where it is, PACLM_WITNESS must say" in run("show", workspace).output
    monkeypatch.setenv("PACLM_WITNESS", str(tmp_path / "witness"))
    assert f"{name}, at {tmp_path / 'witness'}" in run("show", workspace).output
    assert "No witness" not in run("backup", workspace, tmp_path / "two.sqlite").output


def test_show_works_without_the_key_and_while_the_ledger_is_in_use(workspace):
    with open_ledger(workspace):
        (workspace / "curator" / "key").unlink()
        assert json.loads(run("show", workspace, "--json").output)["intact"]


def test_show_and_verify_say_so_when_a_row_was_edited(workspace):
    db = sqlite3.connect(workspace / "curator" / "ledger.sqlite")
    (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'events_no_update'").fetchone()
    db.execute("DROP TRIGGER events_no_update")
    db.execute("UPDATE events SET body = replace(body, 'alice', 'carol') WHERE seq = 3")
    db.execute(sql)
    db.commit()
    db.close()
    assert json.loads(run("show", workspace, "--json").output)["intact"] is False
    assert "NOT INTACT: Row 3" in run("show", workspace).output
    done = run("verify", workspace, "--json")
    assert done.exit_code == 1
    assert json.loads(done.output)["bad_row"] == 3


def test_verify_checks_macs_with_the_key_and_says_when_it_did_not(workspace):
    figures = json.loads(run("verify", workspace, "--json").output)
    assert (figures["intact"], figures["macs_checked"], figures["rows"]) == (True, True, 6)
    assert "without the key no MACs" in run("verify", workspace, "--without-key").output


def test_a_workspace_without_a_ledger_is_told_so(workspace):
    (workspace / "curator" / "ledger.sqlite").unlink()
    with pytest.raises(WorkspaceError, match="is not a workspace: it has no manifest"):
        run("show", workspace)
    Manifest(format=1, id="", created="", versions={}, arguments={}, summary={}, files={}, base={}).write(workspace)
    for command in ("show", "verify", "extend", "adopt", "replace-witness"):
        with pytest.raises(LedgerMissing, match="first generates a token"):
            run(command, workspace, *(["--yes"] if command not in ("show", "verify") else []))


def test_show_says_that_a_backup_must_be_adopted(workspace, tmp_path):
    run("backup", workspace, tmp_path / "copy.sqlite")
    (tmp_path / "copy.sqlite").replace(workspace / "curator" / "ledger.sqlite")
    assert "This is a backup copy: paclm ledger adopt is needed" in run("show", workspace).output


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_full_disk_speaks_neither_for_nor_against_a_ledger(workspace, command):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # SQLite's side file cannot grow
    try:
        with pytest.raises(LedgerFull, match="SQLITE_IOERR_SHMSIZE"):
            run(command, workspace)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run(command, workspace).exit_code == 0


def test_a_ledger_that_cannot_be_read_is_an_error(workspace):
    (workspace / "curator" / "ledger.sqlite").write_bytes(b"nothing like a database" * 100)
    with pytest.raises(LedgerError, match="not a whole database"):
        run("show", workspace)


def test_extend_states_both_bounds_and_asks(workspace):
    write_total(workspace, "2^-9")
    declined = run("extend", workspace, input="n\n")
    assert declined.exit_code == 1
    for text in ("2^-10 → 2^-9", "52.2094% → 53.1240%", "1.2012% → 1.3923%", "also for what has left already"):
        assert text in declined.output
    assert json.loads(run("show", workspace, "--json").output)["total_nats"] == 2.0**-10
    assert run("extend", workspace, input="y\n").exit_code == 0
    after = json.loads(run("show", workspace, "--json").output)
    assert (after["total_nats"], after["mia_bound"]) == (2.0**-9, success_bound(2.0**-9, 1 / 2))


def test_extend_without_a_question_gives_the_figures(workspace):
    write_total(workspace, "2^-9")
    figures = json.loads(run("extend", workspace, "--yes", "--json").output)
    assert figures["old_mia_bound"] < figures["new_mia_bound"] == success_bound(2.0**-9, 1 / 2)


def test_extend_takes_the_new_total_from_the_settings(workspace):
    with pytest.raises(InvalidInput, match="Write the larger total into"):
        run("extend", workspace, "--yes")
    (workspace / "paclm.toml").write_text("[mechanism]\n")
    with pytest.raises(InvalidInput, match="sets no total"):
        run("extend", workspace, "--yes")


def test_extend_is_refused_while_the_ledger_is_in_use(workspace):
    write_total(workspace, "2^-9")
    with open_ledger(workspace), pytest.raises(LedgerBusy, match="One secret has one writer"):
        run("extend", workspace, "--yes")


@pytest.mark.parametrize(
    ("command", "options"), [("extend", ()), ("adopt", ()), ("replace-witness", ("/nowhere/witness",))]
)
def test_where_nobody_can_answer_the_way_without_a_question_is_named(workspace, command, options):
    write_total(workspace, "2^-9")
    with pytest.raises(InvalidInput, match=r"Nobody answered.* add --yes"):
        run(command, workspace, *options)
    assert json.loads(run("verify", workspace, "--json").output)["rows"] == 6


def test_the_picture_has_a_bar_for_each_span_of_time():
    assert picture([("2026-11-20T08", 1)]) == "█"
    assert picture([("2026-11-20T08", 1), ("2026-11-20T10", 8)]) == "▁ █"
    long = picture([("2026-01-01T00", 5), ("2026-12-31T23", 5)])
    assert (len(long), long.strip("█ ")) == (60, "")


def test_show_has_a_word_for_what_was_charged_without_a_name(workspace):
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("", 2, 1, 2, 2 * PRICE)], b"more")
    rows = run("show", workspace).stdout.splitlines()
    assert any(row.split()[:3] == ["(no", "name)", "2"] for row in rows)
