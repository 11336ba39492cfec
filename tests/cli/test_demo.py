"""`paclm demo`, shrunk: the whole product end to end on the embedded model and corpus, and again without repeating."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from cli.commands import invoke
from curator.memory import dumpable
from paclm.cli import demo as demo_module
from paclm.cli import demo_texts
from paclm.cli.side_by_side import Screen
from paclm.errors import WorkspaceError
from paclm.study.figure import LOOK
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.regimes.knowledge import KnowledgeScale
from paclm.study.results import Result
from paclm.worlds.clinic import house_terms
from paclm.worlds.settings import write_settings


@pytest.fixture
def small_demo(monkeypatch):
    prompts = {"The patient": 6, "Plan:": 2}
    sizes = {"NOTES": 36, "WORLDS": 4, "HELD_OUT_TOKENS": 200, "REPORTED_SESSIONS": 2, "REPORTED_TOKENS": 32}
    sizes |= {"QUESTIONS": 6, "ANSWERED_SESSIONS": 2, "ATTACKED_SESSIONS": 4, "ATTACKED_TOKENS": 200}
    for name, value in {**sizes, "PROMPTS": prompts}.items():
        monkeypatch.setattr(demo_module, name, value)
    monkeypatch.setitem(demo_module.TRAINING, "max_record_tokens", 40)
    monkeypatch.setitem(LOOK, "pdf.fonttype", 3)  # half the time; study/test_rehearsal.py draws all figures as they are


def test_demo_runs_everything_and_resumes_instead_of_repeating(small_demo, tmp_path):
    dumpable(1)
    first = invoke("demo", tmp_path / "demo")
    assert dumpable() == 0  # it opened a curator: no core dump, no reader of its memory
    second = invoke("demo", tmp_path / "demo", "--json")
    assert (first.exit_code, second.exit_code) == (0, 0)
    for text in ("Made", "worlds: loss", "a patient was", "public model:", "without noise", "paclm serve", "--open"):
        assert text in first.stdout
    assert "Found" in second.stderr
    assert second.stderr.count("trained already") == 2
    figures = json.loads(second.stdout)
    assert figures["remaining_tokens"] == 1008  # 1,024 committed, eight spent in each run
    assert [text["prompt"] for text in figures["completions"]] == ["The patient", "Plan:"]
    assert all(text["public"] and text["private"] for text in figures["completions"])
    assert f"{figures['accuracy']['gaussian']:6.1%}" in first.stdout
    assert figures["knowledge"]["questions"] == 6
    assert set(figures["knowledge"]) == {"questions", "public", "gaussian", "plurality", "full"}
    assert figures["attack"]["without_noise"]["records"] == 1.0
    assert figures["report"].endswith("report.html")


def test_another_base_has_its_own_folder_and_says_time_and_memory_before_training(
    small_demo, small_base, tmp_path, monkeypatch, capsys
):
    names = ("tiny", "smollm2", "models/my.gguf", "someone/Model-1.7B")
    expected = ["paclm-demo", "paclm-demo-smollm2", "paclm-demo-my", "paclm-demo-Model-1.7B"]
    assert [str(demo_module.default_folder(name)) for name in names] == expected
    workspace = demo_module._prepare(tmp_path / "demo", str(small_base), Screen())
    demo_module._train(workspace, Screen())
    said = " ".join(capsys.readouterr().out.split())
    assert 0 < said.find("iB of memory") < said.find("worlds: loss")


def test_a_workspace_of_another_base_is_refused_before_anything_is_fetched(small_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "fetch_smollm2_once", lambda: pytest.fail("fetched"))
    demo_module._prepare(tmp_path / "demo", "tiny", Screen())
    with pytest.raises(WorkspaceError, match=r"paclm demo \S+ --base tiny; .* --base smollm2"):
        demo_module._prepare(tmp_path / "demo", "smollm2", Screen())


def test_smollm2_is_fetched_and_its_demo_proposed_on_a_gpu(small_demo, small_base, tmp_path, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(demo_module, "fetch_smollm2_once", lambda: fetched.append(small_base))
    monkeypatch.setattr("paclm.engine.base_model.fetched_smollm2", lambda: fetched[0])
    assert demo_module._prepare(tmp_path / "demo", "smollm2", Screen()).base.folder == small_base
    for is_gpu in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_gpu=is_gpu: is_gpu)
        capsys.readouterr()
        demo_module._print_next_steps(tmp_path, "tiny", Screen())
        assert ("on the GPU of this machine" in capsys.readouterr().out) is is_gpu


def test_settings_are_the_demos_until_the_owner_changes_them_and_patients_are_those_of_the_worlds(
    small_demo, tmp_path, capsys
):
    workspace = demo_module._prepare(tmp_path / "demo", "tiny", Screen())
    assert (workspace.training.learning_rate, workspace.training.batch_size) == (0.002, 2)
    assert (workspace.training.epochs, workspace.training.max_record_tokens) == (1, 40)
    assert (workspace.mechanism().per_token, workspace.mechanism().total) == (2.0**-16, 2.0**-6)
    patients, held_out = ({r.group for r in workspace.records(part)} for part in ("train", "heldout"))
    assert held_out
    assert f"{len(patients)} patients" in capsys.readouterr().out
    write_settings(workspace.settings.path, "mechanism", {"total": "2^-8"})
    assert demo_module._prepare(tmp_path / "demo", "tiny", Screen()).mechanism().total == 2.0**-8


def test_the_accuracies_name_a_share_of_a_gain_and_none_of_a_loss(capsys):
    truth, wrong = np.ones(40, dtype=int), np.r_[np.ones(20, dtype=int), np.zeros(20, dtype=int)]
    votes = np.tile(truth[:, None], (1, 4))
    for public, full, has_share in ((wrong, truth, True), (truth, wrong, False)):
        demo_module._accuracy(RecordedVotes(votes, truth, public=public, full=full), Screen())
        assert ("; 100% of the gain" in capsys.readouterr().out) is has_share


def test_names_of_the_hospital_are_counted_in_both_texts(monkeypatch, capsys):
    name = max(house_terms(), key=len)
    answer = SimpleNamespace(tokens=(1, 2), marks=("agreed", "disputed"), public_tokens=0, charged_nats=0.5)
    answer.spent_nats, answer.total_nats, answer.remaining_tokens = 0.5, 1.0, 2
    pieces = [SimpleNamespace(text=" at", mark="agreed"), SimpleNamespace(text=f" {name}", mark="disputed")]
    monkeypatch.setattr(demo_texts, "public_texts", lambda *_: [" at home"])
    monkeypatch.setattr(demo_texts, "private_texts", lambda *_: [(answer, pieces)])
    lab = SimpleNamespace(workspace=SimpleNamespace(mechanism=lambda: SimpleNamespace(per_token=2.0**-16)))
    figures = demo_texts.compare_texts(lab, {"Seen": 2}, 0.0, Screen())
    assert (figures["tokens"], figures["dissent"], figures["charged_nats"]) == (2, 1, 0.5)
    assert figures["completions"][0]["house_terms_public"] == []
    assert figures["completions"][0]["house_terms_private"] == [name]
    out = capsys.readouterr().out
    assert f"Seen at «⟨{name}⟩»" in out
    assert "the public model writes 0, the private one 1;" in out


def test_the_plan_prints_no_less_than_the_bounds(monkeypatch, capsys):
    monkeypatch.setattr(demo_module, "WORLDS", 32)
    demo_module._plan(Screen())
    shown = capsys.readouterr().out
    assert "58.82%" in shown  # 58.816
    assert "6.66%" in shown  # 6.651


def test_recall_that_the_owner_measured_on_two_collections_is_that_of_the_first(monkeypatch):
    budgets = {"public": None, "gaussian": 2.0**-16, "plurality": None, "full": None}
    same = {"part": "score", "kind": "all", "questions": 5}
    rows = [
        {**same, "collection": collection, "release": release, "per_token_nats": budget, "exact_match": collection / 10}
        for collection in (1, 2)
        for release, budget in budgets.items()
    ]
    result = Result(regime="knowledge", preset="quick", seed=0, scale={}, rows=rows, seconds=1.0)
    monkeypatch.setattr(demo_module, "_run_once", lambda *_: result)
    found = demo_module._knowledge(SimpleNamespace(), Screen())
    assert found == {"questions": 5, **dict.fromkeys(budgets, 0.1)}


def test_a_result_of_another_scale_is_measured_again(tmp_path, monkeypatch):
    """The owner may have asked questions of their own with the same workspace."""
    scale = KnowledgeScale(100, 16, budgets=(2.0**-16,), examples=3)
    kept = Result(regime="knowledge", preset="quick", seed=0, scale=asdict(scale), rows=[], seconds=1.0)
    kept.save(tmp_path)
    monkeypatch.setattr("paclm.study.run.results_folder", lambda _: tmp_path)
    monkeypatch.setattr("paclm.study.run.run_regime", lambda *_, **__: "measured again")
    assert demo_module._run_once(None, "knowledge", scale).regime == "knowledge"
    assert demo_module._run_once(None, "knowledge", replace(scale, questions=200)) == "measured again"
