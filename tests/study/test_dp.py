"""The regime `dp`: scores as `accuracy` does, trains through the log, never touches the served adapter."""

import json
import re
from dataclasses import replace

import pytest
import torch

from paclm.curator.dp_account import all_trainings
from paclm.engine.adapters import AdapterStack
from paclm.study.adapter_scores import ScoredAdapters
from paclm.study.recorded_votes import collect_votes
from paclm.study.regimes import NAMES, ON_REQUEST, SPENDING, accuracy, dp, releases
from paclm.study.results import Result
from paclm.study.run import regimes_named, run_regime
from paclm.study.table import to_markdown
from paclm.study.tables import table_named
from paclm.worlds.layout import DP_FILE
from paclm.worlds.workspace import Workspace
from study.rehearsal import build_trainable_workspace
from study.small_lab import open_lab, rows_of

SCALE = dp.DpScale(300, 2, (2.0, 8.0), delta=1e-3)


@pytest.fixture(scope="module")
def trainable(tmp_path_factory, texts, small_base):
    return build_trainable_workspace(tmp_path_factory.mktemp("dp") / "template", texts[:40], small_base)


def adapter(lab, name="full"):
    return AdapterStack.load(lab.workspace.adapters_path / f"{name}.safetensors")


def scored(lab, *stacks):
    facts = {"epsilon": 8.0, "delta": 1e-5}
    return dp.score(lab, SCALE, [ScoredAdapters(facts, [stack]) for stack in stacks])


def test_the_full_adapter_keeps_all_and_an_empty_one_nothing(small_lab):
    full = adapter(small_lab)
    empty = full.map(torch.zeros_like)
    rows = scored(small_lab, full, empty)
    for row in rows[:2]:
        assert row["accuracy"] == row["accuracy_full"]
        assert row["loss"] == pytest.approx(row["loss_full"])
        assert row["retained_gain"] in (None, 1.0)  # None: random adapters may be worse than the public model
    for row in rows[2:]:
        assert row["accuracy"] == row["accuracy_public"]
        assert row["gain_points"] == 0.0
        assert row["loss"] == pytest.approx(row["loss_public"])
    assert rows[0]["loss_full"] != pytest.approx(rows[0]["loss_public"])


def test_positions_and_coins_are_those_of_accuracy(small_lab, monkeypatch):
    asked = []

    def spy(engine, passages, decodings, seeds, *rest):
        asked.append((list(passages), tuple(decodings), list(seeds)))
        return collect_votes(engine, passages, decodings, seeds, *rest)

    monkeypatch.setattr("paclm.study.lab.collect_votes", spy)
    monkeypatch.setattr("paclm.study.adapter_scores.collect_votes", spy)
    rows = scored(small_lab, adapter(small_lab, "worlds").worlds([3]))
    theirs = rows_of(small_lab, accuracy.REGIME, accuracy.AccuracyScale(SCALE.positions, SCALE.gumbel_draws))
    ours, others = asked
    assert ours == others
    for decoder in ("greedy", "gumbel"):
        own, other = (next(row for row in found if row["decoder"] == decoder) for found in (rows, theirs))
        assert (own["accuracy_public"], own["accuracy_full"]) == (other["accuracy_public"], other["accuracy_full"])


def test_trainings_at_one_epsilon_are_averaged(small_lab):
    worlds = [adapter(small_lab, "worlds").worlds([i]) for i in (0, 1, 2)]
    alone = scored(small_lab, *worlds)
    (greedy, _) = dp.score(small_lab, SCALE, [ScoredAdapters({"epsilon": 8.0, "delta": 1e-5}, worlds)])
    losses = [row["loss"] for row in alone if row["decoder"] == "greedy"]
    assert len(set(losses)) == 3
    assert greedy["trainings"] == 3
    assert greedy["loss"] == pytest.approx(sum(losses) / 3)
    assert greedy["accuracy"] == pytest.approx(sum(row["accuracy"] for row in alone[::2]) / 3)


def test_a_study_trains_through_the_log_and_beside_the_served_adapter(trainable, tmp_path):
    lab = open_lab(trainable, tmp_path / "lab")
    result = run_regime(lab, dp.REGIME, "quick", scale=SCALE)
    opened = Workspace.open(lab.workspace.path)
    assert [training["epsilon"] for training in all_trainings(opened).values()] == [2.0, 8.0]
    assert DP_FILE not in opened.manifest.adapters
    assert "2 DP trainings" in result.notes[0]
    assert [(row["epsilon"], row["decoder"]) for row in result.rows] == [
        (epsilon, decoder) for epsilon in (2.0, 8.0) for decoder in ("greedy", "gumbel")
    ]
    for row in result.rows:
        assert 0.5 < row["mia_bound"] < 1.0
        assert row["tpr_at_fpr_0_1_percent"] < row["tpr_at_fpr_1_percent"]
        assert row["delta"] == SCALE.delta
        assert row["training_seconds"] > 0.0
    again = run_regime(lab, dp.REGIME, "quick", scale=SCALE)
    assert len(all_trainings(opened)) == 2  # nothing is trained, and spent, twice
    assert [row["accuracy"] for row in again.rows] == [row["accuracy"] for row in result.rows]
    settings = opened.path / "paclm.toml"
    settings.write_text(re.sub("# clip_norm = .*", "clip_norm = 0.0625", settings.read_text()))
    run_regime(lab, dp.REGIME, "quick", scale=replace(SCALE, epsilons=(8.0,)))
    *before, last = all_trainings(opened).values()
    assert len(before) == 2
    assert (last["epsilon"], last["clip_norm"]) == (8.0, 0.0625)


def test_all_runs_nothing_that_spends():
    assert "dp" in SPENDING
    assert [regime.name for regime in regimes_named(["all"])] == [name for name in NAMES if name not in ON_REQUEST]
    assert [regime.name for regime in regimes_named(["all", *ON_REQUEST])] == list(NAMES)


def test_tables_show_dp_and_the_full_adapter_beside_releases(small_lab):
    played = run_regime(small_lab, releases.REGIME, "quick", scale=releases.ReleasesScale(60, 2, 4, 20))
    facts = {"epsilon": 8.0, "delta": 2.5e-4, "mia_bound": 0.7701, "tpr_at_fpr_0_1_percent": 0.11}
    facts |= {"tpr_at_fpr_1_percent": 0.23, "training_seconds": 61.0}
    rows = [
        {"collection": 1, **row} for row in dp.score(small_lab, SCALE, [ScoredAdapters(facts, [adapter(small_lab)])])
    ]
    trained = Result(regime="dp", preset="quick", seed=0, scale={}, rows=json.loads(json.dumps(rows)), seconds=1.0)
    table = table_named("tab:releases")
    alone = table.build({"releases": played})
    assert [line[0] for line in alone.rows][-2:] == ["public model", "full corpus"]
    assert [line[-1] for line in alone.rows[-3:]] == ["nothing", "no record is read", "nothing"]
    both = table.build({"releases": played, "dp": trained})
    assert (both.rows[-1][0], both.rows[-1][-1]) == ("dp:8", "ε = 8, δ = 0.00025")
    shown = table_named("tab:dp").build({"releases": played, "dp": trained})
    methods = [line[0] for line in shown.rows]
    assert methods[:3] == ["public model", "full corpus", "dp:8"]
    assert {"gaussian", "plurality", "mixture", "channel"} <= set(methods)
    assert "0.7701" in to_markdown(shown)
    assert len(table_named("tab:dp").build({"dp": trained}).rows) == 3
