"""`paclm generate --promise corpus` with an adapter that was really trained with DP, and no trained worlds at all."""

import json
import re
import shutil
import sys

import pytest

from cli.commands import figures_of, invoke
from paclm.engine.dp_training import DpTraining
from paclm.errors import CuratorError, MissingExtra, PromiseConflict, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.privacy import dp
from paclm.worlds.layout import dp_log_path

pytest.importorskip("dp_accounting")

KEYS = [
    *("text", "tokens", "finish_reason", "promise", "epsilon", "delta", "unit", "mia_bound", "tpr_at_fpr_0_1_percent"),
    *("tpr_at_fpr_1_percent", "trainings", "is_promised", "token_ids"),
]
ASK = ("--prompt", "the patient", "--max-tokens", "6", "--promise", "corpus")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts, small_base):
    folder = tmp_path_factory.mktemp("dp")
    corpus = folder / "notes.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    path = folder / "clinic"
    with pytest.MonkeyPatch.context() as patch:  # or it would count for other tests over the same texts
        patch.setenv("PACLM_STATE_DIR", str(folder / "state"))
        invoke("init", path, "--corpus", corpus, "--base", small_base, "--worlds", 4, "--holdout", 6)
        settings = path / "paclm.toml"
        settings.write_text(settings.read_text().partition("[dp]")[0] + "[dp]\nsampling_rate = 0.5\nsteps = 3\n")
        invoke("train", path, "--what", "dp:4", "--delta", "1e-4", "--dtype", "float32")
    return path


@pytest.fixture
def clinic(tmp_path, trained):
    return shutil.copytree(trained, tmp_path / "clinic")


def test_json_has_the_promise_and_no_charges(clinic):
    found = figures_of("generate", clinic, *ASK)
    assert list(found) == KEYS
    assert len(found["token_ids"]) == found["tokens"] <= 6
    assert found["epsilon"] <= 4.0
    assert (found["delta"], found["unit"], found["trainings"], found["is_promised"]) == (1e-4, "record", 1, True)
    assert 0.5 < found["mia_bound"] < 0.98  # ε alone would give e^4 / (1 + e^4)


def test_after_one_training_serving_needs_no_accounting(clinic, monkeypatch):
    """The figures are logged with the adapter: the extra `serve` is enough."""
    whole = figures_of("generate", clinic, *ASK)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # cannot be imported
    dp._compose.cache_clear()
    found = figures_of("generate", clinic, *ASK)
    assert (found["epsilon"], found["mia_bound"]) == (whole["epsilon"], whole["mia_bound"])
    log = DpLog(dp_log_path(clinic))
    (begun,) = log.trainings().values()
    details = {name: value for name, value in begun.items() if name not in ("seq", "at", "kind", "previous", "hash")}
    log.append("training", **{**details, "run": "another"})  # begun, and in no card: both must be composed
    with pytest.raises(MissingExtra, match=r"\[dp\]"):
        invoke("generate", clinic, *ASK)


def test_text_goes_to_standard_output_and_the_promise_to_standard_error(clinic):
    result = invoke("generate", clinic, *ASK, "--greedy")
    again = invoke("generate", clinic, *ASK, "--greedy")
    assert result.stdout == again.stdout
    assert "ε" not in result.stdout
    for words in ("Opening", "nothing is charged", "ε = ", "whether a record was in the corpus", "0.1 %"):
        assert words in " ".join(result.stderr.split())
    assert [event["kind"] for event in DpLog(dp_log_path(clinic)).events()][-2:] == ["served", "served"]
    assert not (clinic / "curator" / "ledger.sqlite").exists()


def without_adapter(path, **changes):
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    arguments = {name: value for name, value in content["arguments"].items() if name not in changes.get("drop", ())}
    manifest.write_text(json.dumps({**content, "arguments": arguments, "adapters": {}}))


def test_a_workspace_without_the_adapter_says_how_to_train_it(clinic):
    without_adapter(clinic)
    with pytest.raises(WorkspaceError, match=r"adds to ε.*--what dp:4 --delta 0.0001 --again"):
        invoke("generate", clinic, *ASK)
    dp_log_path(clinic).unlink()
    with pytest.raises(WorkspaceError, match=r"Train it: .* --what dp:8$"):
        invoke("generate", clinic, *ASK)


def test_after_a_stopped_training_the_command_that_continues_it_is_named(clinic, monkeypatch):
    step = DpTraining.step

    def press_ctrl_c(training, draws):
        step(training, draws)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DpTraining, "step", press_ctrl_c)
        invoke("train", clinic, "--what", "dp:2", "--delta", "1e-4", "--dtype", "float32", "--again")
    without_adapter(clinic)
    with pytest.raises(WorkspaceError, match="no further cost") as refused:
        invoke("generate", clinic, *ASK)
    command = re.search(r"paclm (train .* --resume)$", str(refused.value))[1]
    assert invoke(*command.split(), "--dtype", "float32").exit_code == 0
    assert invoke("generate", clinic, *ASK).exit_code == 0


def test_a_workspace_made_before_dp_says_that_a_new_one_is_needed(clinic):
    without_adapter(clinic, drop=["units"])
    dp_log_path(clinic).unlink()
    for command in (("generate", clinic, *ASK), ("ledger", "show", clinic, "--promise", "corpus")):
        with pytest.raises(WorkspaceError, match=r"made before.*paclm init"):
            invoke(*command)


def test_an_adapter_without_its_log_is_told_apart_from_none(clinic):
    dp_log_path(clinic).unlink()
    for command in (("generate", clinic, *ASK), ("ledger", "show", clinic, "--promise", "corpus")):
        with pytest.raises(CuratorError, match=r"not in the log of DP trainings.*backup.*adds to ε.*--again"):
            invoke(*command)
    with pytest.raises(CuratorError, match="not in the log"):
        invoke("ledger", "show", clinic)


def test_once_both_promises_were_accepted_nothing_is_promised(clinic):
    DpLog(dp_log_path(clinic)).append("mixed", accepted="half")
    result = invoke("generate", clinic, *ASK)
    assert "Nothing is promised about the corpus" in " ".join(result.stderr.split())
    assert figures_of("generate", clinic, *ASK)["is_promised"] is False


@pytest.fixture
def served_half(tmp_path, texts, small_base):
    """Worlds with tokens under `half`, and a DP adapter beside them."""
    from curator.deployments import build_workspace, set_mechanism
    from curator.dp_deployments import with_dp_adapter

    path = with_dp_adapter(build_workspace(tmp_path / "both", texts[:60], small_base)).path
    set_mechanism(path, per_token="2^-16", total="2^-4", support_size=40)
    return path


def test_after_half_corpus_needs_the_flag_and_promises_nothing(served_half):
    half = ("generate", served_half, "--prompt", "the", "--max-tokens", "2")
    assert invoke(*half).exit_code == 0
    with pytest.raises(PromiseConflict, match="--mix-promises"):
        invoke("generate", served_half, *ASK)
    assert figures_of("generate", served_half, *ASK, "--mix-promises")["is_promised"] is False
    assert figures_of(*half)["private_tokens"] == 2  # what half promises holds: it goes on


def test_half_refused_after_corpus_leaves_no_key_secret_or_ledger(served_half):
    assert invoke("generate", served_half, *ASK).exit_code == 0
    with pytest.raises(PromiseConflict, match="--mix-promises"):
        invoke("generate", served_half, "--prompt", "the", "--max-tokens", "2")
    left = {file.name for file in (served_half / "curator").iterdir()}
    assert not left & {"key", "secret.json", "ledger.sqlite"}
