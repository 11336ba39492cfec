"""`paclm ledger`: figures as in the contract, bounds at the committed total only, and a question before extending."""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from cli.commands import invoke
from paclm.cli.ledger import picture
from paclm.config import MechanismConfig
from paclm.curator.keys import keys_at_hand, load_keys, new_key, write_key
from paclm.curator.sealed import SealedFile, Sealing
from paclm.curator.secret import Secret
from paclm.errors import (
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerFull,
    LedgerMissing,
    LedgerRolledBack,
    WorkspaceError,
)
from paclm.ledger.chain import key_name
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.verify import signing_key
from paclm.privacy.bounds import format_bound, success_bound
from paclm.worlds.manifest import Manifest

PRICE = 2**28


run = partial(invoke, "ledger")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """As much of a workspace as the commands need: settings, a key and a ledger with five days of use."""
    for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_WITNESS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "clinic"
    (folder / "curator").mkdir(parents=True)
    (folder / "curator").chmod(0o700)
    write_total(folder, "2^-10")
    now = datetime(2026, 11, 10, 8, tzinfo=UTC)
    with open_ledger(folder, clock=lambda: now) as ledger:
        for day in range(5):
            now += timedelta(days=1)
            tokens = 4 * (day + 1)
            ledger.commit(
                [Usage("alice", tokens, day, tokens, tokens * PRICE), Usage("bob", public_tokens=3)], b"%d" % day
            )
    return folder


def open_ledger(folder, **changes):
    key = load_keys(folder / "curator", may_create=True).mac.reveal()
    path = folder / "curator" / "ledger.sqlite"
    if path.exists():
        return Ledger.open(path, key, **changes)
    settings = MechanismConfig(per_token=2.0**-32, total=2.0**-10)
    return Ledger.create(
        path, key, workspace="w", num_worlds=128, settings=settings, sealed_belief=b"sealed", **changes
    )


def write_total(folder, total):
    (folder / "paclm.toml").write_text(f'[mechanism]\nper_token = "2^-32"\ntotal = "{total}"\n')


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
        with pytest.raises(LedgerFull, match=r"^The ledger could not be checked.* no room on the disk"):
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


def test_a_backup_is_adopted_with_the_witness_or_at_the_price_of_the_budget(workspace, tmp_path, monkeypatch):
    path, copy, witness = workspace / "curator" / "ledger.sqlite", tmp_path / "copy.sqlite", tmp_path / "witness"
    open_ledger(workspace, witness=witness).close()
    run("backup", workspace, copy)
    with open_ledger(workspace, witness=witness) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, PRICE)], b"newest")
    path.write_bytes(copy.read_bytes())
    with pytest.raises(LedgerRolledBack):
        open_ledger(workspace, witness=witness)
    monkeypatch.setenv("PACLM_WITNESS", str(witness))
    assert "taken from the witness" in run("adopt", workspace).output
    assert "Head: row 9 (1 lost before a restore), " in run("verify", workspace).output
    assert json.loads(run("verify", workspace, "--json").output)["lost_rows"] == 1
    with open_ledger(workspace, witness=witness) as ledger:
        assert (ledger.sealed_belief, ledger.account.tokens) == (b"newest", 61)
    monkeypatch.delenv("PACLM_WITNESS")
    assert run("adopt", workspace, input="n\n").exit_code == 1
    assert "counts as spent" in run("adopt", workspace, "--yes").output
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] == 0


def test_backup_says_what_must_be_moved_away_before_the_copy_is_put_back(workspace, tmp_path):
    said = run("backup", workspace, tmp_path / "copy.sqlite").stdout
    path = workspace / "curator" / "ledger.sqlite"
    steps = ("stop what serves", f"move {path} with its -wal and -shm", "together", f"as {path}", "paclm ledger adopt ")
    places = [said.index(step) for step in steps]
    assert places == sorted(places)
    assert said.endswith(f"paclm ledger adopt {workspace}\n")


def test_a_ledger_that_serves_as_it_is_is_not_charged_by_a_script(workspace):
    with pytest.raises(InvalidInput, match=r"no backup copy.* serves as it is.* --put-back --yes$"):
        run("adopt", workspace, "--yes")
    declined = run("adopt", workspace, input="n\n")
    assert declined.exit_code == 1
    assert declined.output.index("serves as it is") < declined.output.index("Adopt?")
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] > 0


@pytest.mark.parametrize("how", [{"options": ("--put-back", "--yes")}, {"options": (), "input": "y\n"}])
def test_a_folder_that_was_put_back_as_a_whole_can_be_adopted(workspace, how):
    """Lock and all: nothing shows it, and the operator knows."""
    assert "counts as spent" in run("adopt", workspace, *how["options"], input=how.get("input")).output
    assert json.loads(run("show", workspace, "--json").output)["remaining_tokens"] == 0


def test_a_file_without_its_lock_is_adopted_as_ever(workspace):
    """Copied by hand to another place: nobody remembers its newest row."""
    (workspace / "curator" / "ledger.lock").unlink()
    said = run("adopt", workspace, "--yes").output
    assert "counts as spent" in said
    assert "serves as it is" not in said


