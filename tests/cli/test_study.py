"""`paclm study` as a user types it."""

import json
import re
from pathlib import Path

import pytest

from cli.commands import figures_of, invoke
from paclm.errors import EngineError, InvalidInput
from paclm.study.regimes import NAMES
from paclm.study.tables import all_tables
from study.small_lab import build_study_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, texts, small_base):
    return build_study_workspace(tmp_path_factory.mktemp("cli-study") / "clinic", texts[:60], small_base)


def test_a_regime_is_run_its_rows_are_kept_and_a_report_is_written(workspace):
    before = sorted((workspace / "curator").iterdir())
    done = invoke("study", "run", workspace, "census")
    assert "census: 2 rows" in done.output
    assert "unanimity, k = 200" in done.output
    assert str(workspace / "study" / "results") in done.stdout
    result = json.loads((workspace / "study" / "results" / "census.json").read_text())
    assert result["preset"] == "quick"
    assert result["provenance"]["stamp"].startswith("NOT PRIVATE")
    figures = figures_of("study", "report", workspace)
    assert figures["tables"] == 3
    assert Path(figures["report"]).read_text().startswith("<!doctype html>")
    assert sorted((workspace / "curator").iterdir()) == before, "no secret was drawn and no ledger opened"


def test_the_report_is_opened_in_a_browser_where_there_is_a_display(workspace, monkeypatch):
    invoke("study", "run", workspace, "census")
    page = workspace / "study" / "report.html"
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or True)
    for environment in ({}, {"DISPLAY": ":0", "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}, {"DISPLAY": ":0"}):
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        done = invoke("study", "report", workspace, "--open")
        is_opened = list(environment) == ["DISPLAY"]
        assert opened == [page.as_uri()] * is_opened
        assert (f"Opened {page}" in done.output) is is_opened
        assert str(page) in done.output


def test_a_regime_that_fails_does_not_stop_the_others(workspace, paclm, monkeypatch):
    from paclm.study import run as running

    really = running.run_regime

    def refuse(lab, regime, *more):
        if regime.name == "census":
            raise EngineError("No room for a census.")
        return really(lab, regime, *more)

    monkeypatch.setattr(running, "run_regime", refuse)
    both = paclm("study", "run", str(workspace), "census", "flatness")
    assert (both.status, "No room for a census." in both.err) == (2, True)
    assert (workspace / "study" / "results" / "flatness.json").is_file()
    with pytest.raises(EngineError):
        invoke("study", "run", workspace, "census")


def test_a_text_of_ones_own_is_scored(workspace, tmp_path, texts):
    (tmp_path / "text.txt").write_text("\n\n\n".join(texts[100:103]))
    shown = figures_of("study", "run", workspace, "census", "--test-text", tmp_path / "text.txt")
    assert set(shown["seconds"]) == {"census"}


def test_public_text_reaches_the_lab_and_may_not_be_the_text_that_is_scored(workspace, tmp_path, texts, monkeypatch):
    labs = []
    monkeypatch.setattr("paclm.study.run.run_regimes", lambda lab, *_: labs.append(lab))
    (tmp_path / "public.txt").write_text("\n\n\n".join(texts[100:103]))
    invoke("study", "run", workspace, "census")
    invoke("study", "run", workspace, "census", "--public-text", tmp_path / "public.txt")
    both = ("--public-text", tmp_path / "public.txt", "--test-text", tmp_path / "public.txt")
    invoke("study", "run", workspace, "census", *both)
    assert labs[0].public_passages(20) == []
    assert sum(passage.num_scored for passage in labs[1].public_passages(20)) == 20
    with pytest.raises(InvalidInput):
        labs[2].public_passages(20)


def test_other_text_is_read_as_records_and_reaches_the_lab(workspace, tmp_path, monkeypatch):
    labs = []
    monkeypatch.setattr("paclm.study.run.run_regimes", lambda lab, *_: labs.append(lab))
    (tmp_path / "other.jsonl").write_text('{"text": "One article."}\n{"text": "Another."}\n')
    invoke("study", "run", workspace, "controls", "--other-text", tmp_path / "other.jsonl")
    assert labs[0].other_text == ["One article.", "Another."]


def test_all_leaves_knowledge_out_where_there_are_no_questions(workspace, tmp_path, monkeypatch):
    run = []
    monkeypatch.setattr("paclm.study.run.run_regimes", lambda lab, regimes, *_: run.append([r.name for r in regimes]))
    without = invoke("study", "run", workspace, "all")
    assert "all leaves out knowledge" in without.output
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "the old", "answer": " house"}\n')
    given = invoke("study", "run", workspace, "all", "--questions", file)
    assert "leaves out" not in given.output
    assert set(run[1]) - set(run[0]) == {"knowledge"}
    for words in (["knowledge"], ["all", "knowledge"], ["census", "--questions", file]):
        with pytest.raises(InvalidInput, match="--questions"):
            invoke("study", "run", workspace, *words)
    assert len(run) == 2


def test_questions_of_ones_own_are_asked(workspace, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "the old", "answer": " house"}\n{"prompt": "mild", "answer": " fever"}\n')
    assert "exact match, public model" in invoke("study", "run", workspace, "knowledge", "--questions", file).output


def test_help_lists_every_regime_with_its_tables():
    shown = invoke("study", "run", "--help").stdout
    for name in NAMES:
        assert re.search(rf"^  {name} +(tab|fig):", shown, flags=re.MULTILINE), name
    for label in [*(table.label for table in all_tables() if table.regimes), "fig:universe"]:
        assert re.search(rf"{label}(,|$)", shown, flags=re.MULTILINE), label


def test_files_of_an_earlier_run_are_counted_and_again_reuses_none(workspace):
    words = ["study", "run", workspace, "accuracy", "--seed", "1"]  # regimes share votes, and flatness took those of 0
    reused = ["earlier run" in invoke(*words, *more).output for more in ([], [], ["--again"])]
    assert reused == [False, True, False]
