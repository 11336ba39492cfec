"""`paclm ledger show` and `verify` under the promise `corpus`."""

import pytest

from cli.commands import figures_of, invoke
from paclm.errors import LedgerMissing, LedgerTampered, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.privacy.dp import guarantee
from paclm.worlds.layout import DP_FILE, dp_log_path
from paclm.worlds.registry import remember_training, remember_workspace
from paclm.worlds.storage import hash_file
from paclm.worlds.workspace import Workspace

TRAINING = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "sampling_rate": 0.5,
    "noise_multiplier": 2.064,
    "steps": 40,
    "num_units": 60,
    "unit": "record",
}


@pytest.fixture
def log(clinic):
    log = DpLog(dp_log_path(clinic))
    log.append("training", run="first", **TRAINING)
    return log


@pytest.fixture
def adapter(clinic, log):
    path = clinic / "adapters" / DP_FILE
    path.write_bytes(b"weights")
    log.append("trained", run="first", sha256=hash_file(path))
    return path


def test_show_gives_the_figures_of_the_contract(clinic, log):
    found = figures_of("ledger", "show", clinic, "--promise", "corpus")
    expected = guarantee(log.mechanisms(), 1e-5)
    assert found["epsilon"] == pytest.approx(expected.epsilon)
    assert (found["delta"], found["unit"], found["trainings"]) == (1e-5, "record", 1)
    assert found["mia_bound"] == pytest.approx(0.778, abs=1e-3)
    assert found["tpr_at_fpr_1_percent"] == pytest.approx(expected.tpr_at_fpr_1_percent)
    assert found["tpr_at_fpr_0_1_percent"] == pytest.approx(expected.tpr_at_fpr_0_1_percent)
    assert found["is_promised"] is True
    (run,) = found["runs"]
    assert (run["run"], run["steps"], run["is_here"], run["is_finished"]) == ("first", 40, True, False)
    assert "spent_nats" not in found
    assert figures_of("ledger", "show", clinic) == found  # nothing else was ever used
    shown = invoke("ledger", "show", clinic).stdout
    for words in ("ε = 8", "δ = 1e-05", "77.81%", "record", "not finished; counts in full", "σ = 2.064"):
        assert words in shown, words


def test_every_training_over_the_same_records_is_composed(clinic, log):
    alone = figures_of("ledger", "show", clinic)["epsilon"]
    log.append("training", run="second", **TRAINING)
    here = figures_of("ledger", "show", clinic)["epsilon"]
    workspace = Workspace.open(clinic)
    remember_workspace("deleted", clinic.parent / "deleted", workspace.sketch)
    remember_training("deleted", "third", TRAINING)
    found = figures_of("ledger", "show", clinic)
    assert alone < here < found["epsilon"]
    assert found["epsilon"] == pytest.approx(guarantee(log.mechanisms()[:1] * 3, 1e-5).epsilon)
    assert {run["run"]: run["is_here"] for run in found["runs"]} == {"first": True, "second": True, "third": False}


def test_both_promises_are_shown_where_both_were_used(clinic, log):
    assert invoke("generate", clinic, "--prompt", "The patient", "--max-tokens", 2).exit_code == 0
    both = figures_of("ledger", "show", clinic)
    assert both["private_tokens"] == 2
    assert both["corpus"]["is_promised"] is False
    assert "corpus" not in figures_of("ledger", "show", clinic, "--promise", "half")
    assert figures_of("ledger", "show", clinic, "--promise", "corpus") == both["corpus"]
    shown = invoke("ledger", "show", clinic).stdout
    assert "Nothing is promised about the corpus" in shown
    assert "Spent so far" in shown


def test_show_without_a_dp_training_says_how_to_make_one(clinic):
    with pytest.raises(WorkspaceError, match="--what dp:8"):
        invoke("ledger", "show", clinic, "--promise", "corpus")


def test_verify_checks_the_chain_and_the_adapter(clinic, log, adapter):
    found = figures_of("ledger", "verify", clinic)
    assert found["intact"] is True
    assert found["corpus"] == {"num_events": 2, "problem": None, "intact": True}
    assert "2 events, intact" in invoke("ledger", "verify", clinic).stdout


def test_verify_can_be_limited_to_one_promise(clinic, log, adapter):
    invoke("generate", clinic, "--prompt", "The patient", "--max-tokens", 2)
    found = figures_of("ledger", "verify", clinic, "--promise", "corpus")
    assert (found["intact"], found["corpus"]["num_events"]) == (True, 2)
    assert "rows" not in found
    log.path.write_text(log.path.read_text().replace("2.064", "9.064"))
    assert invoke("ledger", "verify", clinic, "--promise", "corpus").exit_code == 1
    half = figures_of("ledger", "verify", clinic, "--promise", "half")
    assert half["intact"] is True
    assert "corpus" not in half


def test_before_anything_was_used_both_promises_are_named(clinic):
    for command in ("show", "verify"):
        with pytest.raises(LedgerMissing, match=r"promise half.*No DP training was begun either"):
            invoke("ledger", command, clinic)
        with pytest.raises(WorkspaceError, match="--what dp:8"):
            invoke("ledger", command, clinic, "--promise", "corpus")


def other_weights(log, adapter):
    adapter.write_bytes(b"other weights")


def weaker_noise(log, adapter):
    log.path.write_text(log.path.read_text().replace("2.064", "9.064"))


def no_log(log, adapter):
    log.path.unlink()


def rolled_back(log, adapter):
    identifier = Workspace.open(adapter.parent.parent).manifest.id
    remember_training(identifier, "later", TRAINING)


@pytest.mark.parametrize("change", [other_weights, weaker_noise, no_log, rolled_back])
def test_verify_finds_what_was_changed(clinic, log, adapter, change):
    change(log, adapter)
    done = invoke("ledger", "verify", clinic)
    assert done.exit_code == 1
    assert "NOT INTACT" in done.stderr
    assert figures_of("ledger", "verify", clinic)["intact"] is False


def test_verify_fails_for_a_broken_log_beside_an_intact_ledger(clinic, log):
    invoke("generate", clinic, "--prompt", "The patient", "--max-tokens", 2)
    assert invoke("ledger", "verify", clinic).exit_code == 0
    log.path.write_text(log.path.read_text().replace('"steps": 40', '"steps": 4'))
    assert invoke("ledger", "verify", clinic).exit_code == 1
    found = figures_of("ledger", "verify", clinic)
    assert (found["intact"], found["corpus"]["intact"], found["bad_row"]) == (False, False, None)
    assert found["problem"] == found["corpus"]["problem"]
    with pytest.raises(LedgerTampered):
        invoke("ledger", "show", clinic, "--promise", "corpus")


def test_a_log_that_was_rolled_back_still_counts_what_this_machine_noted(clinic, log):
    identifier = Workspace.open(clinic).manifest.id
    remember_training(identifier, "first", TRAINING)
    remember_training(identifier, "second", TRAINING)
    assert figures_of("ledger", "show", clinic)["trainings"] == 2
