"""`paclm demo`, shrunk: the whole product end to end on the embedded model and corpus, and again without repeating."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from paclm.cli import demo as demo_module
from paclm.cli.main import app
from paclm.study.votes import RecordedVotes


@pytest.fixture
def small_demo(monkeypatch):
    monkeypatch.setattr(demo_module, "NOTES", 36)
    monkeypatch.setattr(demo_module, "WORLDS", 4)
    monkeypatch.setattr(demo_module, "HELD_OUT_TOKENS", 200)
    monkeypatch.setattr(demo_module, "NEW_TOKENS", 8)
    monkeypatch.setitem(demo_module._CHANGES, "max_record_tokens = 2048", "max_record_tokens = 40")


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


def test_the_accuracies_name_a_share_of_a_gain_and_none_of_a_loss(capsys):
    truth, wrong = np.ones(40, dtype=int), np.r_[np.ones(20, dtype=int), np.zeros(20, dtype=int)]
    votes = np.tile(truth[:, None], (1, 4))
    demo_module._accuracy(RecordedVotes(votes, truth, public=wrong, full=truth))
    assert "of the gain over the public model 100% is kept" in capsys.readouterr().out
    demo_module._accuracy(RecordedVotes(votes, truth, public=truth, full=wrong))
    assert "the whole corpus gains nothing over the public model here." in capsys.readouterr().out
