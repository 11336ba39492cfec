"""`paclm plan` as a user types it."""

from __future__ import annotations

import dataclasses
import json
import tomllib

import pytest
from typer.testing import CliRunner

import paclm
from paclm.cli.main import app
from paclm.config import MechanismConfig, TrainingConfig, read_settings
from paclm.curator.master_key import load_keys
from paclm.errors import InvalidInput, LedgerError, WorkspaceError
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import backup
from paclm.worlds.manifest import Manifest, load_manifest
from paclm.worlds.settings import load_settings, render_settings

runner = CliRunner()
TARGET = ("--mia", "51%", "--tokens", "1M")


def plan(*arguments):
    return runner.invoke(app, ["plan", *arguments])


def test_json_has_exactly_the_contract_keys():
    figures = json.loads(plan("--tokens", "1000000", "--per-token", "2^-32", "--rate", "20000", "--json").output)
    assert list(figures) == ["tokens", "per_token_nats", "total_nats", "mia_bound", "world_id_bound", "charge", "days"]
    assert figures["mia_bound"] == pytest.approx(0.510789, abs=1e-6)
    assert figures["days"] == 50.0
    assert figures["charge"] == "every-token"


def test_days_are_null_without_a_rate():
    assert json.loads(plan("--tokens", "10", "--per-token", "2^-32", "--json").output)["days"] is None


@pytest.mark.parametrize("target", ["0.51", "51%", "51/100"])
def test_target_can_be_written_three_ways(target):
    assert json.loads(plan("--mia", target, "--per-token", "2^-32", "--json").output)["tokens"] == 859_050


def test_table_shows_both_charges_and_says_what_is_promised():
    shown = plan("--mia", "51%", "--per-token", "2^-32", "--dissent-rate", "0.24", "--rate", "20000").output
    assert "859,050" in shown
    assert "dissent (at 0.24)" in shown
    assert "3,579,375" in shown
    assert "no attack on whether a record was in the secretly drawn half succeeds more than 51.00%" in shown
    assert "before the first token" in shown


@pytest.mark.parametrize(("written", "shown"), [("24%", "dissent (at 0.24)"), ("1/4", "(at 0.25)"), ("100%", "(at 1)")])
def test_a_dissent_rate_is_written_as_a_target_is(written, shown):
    assert shown in plan(*TARGET, "--dissent-rate", written).output


def test_a_dissent_rate_that_cannot_be_is_refused():
    assert "above 0 and at most 1, not 1.5" in str(plan(*TARGET, "--dissent-rate", "1.5").exception)
    assert "none of: a fraction 1/2" in str(plan(*TARGET, "--dissent-rate", "some").exception)


def test_days_have_a_column_only_where_there_is_a_rate():
    assert "days" not in plan(*TARGET).output
    assert "days" in plan(*TARGET, "--rate", "20k").output


def test_what_it_prints_can_be_pasted_as_it_is():
    shown = plan("--mia", "51%", "--per-token", "2^-32", "--charge", "dissent").output
    _, _, pasted = shown.partition("(or add --write WORKSPACE):\n")
    read = read_settings(MechanismConfig, tomllib.loads(pasted), "[mechanism]")
    figures = json.loads(plan("--mia", "51%", "--per-token", "2^-32", "--charge", "dissent", "--json").output)
    assert (read.per_token, read.total) == (figures["per_token_nats"], figures["total_nats"])
    assert read.charge == "dissent"


def test_bounds_for_people_are_never_less_than_the_bounds():
    figures = json.loads(plan("--mia", "51%", "--tokens", "1M", "--json").output)
    assert figures["world_id_bound"] == pytest.approx(0.009638, abs=1e-6)
    shown = plan("--mia", "51%", "--tokens", "1M").output
    assert "none names the realized world more than 0.964% of the time" in shown
    assert [float(word[:-1]) for word in shown.split() if word.startswith("0.96")] == [0.964] * 3  # table and words


@pytest.mark.parametrize("worlds", ["0", "-2", "3"])
def test_a_number_of_worlds_that_there_cannot_be_is_refused(worlds):
    done = plan(*TARGET, "--worlds", worlds)
    assert isinstance(done.exception, InvalidInput)
    assert f"not {worlds}" in str(done.exception)


@pytest.mark.parametrize("tokens", ["1000000", "1,000,000", "1000k", "1M", "1 M", "1e6", "0.001G"])
def test_tokens_can_be_written_as_people_write_them(tokens):
    figures = json.loads(plan("--tokens", tokens, "--per-token", "2^-32", "--rate", "20k", "--json").output)
    assert (figures["tokens"], figures["days"]) == (1_000_000, 50.0)


def test_dissent_without_a_rate_is_labelled_as_the_worst_case():
    shown = plan("--mia", "51%", "--per-token", "2^-32").output
    assert "dissent (worst case)" in shown


