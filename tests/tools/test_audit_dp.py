"""The auditor's run in small: real trainings, a stopped run continues, and the report has both verdicts."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import audit_dp

KINDS = [(1.0, True), (1.0, False), (0.5, True), (0.5, False)]


@pytest.fixture(scope="module")
def experiment():
    return audit_dp.Experiment(sampling_rate=1.0, steps=1, epsilon=4.0)


def test_a_stopped_run_continues_and_reports(experiment, tmp_path, monkeypatch):
    path, observer = tmp_path / "scores.jsonl", audit_dp.Observer(experiment)
    train = audit_dp.Experiment.train
    calls = []

    def stopped(self, has_canary, noise, draws):
        calls.append((noise, has_canary))
        if len(calls) == 50:
            raise KeyboardInterrupt
        return train(self, has_canary, noise, draws)

    monkeypatch.setattr(audit_dp.Experiment, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        audit_dp.run_trainings(experiment, observer, audit_dp.Scores(path, experiment), [1.0, 0.5], 20)
    with path.open("a") as file:
        file.write("[1.0, tr")  # a line that a kill cut short
    scores = audit_dp.Scores(path, experiment)
    assert sum(scores.count(*kind) for kind in KINDS) == 49
    audit_dp.run_trainings(experiment, observer, scores, [1.0, 0.5], 20)
    assert len(calls) == 50 + 31
    assert [audit_dp.Scores(path, experiment).count(*kind) for kind in KINDS] == [20] * 4
    report = json.loads(json.dumps(audit_dp.make_report(experiment, observer, scores, [1.0, 0.5])))
    assert [(a["noise"], a["statistic"]) for a in report["audits"]] == [
        (noise, statistic) for noise in (1.0, 0.5) for statistic in ("projection", "loss")
    ]
    assert report["promise"]["epsilon"] <= experiment.epsilon
    assert report["canary_norm_over_clip"] > 1.0
    assert not report["is_as_expected"], "twenty trainings cannot tell half the noise"
    with pytest.raises(SystemExit, match="another experiment"):
        audit_dp.Scores(path, audit_dp.Experiment(steps=2))


def test_a_canary_that_was_trained_on_scores_higher(experiment):
    """Without noise to speak of: both guesses are certain."""
    observer = audit_dp.Observer(experiment)
    with_canary, without = (
        observer.scores(experiment.train(has_canary, 1e-3, audit_dp.DpRandomness())) for has_canary in (True, False)
    )
    assert with_canary[0] > without[0]
    assert with_canary[1] > without[1]
