"""`paclm ledger`: figures as in the contract, bounds at the committed total only, and a question before extending."""

import resource
import sqlite3

import pytest

from cli.ledgers import PRICE, figures, make_used_workspace, open_ledger, run, write_manifest, write_total
from paclm.cli.ledger import draw_bars
from paclm.errors import InvalidInput, LedgerBusy, LedgerFull, LedgerMissing, WorkspaceError
from paclm.ledger.events import Checkpoint, Usage
from paclm.privacy.bounds import format_bound, success_bound


@pytest.fixture
def workspace(tmp_path):
    return make_used_workspace(tmp_path / "clinic")


def test_show_prints_the_figures_of_the_contract(workspace):
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
        "verified_through": 6,
        "trusted_through": 0,
        "not_checked": "No MAC was checked. To check every row with the key: paclm ledger verify",
    }
    assert list(figures("show", workspace).items()) == list(expected.items())


def test_show_says_that_a_checkpoint_was_believed_without_the_key(workspace):
    """Whoever can write the file can forge one, and change what it covers."""
    with open_ledger(workspace) as ledger:
        forged = Checkpoint(ledger.head.seq, ledger.head.digest, ledger.keys.current, bytes(32))
        ledger.store.set_checkpoint(forged)
        ledger.commit([Usage("bob", 1, 0, 1, PRICE)], b"more")
    shown = figures("show", workspace)
    assert [shown[name] for name in ("intact", "trusted_through", "verified_through")] == [True, 6, 7]
    assert "Rows up to 6 were not checked" in shown["not_checked"]
    assert "Rows up to 6 were not checked" in run("show", workspace).output
    assert "checkpoint" in figures("verify", workspace)["problem"]


def test_show_lists_spending_by_day_and_key_with_bars_and_never_a_bound_at_the_spend(workspace):
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("", 2, 1, 2, 2 * PRICE)], b"more")
    shown = run("show", workspace).output
    for text in ("2026-11-15", "alice", "bob", "(no name)", "█", "2^-10", "52.21%", "1.21%", "a record was"):
        assert text in shown
    assert format_bound(success_bound(62 * 2.0**-32, 1 / 2)) not in shown
    assert shown.endswith("\nWhether a record is in the corpus at all is not hidden.\n")


def test_show_and_extend_name_the_group_if_the_workspace_has_groups(workspace, tmp_path):
    write_manifest(workspace, worlds=128, group_by="patient")
    unit = "the records of one patient were"
    assert unit in run("show", workspace).output
    run("backup", workspace, tmp_path / "one.sqlite")  # which knows no groups
    assert "a record was" in run("show", tmp_path / "one.sqlite").output
    write_total(workspace, "2^-9")
    assert unit in run("extend", workspace, input="n\n").output


def test_show_and_backup_report_the_witness_or_that_there_is_none(workspace, tmp_path, monkeypatch):
    assert "PACLM_WITNESS=" in run("show", workspace).output
    assert "No witness" in run("backup", workspace, tmp_path / "one.sqlite").output
    with open_ledger(workspace, witness=tmp_path / "witness") as ledger:
        name = ledger.state.witness
    assert figures("show", workspace)["witness"] == name
    assert f"{name}, at the place to set in PACLM_WITNESS" in run("show", workspace).output
    monkeypatch.setenv("PACLM_WITNESS", str(tmp_path / "witness"))
    assert f"{name}, at {tmp_path / 'witness'}" in run("show", workspace).output
    assert "No witness" not in run("backup", workspace, tmp_path / "two.sqlite").output


