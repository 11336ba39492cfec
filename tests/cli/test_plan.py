"""`paclm plan` as a user types it."""

import dataclasses
import json
import tomllib
from dataclasses import replace
from functools import partial

import pytest

import paclm
from cli.commands import figures_of, invoke
from cli.ledgers import open_ledger, write_manifest
from paclm.config import MechanismConfig, TrainingConfig, read_settings
from paclm.errors import InvalidInput, LedgerError, WorkspaceError
from paclm.ledger.events import Usage
from paclm.ledger.recovery import backup
from paclm.worlds.manifest import load_manifest
from paclm.worlds.settings import load_settings, render_settings

TARGET = ("--mia", "51%", "--tokens", "1M")
BOUND_AND_PRICE = ("--mia", "51%", "--per-token", "2^-32")

figures = partial(figures_of, "plan")


def plan(*arguments):
    return invoke("plan", *arguments).output


def test_json_has_exactly_the_contract_keys():
    found = figures("--tokens", "1000000", "--per-token", "2^-32", "--rate", "20000")
    assert list(found) == ["tokens", "per_token_nats", "total_nats", "mia_bound", "world_id_bound", "charge", "days"]
    assert found["mia_bound"] == pytest.approx(0.510789, abs=1e-6)
    assert (found["days"], found["charge"]) == (50.0, "every-token")
    assert figures("--tokens", "10", "--per-token", "2^-32")["days"] is None
    found = figures(*BOUND_AND_PRICE, "--charge", "dissent", "--dissent-rate", "0.24")
    assert (found["charge"], found["tokens"]) == ("dissent", 3_579_375)


@pytest.mark.parametrize("target", ["0.51", "51%", "51/100"])
@pytest.mark.parametrize("tokens", ["1000000", "1,000,000", "1000k", "1M", "1 M", "1e6", "0.001G"])
def test_targets_and_tokens_can_be_written_in_many_ways(target, tokens):
    assert figures("--mia", target, "--per-token", "2^-32")["tokens"] == 859_050
    found = figures("--tokens", tokens, "--per-token", "2^-32", "--rate", "20k")
    assert (found["tokens"], found["days"]) == (1_000_000, 50.0)


def test_the_table_shows_both_charges_and_the_guarantee_never_less_than_the_bound():
    shown = plan(*BOUND_AND_PRICE, "--dissent-rate", "0.24", "--rate", "20000")
    for text in ("859,050", "dissent (at 0.24)", "3,579,375", "days", "a record was", "51.00%"):
        assert text in shown
    shown = plan(*BOUND_AND_PRICE)
    assert "dissent (worst case)" in shown
    assert "days" not in shown
    for written, rate in (("24%", "(at 0.24)"), ("1/4", "(at 0.25)"), ("100%", "(at 1)")):
        assert rate in plan(*TARGET, "--dissent-rate", written)
    assert figures(*TARGET)["world_id_bound"] == pytest.approx(0.009638, abs=1e-6)
    assert [word for word in plan(*TARGET).split() if word.startswith("0.96")] == ["0.964%"] * 3  # table and text


