"""The stages of the full-scale run on a model of two layers: resumable, and one failure does not stop the others."""

import errno
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from paclm.study.expectation import IN_EXPECTATION

ROOT = Path(__file__).parents[2]


@pytest.fixture
def paper_run(monkeypatch):
    spec = importlib.util.spec_from_file_location("paper_run", ROOT / "tools" / "gpu" / "paper_run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "paper_run", module)
    spec.loader.exec_module(module)
    import paper_options

    monkeypatch.setitem(paper_options.SIZES, "small", module.Size(32, 8, 2, 4, 32))
    monkeypatch.setattr(module, "FIXTURE_POSITIONS", 50)
    return module


@pytest.fixture
def corpus(tmp_path, texts):
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:40]))
    return path


@pytest.fixture
def run(paper_run, monkeypatch, corpus, small_base):
    def run(*options):
        out = corpus.parent / "out"
        words = ["paper_run.py", "--stage", "1", "--size=small", "--corpus", str(corpus), "--base", str(small_base)]
        monkeypatch.setattr(sys, "argv", [*words, "--work", str(corpus.parent / "work"), "--out", str(out), *options])
        paper_run.main()
        return out / "notes"

    return run


def read(path):
    return json.loads(path.read_text())


def test_a_stage_trains_once_and_leaves_small_results_and_votes(run, paper_run, monkeypatch):
    found = run("--only", "precision")
    stage = read(found / "stage-1.json")
    assert stage["training"]["tokens"] > 0
    assert read(found / "results" / "precision.json")["preset"] == "quick"
    with np.load(found / "votes-greedy.npz") as votes:
        assert votes["votes"].shape == (50, 4)
    run("--only", "accuracy")
    again = read(found / "stage-1.json")
    assert again["training"] == stage["training"]  # not trained again
    assert set(again["regimes"]) == {"precision", "accuracy"}
    with monkeypatch.context() as patch:
        asked = Mock(side_effect=ValueError)
        patch.setattr(paper_run, "run_regime", asked)
        run("--only", "precision", "accuracy", "--minutes", "0")
        assert not asked.called  # what is done stays done, also where no time is left
        for others in (["--again"], ["--cut", "positions=30"], ["--seed", "1"]):
            with pytest.raises(SystemExit, match=r"^Not finished: precision\. "):
                run("--only", "precision", *others)
        assert asked.call_count == 3
    path = found / "results" / "accuracy.json"
    for other in ("{}", json.dumps({**read(path), "seconds": 1.0, "notes": ["another stage's"]})):
        path.write_text(other)  # damaged, or in its place
        run("--only", "accuracy")
        assert read(path)["notes"] == [IN_EXPECTATION]


def test_a_regime_that_fails_or_comes_too_late_is_named_and_the_others_run(run, paper_run, monkeypatch, corpus):
    genuine = paper_run.run_regime

    def fail(lab, regime, *rest):
        if regime.name == "flatness":
            raise ValueError("broken on purpose")
        return genuine(lab, regime, *rest)

    monkeypatch.setattr(paper_run, "run_regime", fail)
    with pytest.raises(SystemExit, match=r"^Not finished: flatness\. "):
        run("--only", "flatness", "precision")
    found = corpus.parent / "out" / "notes"
    regimes = read(found / "stage-1.json")["regimes"]
    assert regimes["flatness"] == {"failed": "ValueError: broken on purpose"}
    assert regimes["precision"]["rows"] == 2
    with pytest.raises(SystemExit, match=r"^Not finished: census\. "):
        run("--only", "census", "--minutes", "0")
    assert read(found / "stage-1.json")["regimes"]["census"] == {"left_out": "no time"}


def test_worlds_can_be_trained_alone_and_sessions_cut_and_another_text_scored(run, paper_run, monkeypatch, corpus):
    found = run("--train", "full", "worlds", "--worlds-per-step", "2", "--only")
    adapters = corpus.parent / "work" / "notes" / "adapters"
    assert {path.stem for path in adapters.glob("*.safetensors")} == {"full", "worlds"}
    stage = read(found / "stage-1.json")
    assert stage["training"]["tokens"] > 0
    assert stage["regimes"] == {}
    assert not (found / "votes-greedy.npz").exists()
    with monkeypatch.context() as patch:
        asked = Mock(side_effect=ValueError)
        patch.setattr(paper_run, "run_regime", asked)
        cuts = ("sessions=2", "horizons=64,128", "budgets=0.5")
        with pytest.raises(SystemExit):
            run("--stage", "2", "--only", "sessions", "--cut", *cuts)
        preset = asked.call_args.args[-1]
        assert (preset.budgets, preset.sessions, preset.horizons, preset.queries) == ((0.5,), 2, (64, 128), 4)
    text = corpus.parent / "other.txt"
    text.write_text("A text that nobody trained on, and of some length. " * 20)
    run("--only", "census", "--test-text", str(text))
    assert (found.parent / "notes-on-other" / "results" / "census.json").is_file()
    assert not (found / "results" / "census.json").exists()