def test_a_copy_put_over_a_ledger_that_was_killed_is_not_charged_by_a_script(workspace, tmp_path):
    """The log that was left there belongs to the other file: it brings the newest rows back."""
    path, copy = workspace / "curator" / "ledger.sqlite", tmp_path / "copy.sqlite"
    killed = tmp_path / "killed"
    run("backup", workspace, copy)
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("alice", 1, 1, 1, PRICE)], b"newest")
        shutil.copytree(path.parent, killed)  # as a kill would leave it
    shutil.rmtree(path.parent)
    shutil.move(killed, path.parent)
    path.write_bytes(copy.read_bytes())
    with pytest.raises(InvalidInput, match="serves as it is"):
        run("adopt", workspace, "--yes")
    with open_ledger(workspace) as ledger:
        assert ledger.sealed_belief == b"newest"


@pytest.mark.parametrize(
    ("command", "options"), [("extend", ()), ("adopt", ()), ("replace-witness", ("/nowhere/witness",))]
)
def test_where_nobody_can_answer_the_way_without_a_question_is_named(workspace, command, options):
    write_total(workspace, "2^-9")
    with pytest.raises(InvalidInput, match=r"Nobody answered.* add --yes"):
        run(command, workspace, *options)
    assert json.loads(run("verify", workspace, "--json").output)["rows"] == 6


def restored_from_before_an_extension(workspace, copy):
    """A backup, then a larger total, then the backup put back in place."""
    run("backup", workspace, copy)
    write_total(workspace, "2^-6")
    run("extend", workspace, "--yes")
    (workspace / "curator" / "ledger.sqlite").write_bytes(copy.read_bytes())


def bound_shown(workspace):
    return json.loads(run("show", workspace, "--json").output)["mia_bound"]


def test_adopting_without_a_witness_states_the_bound_at_the_total_of_the_settings(workspace, tmp_path):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    run("adopt", workspace, "--yes")
    assert bound_shown(workspace) == success_bound(2.0**-6, 1 / 2)


@pytest.mark.parametrize(("given", "bound_at"), [("2^-8", 2.0**-6), ("2^-4", 2.0**-4)])
def test_of_the_total_given_and_that_of_the_settings_the_larger_counts(workspace, tmp_path, given, bound_at):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    run("adopt", workspace, "--yes", "--largest-total", given)
    assert bound_shown(workspace) == success_bound(bound_at, 1 / 2)


@pytest.mark.parametrize("settings", [None, "[mechanism", "[mechanism]\n"])
def test_adopting_without_a_witness_needs_to_know_the_largest_total(workspace, tmp_path, settings):
    restored_from_before_an_extension(workspace, tmp_path / "copy.sqlite")
    (workspace / "paclm.toml").unlink()
    if settings is not None:
        (workspace / "paclm.toml").write_text(settings)
    with pytest.raises(InvalidInput, match="name that total with --largest-total"):
        run("adopt", workspace, "--yes")
    run("adopt", workspace, "--yes", "--largest-total", "2^-6")
    assert bound_shown(workspace) == success_bound(2.0**-6, 1 / 2)


@pytest.fixture
def exchanged(workspace):
    """An exchange of keys that ends whenever the test says: secret.json as it is meanwhile, and both keys."""
    folder, file = workspace / "curator", SealedFile(workspace / "curator")
    old, secret = load_keys(folder, may_create=False), Secret.draw(128)
    write_key(folder / "key.new", new_key())
    new = keys_at_hand(folder)[1]
    after = Sealing.make(secret, new, "w", "ledger", [old])
    file.write({old.id: Sealing.make(secret, old, "w", "ledger"), new.id: after})

    def until(step):
        if step == "rotated":
            with open_ledger(workspace) as ledger:
                ledger.rotate_key(new.mac.reveal())
        if step == "sealed":
            file.write({new.id: after})

    return until


@pytest.mark.parametrize("steps", [(), ("rotated",), ("rotated", "sealed")], ids=["before", "during", "nearly done"])
def test_after_an_exchange_of_keys_was_cut_short_the_key_in_force_is_used(workspace, exchanged, steps):
    for step in steps:
        exchanged(step)
    figures = json.loads(run("verify", workspace, "--json").output)
    assert (figures["intact"], figures["macs_checked"]) == (True, True)
    write_total(workspace, "2^-9")
    assert run("extend", workspace, "--yes").exit_code == 0
    assert json.loads(run("verify", workspace, "--json").output)["intact"]


def test_a_backup_from_before_an_exchange_of_keys_is_adopted_under_the_new_key(workspace, exchanged, tmp_path):
    run("backup", workspace, tmp_path / "copy.sqlite")
    exchanged("rotated")
    exchanged("sealed")
    (workspace / "curator" / "ledger.sqlite").write_bytes((tmp_path / "copy.sqlite").read_bytes())
    assert "counts as spent" in run("adopt", workspace, "--yes").output
    new = keys_at_hand(workspace / "curator")[1]
    assert signing_key(workspace / "curator" / "ledger.sqlite") == key_name(new.mac.reveal())
    assert json.loads(run("verify", workspace, "--json").output)["intact"]


def test_a_lost_witness_is_replaced_after_a_question(workspace, tmp_path):
    open_ledger(workspace, witness=tmp_path / "old").close()
    assert run("replace-witness", workspace, tmp_path / "new", input="n\n").exit_code == 1
    assert "is now" in run("replace-witness", workspace, tmp_path / "new", input="y\n").output
    open_ledger(workspace, witness=tmp_path / "new").close()


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