def test_settings_can_be_pasted_as_printed():
    shown = plan(*BOUND_AND_PRICE, "--charge", "dissent")
    _, _, pasted = shown.partition("--write WORKSPACE):\n")
    read = read_settings(MechanismConfig, tomllib.loads(pasted), "[mechanism]")
    found = figures(*BOUND_AND_PRICE, "--charge", "dissent")
    assert (read.per_token, read.total, read.charge) == (found["per_token_nats"], found["total_nats"], "dissent")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mia", "x", "--tokens", "5"), "'x'"),
        (("--mia", "0.51", "--per-token", "2^"), r"'2\^'"),
        (("--mia", "0.51", "--per-token", "-1"), "'-1'"),
        (("--mia", "1.5", "--tokens", "5"), "'1.5'"),
        (("--mia", "51", "--tokens", "5"), r"'51'.* 51% or 0\.51"),
        (("--mia", "0.51", "--tokens", "many"), "'many'"),
        (("--mia", "0.51", "--tokens", "-5"), "'-5'"),
        (("--mia", "0.51", "--tokens", "1.5"), "--tokens .*'1.5'"),
        (("--mia", "0.51", "--tokens", "5", "--rate", "0"), "per day"),
        ((*TARGET, "--dissent-rate", "1.5"), "not 1.5"),
        ((*TARGET, "--dissent-rate", "some"), "'some'"),
        ((*TARGET, "--worlds", "0"), "not 0"),
        ((*TARGET, "--worlds", "-2"), "not -2"),
        ((*TARGET, "--worlds", "3"), "not 3"),
    ],
)
def test_bad_numbers_are_refused_by_value(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        plan(*arguments)


def test_a_void_bound_and_another_prior_than_that_of_the_guarantee_are_pointed_out():
    assert "ln 2" in plan("--tokens", "1000", "--per-token", "0.01")
    assert "100.00%" in plan("--mia", "51%", "--tokens", "1000", "--prior", "1/100")  # at the prior 1/2
    assert "100.00%" not in plan(*TARGET)


@pytest.fixture
def workspace(tmp_path):
    """As much of a workspace as the command needs: a manifest and the settings that init writes, behind a link."""
    folder = tmp_path / "clinic"
    (folder / "curator").mkdir(parents=True, mode=0o700)
    write_manifest(folder, worlds=32)
    (tmp_path / "kept.toml").write_text(render_settings(TrainingConfig()))
    (folder / "paclm.toml").symlink_to(tmp_path / "kept.toml")
    return folder


def write(workspace, *arguments):
    return plan(*arguments, "--write", workspace)


def tokens(count):
    return "--tokens", str(count), "--per-token", "2^-32"


def budgets(workspace):
    config = load_settings(workspace / "paclm.toml").config
    return None if config is None else (config.per_token, config.total, config.charge)


def test_a_plan_for_a_workspace_with_groups_names_the_group(workspace):
    assert "a record was" in write(workspace, *TARGET)
    manifest = load_manifest(workspace)
    dataclasses.replace(manifest, arguments={**manifest.arguments, "group_by": "patient"}).write(workspace)
    assert "the records of one patient were" in write(workspace, *TARGET)


def test_a_plan_is_written_into_the_settings_and_nothing_else_of_them_changes(workspace):
    (workspace / "paclm.toml").chmod(0o640)
    before = (workspace / "paclm.toml").read_text().splitlines()
    shown = write(workspace, *TARGET)
    assert "1/32" in shown
    after = (workspace / "paclm.toml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [old for old, _ in changed] == ['# per_token = "2^-32"', '# total = "2^-10"']
    assert all(new in shown.splitlines() for _, new in changed)
    assert (workspace / "paclm.toml").is_symlink()
    assert (workspace / "paclm.toml").stat().st_mode & 0o777 == 0o640
    found = json.loads(write(workspace, *TARGET, "--json"))
    assert budgets(workspace) == (found["per_token_nats"], found["total_nats"], "every-token")
    assert found["workspace"] == str(workspace)


def test_a_second_plan_replaces_the_first_and_keeps_comments(workspace):
    write(workspace, *TARGET)
    text = (workspace / "paclm.toml").read_text().replace("\ntotal = ", "\n  total=", 1)
    (workspace / "paclm.toml").write_text(text.replace("\n\n# How votes", "  # agreed in May\n\n# How votes", 1))
    write(workspace, *tokens(4096), "--charge", "dissent")
    assert budgets(workspace) == (2.0**-32, 2.0**-20, "dissent")
    assert '\n  total="2^-20"  # agreed in May\n' in (workspace / "paclm.toml").read_text()
    assert "charge = " not in write(workspace, *TARGET)  # it stays the workspace's
    assert budgets(workspace)[2] == "dissent"


@pytest.mark.parametrize("text", ["", "[training]\nepochs = 1\n", "[mechanism]\n[training]\nepochs = 1", "\r\n"])
def test_a_plan_is_written_into_settings_without_a_budget(workspace, text):
    (workspace / "paclm.toml").write_bytes(text.encode())
    write(workspace, *tokens(4096))
    assert budgets(workspace) == (2.0**-32, 2.0**-20, "every-token")
    assert (load_settings(workspace / "paclm.toml").training.epochs == 1) == ("epochs" in text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((*TARGET, "--worlds", "64"), "32 worlds, not 64"), (("--tokens", "1000", "--per-token", "0.01"), "total = 10")],
)
def test_other_worlds_and_a_plan_without_a_guarantee_are_not_written(workspace, arguments, words):
    with pytest.raises(InvalidInput, match=words):
        write(workspace, *arguments)
    assert budgets(workspace) is None
    with pytest.raises(WorkspaceError, match="nowhere"):
        write(workspace.parent / "nowhere", *TARGET)


def start_ledger(workspace, tokens):
    with open_ledger(workspace, 2.0**-20, num_worlds=32) as ledger:
        if tokens:
            ledger.commit([Usage("alice", tokens, tokens, tokens, tokens * 2**28)], b"moved")
    return workspace / "curator" / "ledger.sqlite"


def test_after_the_first_charge_a_larger_total_needs_an_extension(workspace):
    start_ledger(workspace, tokens=0)
    assert "paclm ledger extend" in write(workspace, *tokens(8192))
    assert budgets(workspace)[1] == 2.0**-19
    with open_ledger(workspace) as ledger:
        ledger.commit([Usage("alice", 100, 100, 100, 100 * 2**28)], b"moved")
    with pytest.raises(InvalidInput, match=r"100 tokens.*paclm ledger extend .*clinic"):
        write(workspace, *tokens(5000))
    with pytest.raises(InvalidInput, match="Nothing was written"):  # less than was spent
        write(workspace, *tokens(50))
    assert budgets(workspace)[1] == 2.0**-19
    write(workspace, *tokens(2048))
    assert budgets(workspace)[1] == 2.0**-21


def test_a_smaller_total_after_the_first_charge_does_not_state_a_better_bound(workspace):
    start_ledger(workspace, tokens=100)
    assert "2^-20" in write(workspace, *tokens(2048))
    found = json.loads(write(workspace, *tokens(2048), "--json"))
    assert found["total_nats"] == 2.0**-21
    assert found["mia_bound"] == paclm.success_bound(2.0**-20, 1 / 2)
    assert found["world_id_bound"] == paclm.success_bound(2.0**-20, 1 / 32)


def test_a_total_that_was_lowered_is_raised_again_up_to_the_committed_one(workspace):
    start_ledger(workspace, tokens=100)
    with open_ledger(workspace) as ledger:
        ledger.change_settings(replace(ledger.settings, total=2.0**-22))
    assert "2^-20" in write(workspace, *tokens(2048))
    assert "extend" not in write(workspace, *tokens(4096))
    assert budgets(workspace)[1] == 2.0**-20
    with pytest.raises(InvalidInput, match="paclm ledger extend"):
        write(workspace, *tokens(4097))


def test_nothing_is_written_for_a_ledger_that_lost_rows_or_is_a_copy(workspace):
    """paclm.toml may hold the only record of the largest total that was committed: see `paclm ledger adopt`."""
    path = start_ledger(workspace, tokens=100)
    before = path.read_bytes()
    with open_ledger(workspace) as ledger:
        ledger.extend(2.0**-10, confirmed_by="ada")
        backup(path, workspace / "monday.sqlite")
    (workspace / "paclm.toml").write_text('[mechanism]\nper_token = "2^-32"\ntotal = "2^-10"\n')
    for older in (before, (workspace / "monday.sqlite").read_bytes()):
        path.write_bytes(older)
        with pytest.raises(LedgerError, match="Nothing was written"):
            write(workspace, *tokens(2048))
        assert budgets(workspace)[1] == 2.0**-10
