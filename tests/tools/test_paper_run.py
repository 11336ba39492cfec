"""The stages of the full-scale run, rehearsed on a model of two layers: resumable, and one failure stays alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def paper_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_run", ROOT / "tools" / "paper_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "paper_run", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SMALL", module.Size(32, 8, 2, 4, 32))
    monkeypatch.setattr(module, "FIXTURE_POSITIONS", 50)
    return module


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    return path


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, base: Path, *options: str) -> Path:
    out = corpus.parent / "out"
    words = ["paper_run.py", "--stage", "1", "--small", "--corpus", str(corpus), "--base", str(base)]
    monkeypatch.setattr(sys, "argv", [*words, "--work", str(corpus.parent / "work"), "--out", str(out), *options])
    module.main()
    return out / "notes"


def test_a_stage_trains_once_and_leaves_small_results_and_votes(
    paper_run: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, small_base: Path
) -> None:
    found = run(paper_run, monkeypatch, corpus, small_base, "--only", "precision")
    stage = json.loads((found / "stage-1.json").read_text())
    assert stage["training"]["tokens"] > 0
    assert json.loads((found / "results" / "precision.json").read_text())["preset"] == "quick"
    with np.load(found / "votes-greedy.npz") as votes:
        assert votes["votes"].shape == (50, 4)
    run(paper_run, monkeypatch, corpus, small_base, "--only", "accuracy")
    again = json.loads((found / "stage-1.json").read_text())
    assert again["training"] == stage["training"]  # not trained again
    assert set(again["regimes"]) == {"precision", "accuracy"}


def test_a_regime_that_fails_or_comes_too_late_is_named_and_the_others_run(
    paper_run: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, small_base: Path
) -> None:
    genuine = paper_run.run_regime

    def fail(lab: object, regime: object, *rest: object) -> object:
        if regime.name == "flatness":  # type: ignore[attr-defined]
            raise ValueError("broken on purpose")
        return genuine(lab, regime, *rest)

    monkeypatch.setattr(paper_run, "run_regime", fail)
    found = run(paper_run, monkeypatch, corpus, small_base, "--only", "flatness", "precision")
    regimes = json.loads((found / "stage-1.json").read_text())["regimes"]
    assert regimes["flatness"] == {"failed": "ValueError: broken on purpose"}
    assert regimes["precision"]["rows"] == 2
    late = run(paper_run, monkeypatch, corpus, small_base, "--only", "census", "--minutes", "0")
    assert json.loads((late / "stage-1.json").read_text())["regimes"]["census"] == {"left_out": "no time"}


def test_worlds_can_be_trained_alone_and_sessions_cut_and_another_text_scored(
    paper_run: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, small_base: Path
) -> None:
    found = run(
        paper_run, monkeypatch, corpus, small_base, "--train", "full", "worlds", "--worlds-per-step", "2", "--only"
    )
    adapters = corpus.parent / "work" / "notes" / "adapters"
    assert {path.stem for path in adapters.glob("*.safetensors")} == {"full", "worlds"}
    stage = json.loads((found / "stage-1.json").read_text())
    assert stage["training"]["tokens"] > 0
    assert stage["regimes"] == {}
    assert not (found / "votes-greedy.npz").exists()
    with monkeypatch.context() as patch:
        asked = Mock(side_effect=ValueError)
        patch.setattr(paper_run, "run_regime", asked)
        run(paper_run, monkeypatch, corpus, small_base, "--only", "sessions", "--cut", "sessions=2", "horizons=64,128")
        assert asked.call_args.args[-1].sessions == 2
        assert asked.call_args.args[-1].horizons == (64, 128)
        assert asked.call_args.args[-1].queries == 4
    text = corpus.parent / "other.txt"
    text.write_text("A text that nobody trained on, and of some length. " * 20)
    run(paper_run, monkeypatch, corpus, small_base, "--only", "census", "--test-text", str(text))
    assert (found.parent / "notes-on-other" / "results" / "census.json").is_file()
    assert not (found / "results" / "census.json").exists()


@pytest.mark.parametrize("cut", ["session=2", "sessions", "sessions=few"])
def test_a_cut_that_would_cut_nothing_is_refused(
    paper_run: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, small_base: Path, cut: str
) -> None:
    with pytest.raises(SystemExit):
        run(paper_run, monkeypatch, corpus, small_base, "--only", "sessions", "--cut", cut)


def test_two_collections_of_the_first_worlds_are_studied_in_a_folder_of_their_own(
    paper_run: ModuleType, monkeypatch: pytest.MonkeyPatch, corpus: Path, small_base: Path
) -> None:
    found = run(paper_run, monkeypatch, corpus, small_base, "--stage", "5", "--only", "accuracy", "--worlds", "2")
    result = json.loads((found.parent / "notes-first-2" / "results" / "accuracy.json").read_text())
    assert {row["collection"] for row in result["rows"]} == {1, 2}
    assert result["provenance"]["worlds"] == 2
    assert "collection-2-first-2.safetensors" in result["provenance"]["adapters"]
    assert not (found / "results").exists()