def test_json_is_of_the_chosen_charge():
    figures = json.loads(
        plan("--mia", "51%", "--per-token", "2^-32", "--charge", "dissent", "--dissent-rate", "0.24", "--json").output
    )
    assert (figures["charge"], figures["tokens"]) == ("dissent", 3_579_375)


def test_a_bound_that_says_nothing_is_called_so():
    assert "says nothing" in plan("--tokens", "1000", "--per-token", "0.01").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mia", "x", "--tokens", "5"), "is none of"),
        (("--mia", "0.51", "--per-token", "2^"), "a power such as 2"),
        (("--mia", "0.51", "--per-token", "-1"), "positive number"),
        (("--mia", "1.5", "--tokens", "5"), "strictly between 0 and 1"),
        (("--mia", "51", "--tokens", "5"), "not '51'. Is 51% meant? Write 51% or 0.51."),
        (("--mia", "0.51", "--tokens", "many"), "none of: 1000000, 100k, 2M"),
        (("--mia", "0.51", "--tokens", "-5"), "none of: 1000000, 100k, 2M"),
        (("--mia", "0.51", "--tokens", "1.5"), "whole number of at least 1, not '1.5'"),
        (("--mia", "0.51", "--tokens", "5", "--rate", "0"), "positive number of tokens per day"),
    ],
)
def test_bad_numbers_are_refused_with_the_ways_to_write_them(arguments, message):
    assert message in str(plan(*arguments).exception)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """As much of a workspace as the command needs: a manifest and the settings that init writes."""
    for name in ("PACLM_KEY", "PACLM_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "clinic"
    (folder / "curator").mkdir(parents=True, mode=0o700)
    arguments = {"worlds": 32}
    Manifest(format=1, id="", created="", versions={}, arguments=arguments, summary={}, files={}, base={}).write(folder)
    (folder / "paclm.toml").write_text(render_settings(TrainingConfig()))
    return folder


def write(workspace, *arguments):
    done = plan(*arguments, "--write", str(workspace))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def budgets(workspace):
    config = load_settings(workspace / "paclm.toml").config
    return config.per_token, config.total, config.charge


def test_settings_behind_a_link_are_changed_where_they_are(workspace, tmp_path):
    elsewhere = (workspace / "paclm.toml").rename(tmp_path / "kept.toml")
    (workspace / "paclm.toml").symlink_to(elsewhere)
    write(workspace, "--mia", "51%", "--per-token", "2^-32")
    assert (workspace / "paclm.toml").is_symlink()
    assert 'per_token = "2^-32"' in elsewhere.read_text()


def test_a_plan_for_a_workspace_with_groups_speaks_of_the_group(workspace):
    assert "whether a record was in the secretly drawn half" in write(workspace, *TARGET)
    manifest = load_manifest(workspace)
    dataclasses.replace(manifest, arguments={**manifest.arguments, "group_by": "patient"}).write(workspace)
    assert "whether the records of one patient were in the secretly drawn half" in write(workspace, *TARGET)


def test_a_plan_is_written_into_the_settings_and_nothing_else_of_them_changes(workspace):
    before = (workspace / "paclm.toml").read_text().splitlines()
    shown = write(workspace, *TARGET)
    assert "for the 32 worlds it has" in shown
    assert "a guess: 1/32" in shown
    after = (workspace / "paclm.toml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [old for old, _ in changed] == ['# per_token = "2^-32"', '# total = "2^-10"']
    assert all(new in shown.splitlines() for _, new in changed)
    assert (workspace / "paclm.toml").stat().st_mode & 0o777 == 0o600
    figures = json.loads(write(workspace, *TARGET, "--json"))
    assert budgets(workspace) == (figures["per_token_nats"], figures["total_nats"], "every-token")
    assert figures["workspace"] == str(workspace)


def test_a_second_plan_replaces_the_first_and_keeps_remarks(workspace):
    write(workspace, *TARGET)
    text = (workspace / "paclm.toml").read_text().replace("\ntotal = ", "\n  total=", 1)
    (workspace / "paclm.toml").write_text(text.replace("\n\n# How votes", "  # agreed in May\n\n# How votes", 1))
    write(workspace, "--tokens", "4096", "--per-token", "2^-32", "--charge", "dissent")
    assert budgets(workspace) == (2.0**-32, 2.0**-20, "dissent")
    assert '\ntotal = "2^-20"  # agreed in May\n' in (workspace / "paclm.toml").read_text()
    assert "charge" not in write(workspace, *TARGET).rpartition("worlds it has:")[2]  # it stays the workspace's
    assert budgets(workspace)[2] == "dissent"


@pytest.mark.parametrize("text", ["", "[training]\nepochs = 1\n", "[mechanism]\n[training]\nepochs = 1", "\r\n"])
def test_a_plan_is_written_into_settings_that_name_no_budget_at_all(workspace, text):
    (workspace / "paclm.toml").write_bytes(text.encode())
    write(workspace, "--tokens", "4096", "--per-token", "2^-32")
    assert budgets(workspace) == (2.0**-32, 2.0**-20, "every-token")
    assert (load_settings(workspace / "paclm.toml").training.epochs == 1) == ("epochs" in text)


def test_settings_in_an_unusual_shape_are_left_alone(workspace):
    text = 'mechanism = {per_token = "2^-32", total = "2^-10"}\n'
    (workspace / "paclm.toml").write_text(text)
    with pytest.raises(WorkspaceError, match="per_token = "):
        write(workspace, *TARGET)
    assert (workspace / "paclm.toml").read_text() == text


def test_the_worlds_are_the_workspaces_and_a_plan_that_promises_nothing_is_not_written(workspace):
    with pytest.raises(InvalidInput, match="has 32 worlds, not 64"):
        write(workspace, *TARGET, "--worlds", "64")
    with pytest.raises(InvalidInput, match="promises nothing"):
        write(workspace, "--tokens", "1000", "--per-token", "0.01")
    assert load_settings(workspace / "paclm.toml").config is None
    with pytest.raises(WorkspaceError, match="is not a workspace"):
        write(workspace.parent / "nowhere", *TARGET)


def start_ledger(workspace, tokens):
    settings = MechanismConfig(per_token=2.0**-32, total=2.0**-20)
    key = load_keys(workspace / "curator", may_create=True).mac.reveal()
    path = workspace / "curator" / "ledger.sqlite"
    with Ledger.create(path, key, workspace="w", num_worlds=32, settings=settings, sealed_belief=b"sealed") as ledger:
        if tokens:
            ledger.commit([Usage("alice", tokens, tokens, tokens, tokens * 2**28)], b"moved")


def test_after_the_first_charge_a_larger_total_is_not_a_matter_of_settings(workspace):
    start_ledger(workspace, tokens=100)
    with pytest.raises(InvalidInput, match=r"100 tokens charged.*Nothing was written.*paclm ledger extend .*clinic"):
        write(workspace, "--tokens", "5000", "--per-token", "2^-32")
    with pytest.raises(InvalidInput, match="are spent: what has left cannot be called back"):
        write(workspace, "--tokens", "50", "--per-token", "2^-32")
    assert load_settings(workspace / "paclm.toml").config is None
    write(workspace, "--tokens", "2048", "--per-token", "2^-32")
    assert budgets(workspace)[1] == 2.0**-21


def test_before_the_first_charge_a_larger_total_is_written_and_the_ledger_asks(workspace):
    start_ledger(workspace, tokens=0)
    assert "before you serve: paclm ledger extend" in write(workspace, "--tokens", "8192", "--per-token", "2^-32")
    assert budgets(workspace)[1] == 2.0**-19


def test_a_smaller_total_after_the_first_charge_does_not_state_a_better_bound(workspace):
    start_ledger(workspace, tokens=100)
    smaller = ("--tokens", "2048", "--per-token", "2^-32")
    assert "the guarantee stays at that one" in write(workspace, *smaller)
    figures = json.loads(write(workspace, *smaller, "--json"))
    assert figures["total_nats"] == 2.0**-21
    assert figures["mia_bound"] == paclm.success_bound(2.0**-20, 1 / 2)
    assert figures["world_id_bound"] == paclm.success_bound(2.0**-20, 1 / 32)


def test_nothing_is_written_for_a_ledger_that_lost_rows_or_is_a_copy(workspace):
    """paclm.toml may be the last to know the largest total that was committed: see `paclm ledger adopt`."""
    start_ledger(workspace, tokens=100)
    path = workspace / "curator" / "ledger.sqlite"
    before, key = path.read_bytes(), load_keys(workspace / "curator", may_create=False).mac.reveal()
    with Ledger.open(path, key) as ledger:
        ledger.extend(2.0**-10, confirmed_by="ada")
        backup(path, workspace / "monday.sqlite")
    (workspace / "paclm.toml").write_text('[mechanism]\nper_token = "2^-32"\ntotal = "2^-10"\n')
    for older, reason in ((before, "rolled back"), ((workspace / "monday.sqlite").read_bytes(), "copy")):
        path.write_bytes(older)
        with pytest.raises(LedgerError, match=rf"{reason}.* Nothing was written"):
            write(workspace, "--tokens", "2048", "--per-token", "2^-32")
        assert budgets(workspace)[1] == 2.0**-10


def test_another_guess_than_that_of_the_draw_is_not_passed_off_as_the_guarantee():
    shown = " ".join(plan("--mia", "51%", "--tokens", "1000", "--prior", "1/100").output.split())
    assert "From that guess, where paclm states its bound, it is 100.00%." in shown
    assert "where paclm states" not in plan(*TARGET).output
