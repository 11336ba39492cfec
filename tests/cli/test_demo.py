"""`paclm demo`, shrunk: the whole product end to end on the embedded model and corpus, and again without repeating."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from paclm.cli import demo as demo_module
from paclm.cli.main import app
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.settings import write_settings


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo_module, "NOTES", 36)
    monkeypatch.setattr(demo_module, "WORLDS", 4)
    monkeypatch.setattr(demo_module, "HELD_OUT_TOKENS", 200)
    monkeypatch.setattr(demo_module, "NEW_TOKENS", 8)
    monkeypatch.setitem(demo_module.TRAINING, "max_record_tokens", 40)


def test_demo_runs_everything_and_resumes_instead_of_repeating(small_demo, tmp_path):
    first = CliRunner().invoke(app, ["demo", str(tmp_path / "demo")], catch_exceptions=False)
    assert first.exit_code == 0
    said = (
        "worlds: loss on own records",
        "no attack on whether a patient was in the",
        "public model",
        "without noise",
        "paclm serve",
    )
    for text in ("Made", *said, "report.html"):
        assert text in first.output
    second = CliRunner().invoke(app, ["demo", str(tmp_path / "demo")], catch_exceptions=False)
    assert second.exit_code == 0
    assert "Found" in second.output
    assert second.output.count("trained already") == 2
    assert "1,008 tokens left" in second.output  # 1,024 committed, eight spent in each run


def test_the_settings_are_the_demos_own_until_somebody_changes_them(small_demo, tmp_path):
    workspace = demo_module._prepare(tmp_path / "demo")
    assert (workspace.training.learning_rate, workspace.training.batch_size) == (0.002, 2)
    assert (workspace.training.epochs, workspace.training.max_record_tokens) == (1, 40)
    assert (workspace.mechanism().per_token, workspace.mechanism().total) == (2.0**-16, 2.0**-6)
    write_settings(workspace.settings.path, "mechanism", {"total": "2^-8"})
    again = demo_module._prepare(tmp_path / "demo")
    assert again.mechanism().total == 2.0**-8


def test_the_patients_counted_are_those_of_the_worlds(small_demo, tmp_path, capsys):
    workspace = demo_module._prepare(tmp_path / "demo")
    patients, held_out = ({r.group for r in workspace.records(part)} for part in ("train", "heldout"))
    assert held_out
    assert f"notes of {len(patients)} patients for the worlds" in capsys.readouterr().out


def test_the_accuracies_name_a_share_of_a_gain_and_none_of_a_loss(capsys):
    truth, wrong = np.ones(40, dtype=int), np.r_[np.ones(20, dtype=int), np.zeros(20, dtype=int)]
    votes = np.tile(truth[:, None], (1, 4))
    demo_module._accuracy(RecordedVotes(votes, truth, public=wrong, full=truth))
    assert "of the gain over the public model 100% is kept" in capsys.readouterr().out
    demo_module._accuracy(RecordedVotes(votes, truth, public=truth, full=wrong))
    assert "the whole corpus gains nothing over the public model here." in capsys.readouterr().out


def test_the_plan_shows_no_less_than_the_bounds(capsys):
    demo_module._plan()
    shown = capsys.readouterr().out
    assert "58.82% of the time (a guess: 50%)" in shown  # 58.816
    assert "more than 6.66% (a guess: 3.1%)" in shown  # 6.651