def test_figures_are_computed_elsewhere_from_votes_and_nothing_else_is(run, corpus, capsys):
    found = run("--only", "accuracy", "temperature")
    results = found / "results"
    here = {name: read(results / f"{name}.json") for name in ("accuracy", "temperature")}
    shutil.rmtree(results)
    run("--votes")
    assert not list(results.glob("*")), "votes alone"
    shutil.rmtree(corpus.parent / "work" / "notes" / "adapters")
    run("--from-votes", "--only", *here)
    for name, before in here.items():
        after = read(results / f"{name}.json")
        assert after["rows"] == before["rows"]
        assert after["provenance"]["machine"] == before["provenance"]["machine"]
        assert after["provenance"]["votes_from"] == read(found / "stage-1.json")["device"]
        assert before["provenance"]["votes_from"] is None
    for words, missing in ((["census"], "census"), (["accuracy", "--cut", "positions=30"], "accuracy")):
        with pytest.raises(SystemExit, match=rf"^Not finished: {missing}\. "):
            run("--from-votes", "--only", *words)
        assert "run it there" in capsys.readouterr().out
    (found / "stage-1.json").unlink()
    with pytest.raises(SystemExit, match=r"has no log of stage 1\. Take its votes first"):
        run("--from-votes", "--only", "accuracy")


def test_without_a_stage_all_run_and_those_that_did_not_finish_are_named(paper_run, monkeypatch, corpus, capsys):
    words = ["paper_run.py", "--corpus", str(corpus), "--work", str(corpus.parent / "work"), "--out", "out"]
    monkeypatch.setattr(sys, "argv", [*words, "--size=small"])
    statuses, asked = iter([0, 1, 0, 0, 0, 2, 0]), []
    monkeypatch.setattr(
        paper_run.subprocess, "run", lambda command, check: asked.append(command) or Mock(returncode=next(statuses))
    )
    with pytest.raises(SystemExit, match=r"^Not finished: stage 2; stage 5, collection 3\. Repeat"):
        paper_run.main()
    assert [(command[-3], command[-1]) for command in asked] == [
        *(("1", "1"), ("2", "1"), ("3", "1"), ("4", "1")),
        *(("5", "2"), ("5", "3"), ("6", "1")),
    ]
    assert all(command[1:9] == [paper_run.__file__, *words[1:], "--size=small"] for command in asked)
    assert re.search(r"stage 2: 0\.0 minutes, not finished\n", capsys.readouterr().out)
    asked.clear()
    monkeypatch.setattr(paper_run.subprocess, "run", lambda command, check: asked.append(command) or Mock(returncode=0))
    monkeypatch.setattr(sys, "argv", [*words, "--size=cpu"])
    paper_run.main()
    assert [(command[-3], command[-1]) for command in asked] == [("1", "1"), ("4", "1"), ("5", "2"), ("5", "3")]
    for option in (["--only", "accuracy"], ["--again"], ["--collection", "2"], ["--votes"]):
        monkeypatch.setattr(sys, "argv", [*words, *option])
        with pytest.raises(SystemExit) as left:
            paper_run.main()
        assert left.value.code == 2
        assert f"{option[0]} is for one stage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--votes --from-votes", "--votes .* --from-votes"),
        ("--from-votes --train worlds", "--train .* machine"),
        ("--stage 2 --only sessions --cut session=2", "--cut session:"),
        ("--stage 2 --only sessions --cut sessions", "sessions=50"),
        ("--stage 2 --only sessions --cut sessions=few", "sessions=50"),
        ("--stage 2 --only sessions --cut sessions=0", "sessions=100"),
        ("--stage 2 --only sessions --cut sessions=2.5", "sessions=100"),
        ("--stage 2 --only sessions --cut sessions=2,3", "sessions=100"),
        ("--stage 2 --only sessions --cut horizons=64,-1", "horizons=64,256,1024,2048,4096"),
        ("--only sweep", "stage 1 .*precision, accuracy, .*sweep"),
        ("--worlds 1", "--worlds .* 2 .* 4, not 1"),
        ("--worlds-per-step 0", "--worlds-per-step .* not 0"),
        ("--minutes nan", "--minutes .* not nan"),
        ("--name ../elsewhere", "--name .* '../elsewhere'"),
        ("--test-text nowhere.txt", "nowhere.txt"),
    ],
)
def test_bad_options_are_refused_before_any_work(run, corpus, capsys, words, reason):
    with pytest.raises(SystemExit) as left:
        run(*words.split())
    assert left.value.code == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (corpus.parent / "work").exists()


