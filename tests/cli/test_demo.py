"""`paclm demo`, shrunk: the whole product end to end on the embedded model and corpus, and again without repeating."""

import numpy as np
import pytest

from cli.commands import invoke
from paclm.cli import demo as demo_module
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.settings import write_settings


@pytest.fixture
def small_demo(monkeypatch):
    for name, value in {"NOTES": 36, "WORLDS": 4, "HELD_OUT_TOKENS": 200, "NEW_TOKENS": 8}.items():
        monkeypatch.setattr(demo_module, name, value)
    monkeypatch.setitem(demo_module.TRAINING, "max_record_tokens", 40)


def test_demo_runs_everything_and_resumes_instead_of_repeating(small_demo, tmp_path):
    first, second = (invoke("demo", tmp_path / "demo") for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    for text in ("Made", "worlds: loss", "a patient was", "public model", "without noise", "paclm serve", ".html"):
        assert text in first.output
    assert "Found" in second.output
    assert second.output.count("trained already") == 2
    assert "1,008 tokens left" in second.output  # 1,024 committed, eight spent in each run


def test_settings_are_the_demos_until_the_owner_changes_them_and_patients_are_those_of_the_worlds(
    small_demo, tmp_path, capsys
):
    workspace = demo_module._prepare(tmp_path / "demo")
    assert (workspace.training.learning_rate, workspace.training.batch_size) == (0.002, 2)
    assert (workspace.training.epochs, workspace.training.max_record_tokens) == (1, 40)
    assert (workspace.mechanism().per_token, workspace.mechanism().total) == (2.0**-16, 2.0**-6)
    patients, held_out = ({r.group for r in workspace.records(part)} for part in ("train", "heldout"))
    assert held_out
    assert f"{len(patients)} patients" in capsys.readouterr().out
    write_settings(workspace.settings.path, "mechanism", {"total": "2^-8"})
    assert demo_module._prepare(tmp_path / "demo").mechanism().total == 2.0**-8


def test_the_accuracies_name_a_share_of_a_gain_and_none_of_a_loss(capsys):
    truth, wrong = np.ones(40, dtype=int), np.r_[np.ones(20, dtype=int), np.zeros(20, dtype=int)]
    votes = np.tile(truth[:, None], (1, 4))
    for public, full, has_share in ((wrong, truth, True), (truth, wrong, False)):
        demo_module._accuracy(RecordedVotes(votes, truth, public=public, full=full))
        assert ("; 100% of the gain" in capsys.readouterr().out) is has_share


def test_the_plan_prints_no_less_than_the_bounds(capsys):
    demo_module._plan()
    shown = capsys.readouterr().out
    assert "58.82%" in shown  # 58.816
    assert "6.66%" in shown  # 6.651