def test_show_and_verify_find_a_row_that_was_edited(workspace):
    db = sqlite3.connect(workspace / "curator" / "ledger.sqlite")
    (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'events_no_update'").fetchone()
    db.execute("DROP TRIGGER events_no_update")
    db.execute("UPDATE events SET body = replace(body, 'alice', 'carol') WHERE seq = 3")
    db.execute(sql)
    db.commit()
    db.close()
    assert figures("show", workspace)["intact"] is False
    assert "NOT INTACT: Row 3" in run("show", workspace).output
    assert run("verify", workspace).exit_code == 1
    found = figures("verify", workspace)
    assert (found["bad_row"], found["verified_through"]) == (3, 2)


def test_verify_checks_macs_only_with_the_key_and_show_needs_neither_key_nor_lock(workspace):
    found = figures("verify", workspace)
    assert (found["intact"], found["macs_checked"], found["rows"], found["verified_through"]) == (True, True, 6, 6)
    assert not figures("verify", workspace, "--without-key")["macs_checked"]
    with open_ledger(workspace):
        (workspace / "curator" / "key").unlink()
        assert figures("show", workspace)["intact"]


def test_a_workspace_without_a_ledger_is_refused_before_any_question(workspace):
    (workspace / "curator" / "ledger.sqlite").unlink()
    with pytest.raises(WorkspaceError, match="manifest"):
        run("show", workspace)
    write_manifest(workspace)
    for command in ("show", "verify", "extend", "adopt", "replace-witness"):
        with pytest.raises(LedgerMissing):
            run(command, workspace)


def test_show_reports_a_backup_that_must_be_adopted(workspace, tmp_path):
    run("backup", workspace, tmp_path / "copy.sqlite")
    (tmp_path / "copy.sqlite").replace(workspace / "curator" / "ledger.sqlite")
    assert "paclm ledger adopt" in run("show", workspace).output
    assert figures("verify", workspace)["is_copy"]


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_full_disk_is_neither_intact_nor_damaged(workspace, command):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # SQLite's side file cannot grow
    try:
        with pytest.raises(LedgerFull):
            run(command, workspace)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run(command, workspace).exit_code == 0


def test_extend_shows_both_bounds_and_asks(workspace):
    write_total(workspace, "2^-9")
    declined = run("extend", workspace, input="n\n")
    assert declined.exit_code == 1
    for text in ("2^-10 → 2^-9", "52.2094% → 53.1240%", "1.2012% → 1.3923%"):
        assert text in declined.output
    assert figures("show", workspace)["total_nats"] == 2.0**-10
    assert run("extend", workspace, input="y\n").exit_code == 0
    after = figures("show", workspace)
    assert (after["total_nats"], after["mia_bound"]) == (2.0**-9, success_bound(2.0**-9, 1 / 2))
    write_total(workspace, "2^-8")
    extended = figures("extend", workspace, "--yes")
    names = ("total_nats", "mia_bound", "world_id_bound")
    assert list(extended) == [f"{age}_{name}" for name in names for age in ("old", "new")]
    assert extended["old_mia_bound"] < extended["new_mia_bound"] == success_bound(2.0**-8, 1 / 2)


@pytest.mark.parametrize("settings", ['[mechanism]\nper_token = "2^-32"\ntotal = "2^-10"\n', "[mechanism]\n"])
def test_extend_needs_a_larger_total_in_the_settings_and_a_ledger_that_is_not_in_use(workspace, settings):
    (workspace / "paclm.toml").write_text(settings)
    with pytest.raises(InvalidInput, match=r"paclm\.toml"):
        run("extend", workspace, "--yes")
    write_total(workspace, "2^-9")
    with open_ledger(workspace), pytest.raises(LedgerBusy):
        run("extend", workspace, "--yes")


@pytest.mark.parametrize(
    ("command", "options"), [("extend", ()), ("adopt", ()), ("replace-witness", ("/nowhere/witness",))]
)
def test_without_an_answer_nothing_is_done_and_the_option_to_skip_the_question_is_named(workspace, command, options):
    write_total(workspace, "2^-9")
    with pytest.raises(InvalidInput, match="--yes"):
        run(command, workspace, *options)
    assert figures("verify", workspace)["rows"] == 6


def test_there_is_a_bar_for_each_span_of_time():
    assert draw_bars([("2026-11-20T08", 1)]) == "█"
    assert draw_bars([("2026-11-20T08", 1), ("2026-11-20T10", 8)]) == "▁ █"
    long = draw_bars([("2026-01-01T00", 5), ("2026-12-31T23", 5)])
    assert (len(long), long.strip("█ ")) == (60, "")