def test_a_missing_input_ends_with_an_error_line(run, paper_run, monkeypatch, corpus, small_base, capsys):
    with pytest.raises(SystemExit, match=r"^Error: .*nowhere"):
        run("--corpus", "nowhere.jsonl")
    words = ["paper_run.py", "--stage", "1", "--corpus", str(corpus), "--base", str(small_base)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [*words, "--work", str(corpus.parent), "--out", str(corpus.parent / "out")])
        patch.setattr(paper_run, "pick_device", lambda _: torch.device("cpu"))
        with pytest.raises(SystemExit, match=r"notes.jsonl .* 40 .* 2,560 "):
            paper_run.main()
    assert "no GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^Error: .*'words'"):
        run("--train", "full", "words", "--only")
    with pytest.raises(SystemExit, match=r"^Error: .* --train"):
        run("--train", "--only", "precision")
    assert not list((corpus.parent / "work").rglob("*.safetensors"))  # before anything was trained
    run("--train", "full", "--only")  # no regime misses the worlds
    assert [path.stem for path in (corpus.parent / "work").rglob("*.safetensors")] == ["full"]


def test_a_full_disk_ends_with_an_error_line_and_keeps_the_stage_log(run, paper_run, monkeypatch):
    found = run("--only")
    before = (found / "stage-1.json").read_text()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(SystemExit, match=r"^Error: .*No space left on device"):
        run("--only")
    assert (found / "stage-1.json").read_text() == before
    monkeypatch.setattr(paper_run, "run_regime", Mock(side_effect=full))
    monkeypatch.setattr(paper_run, "write_log", Mock())
    with pytest.raises(SystemExit, match=r"^Error: No space left on device"):
        run("--only", "precision", "census")
    assert paper_run.run_regime.call_count == 1  # the next regime is not started
    assert json.loads(before)["training"]["tokens"] > 0


def test_another_collection_and_the_first_worlds_are_studied_in_folders_of_their_own(run):
    found = run("--stage", "5", "--only", "accuracy")
    other = run("--stage", "5", "--only", "accuracy", "--collection", "2", "--worlds", "2")
    first = read(found / "results" / "accuracy.json")
    second = read(other.parent / "notes-collection-2-first-2" / "results" / "accuracy.json")
    assert (first["provenance"]["worlds"], second["provenance"]["worlds"]) == (4, 2)
    assert first["provenance"]["adapters"] != second["provenance"]["adapters"]
    assert second["provenance"]["arguments"]["seed"] == first["provenance"]["arguments"]["seed"] + 1


def test_a_regime_that_trains_its_own_points_needs_no_worlds_and_has_a_size_of_its_own(run, paper_run, monkeypatch):
    asked = Mock(side_effect=ValueError)
    monkeypatch.setattr(paper_run, "run_regime", asked)
    with pytest.raises(SystemExit, match=r"^Not finished: depth\. "):
        run("--stage", "6", "--cut", "most_rates=1")
    lab, regime, *_, scale = asked.call_args.args
    assert (regime.name, scale.most_rates, lab.num_worlds) == ("depth", 1, 4)
    assert not list(lab.workspace.path.rglob("*.safetensors"))
    import paper_options

    monkeypatch.setattr(paper_options, "OTHERS", {6: paper_run.Size(24, 8, 0, 2, 32)})
    real = sys.argv.copy()
    real.remove("--size=small")
    monkeypatch.setattr(sys, "argv", real)
    with pytest.raises(SystemExit, match=r"^Not finished: depth\. "):
        paper_run.main()
    assert asked.call_args.args[0].workspace.path.name == "notes-of-24"
    assert asked.call_args.args[2] == "paper"
