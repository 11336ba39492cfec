"""Adapted layers and rank: the points, the choice of learning rates, and rows from a small workspace."""

import dataclasses
import math

import numpy as np
import pytest

from paclm.config import TrainingConfig
from paclm.privacy.leak import Estimate
from paclm.study import depth_points
from paclm.study.decoding import GUMBEL
from paclm.study.depth_points import (
    DepthPoint,
    DepthScale,
    Trainer,
    choose_points,
    climb,
    smallest_within_error,
    spread,
)
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.quality import TargetScores
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.regimes import depth
from paclm.study.results import Result
from paclm.study.tables import table_named
from study.rehearsal import build_trainable_workspace
from study.small_lab import interrupt, open_lab, rows_of

SCALE = DepthScale(
    worlds=4,
    records=1000,
    positions=80,
    trial_worlds=2,
    trial_positions=120,
    most_rates=1,
    sessions=4,
    tokens=16,
    streams=2,
    timed_worlds=3,
    steps=1,
    ranks=(2, 4),
    window=24,
    context=16,
)
TIMES = ("training_seconds", "training_tokens_per_second", "step_ms", "tokens_per_second", "speed_ratio")


@pytest.fixture(scope="module")
def template(tmp_path_factory, texts, small_base):
    built = build_trainable_workspace(tmp_path_factory.mktemp("depth") / "template", texts[:40], small_base)
    settings = built / "paclm.toml"
    settings.write_text(settings.read_text().replace("learning_rate = 0.002", "learning_rate = 0.05"))  # worlds dissent
    return built


@pytest.fixture
def lab(template, tmp_path):
    return open_lab(template, tmp_path / "lab")


@pytest.fixture(scope="module")
def whole(template):
    return rows_of(open_lab(template, template.parent / "whole"), depth.REGIME, SCALE)


def points_of(rows, decoder="gumbel"):
    return {(row["layers"], row["rank"]): row for row in rows if row.get("decoder") == decoder}


def untimed(rows):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def test_points_are_all_half_and_quarter_of_the_layers_and_the_ranks_at_half():
    assert [(p.layers, p.rank) for p in choose_points(30, 8, (8, 16, 32))] == [
        ("all", 8),
        ("top:15", 8),
        ("top:8", 8),
        ("top:15", 16),
        ("top:15", 32),
    ]
    assert [p.layers for p in choose_points(8, 4, ())] == ["all", "top:4", "top:2"]
    assert [p.layers for p in choose_points(1, 4, ())] == ["all"]
    settings = DepthPoint(15, 30, 32).settings(TrainingConfig(rank=8, alpha=16.0), 0.01)
    assert (settings.layers, settings.rank, settings.alpha, settings.learning_rate) == ("top:15", 32, 64.0, 0.01)


@pytest.mark.parametrize(
    ("best", "most", "chosen", "tried"),
    [
        (8.0, 9, 8.0, [1.0, 2.0, 4.0, 8.0, 16.0]),
        (0.25, 9, 0.25, [1.0, 2.0, 0.5, 0.25, 0.125]),
        (1.0, 9, 1.0, [1.0, 2.0, 0.5]),
        (8.0, 3, 4.0, [1.0, 2.0, 4.0]),
        (8.0, 1, 1.0, [1.0]),
    ],
)
def test_a_rate_is_doubled_or_halved_while_the_score_rises(best, most, chosen, tried):
    asked = []

    def score(rate):
        asked.append(rate)
        return -max(rate / best, best / rate)

    assert climb(score, 1.0, most) == chosen
    assert asked == tried


def test_ties_within_one_standard_error_go_to_the_smaller_rate():
    best, near, far = Estimate(0.0, 0.0), Estimate(-0.01, 0.02), Estimate(-0.03, 0.02)
    assert smallest_within_error({0.5: far, 1.0: near, 2.0: near, 4.0: best, 8.0: near}) == 1.0
    assert smallest_within_error({0.5: far, 1.0: best, 2.0: near}) == 1.0
    assert smallest_within_error({1.0: Estimate(-0.01, math.nan), 2.0: Estimate(0.0, math.nan)}) == 2.0


def test_every_window_gives_as_many_targets_after_as_much_context():
    windows = [Passage(tuple(range(60)), (True,) * 60, document) for document in range(9)]
    taken = spread(windows, 64, 48)  # 32 in each of two
    assert [(len(one), one.num_scored, one.is_scored.index(True), one.document) for one in taken] == [
        (48, 32, 16, 0),
        (48, 32, 16, 1),
    ]
    assert [one.num_scored for one in spread(windows, 9 * 40, 48)] == [40] * 9
    longer = spread(windows, 9 * 50, 48)  # more targets than the window has: it grows
    assert [(len(one), one.num_scored) for one in longer] == [(51, 50)] * 9
    assert [one.num_scored for one in spread(windows, 9 * 90, 48)] == [59] * 9
    unknown = Passage(tuple(range(60)), (True,) * 16 + (False,) * 44)
    assert spread([unknown, windows[1]], 64, 48)[0].document == 1


def test_the_rate_is_chosen_by_private_accuracy_not_by_loss(lab, monkeypatch):
    trained, right = [], {0.05: 0.5, 0.1: 0.7, 0.2: 0.4}
    monkeypatch.setattr(Trainer, "train", lambda self, *given: (trained.append(given[2].learning_rate), None))
    monkeypatch.setattr(depth_points, "_open", lambda *_: None)
    monkeypatch.setattr(depth_points, "collect_votes", lambda _, passages, *rest: {"gumbel": passages})

    def values(passages):
        n = sum(passage.num_scored for passage in passages)
        share = (np.arange(n) % 10 < 10 * right[trained[-1]]).astype(float)
        return {"private": share, "public": share, "noiseless": share, "dissent": share}

    def score(engine, tokens, first):  # the loss falls with every rate
        return TargetScores(np.full((3, len(tokens) - first), trained[-1]), None)

    monkeypatch.setattr(depth_points, "values_at", values)
    monkeypatch.setattr(depth_points, "score_targets", score)
    rows = depth_points.search_rate(Trainer(lab), dataclasses.replace(SCALE, most_rates=9), DepthPoint(1, 2, 2), 0.05)
    assert trained == [0.05, 0.1, 0.2]
    assert min(rows, key=lambda row: row["loss"])["learning_rate"] == 0.2
    assert [row["learning_rate"] for row in rows if row["is_chosen"]] == [0.1]
    assert rows[2]["difference"] == pytest.approx(-0.3, abs=0.01)


def test_the_rate_is_chosen_without_the_test_text_on_records_the_trial_worlds_have_not_seen(lab, monkeypatch):
    seen, scored = [], []
    train, collect = Trainer.train, depth_points.collect_votes

    def note_training(self, blocks, membership, *rest):
        seen.append({tuple(blocks[i].tolist()) for i in range(len(blocks)) if membership[blocks.records[i]].any()})
        return train(self, blocks, membership, *rest)

    def note_votes(engine, passages, *rest):
        scored.extend(passage.tokens for passage in passages)
        return collect(engine, passages, *rest)

    monkeypatch.setattr(Lab, "test_passages", property(lambda _: pytest.fail("the test text was read")))
    monkeypatch.setattr(Trainer, "train", note_training)
    monkeypatch.setattr(depth_points, "collect_votes", note_votes)
    scale = dataclasses.replace(SCALE, most_rates=3)
    rows = depth_points.search_rate(Trainer(lab), scale, DepthPoint(1, 2, 2), 0.05)
    assert sum(row["is_chosen"] for row in rows) == 1
    assert max(row["difference"] for row in rows) == 0.0
    assert len(rows) == len(seen) == 3
    assert len(set(scored)) == rows[0]["records_held"] >= 3
    assert len(seen[0]) > 20
    assert not any(tokens == one[: len(tokens)] for tokens in scored for one in seen[0])


def test_all_layers_at_the_workspaces_settings_vote_as_its_own_worlds_do(lab, whole):
    tasks, start = {}, lab.start_task

    def start_counting(what, total):
        done = tasks.setdefault(what, [total, 0])
        return lambda count: done.__setitem__(1, done[1] + count)

    lab.start_task = start_counting
    arrays = depth_points.train_and_vote(Trainer(lab), SCALE, lab.workspace.training)
    lab.start_task = start
    assert list(tasks) == ["train worlds, layers all, rank 2", "votes, layers all"]
    assert all(total == done > 0 for total, done in tasks.values())
    point = TextVotes.from_arrays(arrays, "gumbel")
    lab.workspace = lab.train("full", lab.train("worlds", lab.workspace))
    passages, seed = spread(lab.test_passages, SCALE.positions, SCALE.window), lab.seed_for("coins", "gumbel")
    votes = collect_votes(lab.engine("worlds", "full"), passages, (GUMBEL,), [seed], True)["gumbel"]
    assert (point.votes == votes.votes[:, : SCALE.worlds]).all()
    assert (point.full == votes.full).all()
    assert (point.votes != point.full[:, None]).any(axis=0).all()
    found = points_of(whole)
    assert list(found) == [("all", 2), ("top:1", 2), ("top:1", 4)]
    own = found["all", 2]
    assert own["dissent"] == point.is_dissent.mean() > 0
    assert own["accuracy_full"] == (votes.full == votes.truth).mean()
    assert own["accuracy_noiseless"] == pytest.approx((point.votes == votes.truth[:, None]).mean())
    for row in found.values():
        assert row["gain"] == pytest.approx(row["accuracy_full"] - row["accuracy_public"])
        assert row["private_gain"] == pytest.approx(row["accuracy_private"] - row["accuracy_public"])
        assert row["gain_difference"] == pytest.approx(row["gain"] - own["gain"])
        assert row["dissent_difference"] == pytest.approx(row["dissent"] - own["dissent"])
        assert row["public_differs"] == 0.0
        assert row["tells_more_than"] is None
        assert row["worlds"] == 4
        assert row["records"] == row["records_in_workspace"] == len(lab.workspace.membership)
        assert row["alpha"] / row["rank"] == lab.workspace.training.alpha / lab.workspace.training.rank
    assert found["top:1", 2]["parameters_per_world"] * 2 == own["parameters_per_world"]
    assert found["top:1", 4]["parameters_per_world"] == own["parameters_per_world"]
    assert found["top:1", 2]["cache_bytes_per_token"] < own["cache_bytes_per_token"]


def test_a_stopped_run_resumes_or_reports_fewer_ranks_and_keeps_no_adapters(lab, whole, tmp_path, monkeypatch):
    from paclm.engine.training_job import TrainingJob

    with monkeypatch.context() as patch:
        interrupt(patch, TrainingJob, "plan", 5)  # two trainings a point: all that is missing is rank 4
        with pytest.raises(KeyboardInterrupt):
            rows_of(lab, depth.REGIME, SCALE)
    cut = open_lab(lab.workspace.path, tmp_path / "cut")
    with monkeypatch.context() as patch:
        calls = interrupt(patch, TrainingJob, "plan", 100)
        fewer = rows_of(cut, depth.REGIME, dataclasses.replace(SCALE, ranks=(2,)))
        assert untimed(fewer) == [row for row in untimed(whole) if row["rank"] == 2]
        assert not calls
        assert untimed(rows_of(lab, depth.REGIME, SCALE)) == untimed(whole)
    assert len(calls) == 2  # of six
    assert sorted(path.name for path in lab.workspace.adapters_path.iterdir()) == [
        "full.safetensors",
        "worlds.safetensors",
    ]


def test_the_table_and_the_summary_compare_every_point_with_all_layers_in_points(whole):
    given = {"regime": "depth", "preset": "quick", "seed": 0, "scale": dataclasses.asdict(SCALE), "seconds": 0.0}
    result = Result(**given, rows=whole)
    own, half, wide = points_of(whole).values()
    first, *others = depth.in_short(result)
    assert first.startswith(f"all, rank 2: private gain {100 * own['private_gain']:+.2f} ± ")
    assert others == [
        f"top:1, rank {row['rank']} against all: private gain {100 * row['private_gain_difference']:+.2f} ± "
        f"{100 * row['private_gain_difference_stderr']:.2f} points, {row['speed_ratio']:.2f} times the tokens/s, "
        f"{row['cache_ratio']:.2f} of the cache"
        for row in (half, wide)
    ]
    data = table_named("tab:depth").build({"depth": result})
    assert len({heading.strip() for heading in data.columns}) == len(data.columns)
    shown = dict(zip(data.columns, data.rows[1], strict=True))
    assert shown["private gain, points"].value == 100 * half["private_gain"]
    assert shown["private gain − all"].value == 100 * half["private_gain_difference"]
    assert shown["dissent − all"].value == 100 * half["dissent_difference"]
    assert shown["dissent"].value == half["dissent"]
    assert dict(zip(data.columns, data.rows[0], strict=True))["private gain − all"].value is None


def test_a_note_says_how_many_records_worlds_and_sequences_the_figures_hold_for(lab):
    first = {"records": 40, "records_in_workspace": 65, "timed_worlds": 3, "streams": 2}
    notes = depth._notes(lab, SCALE, [], first)
    assert notes[0].startswith("Points were trained on 40 of the workspace's 65 records:")
    assert notes[-1].startswith("Speed and cache are those of 3 worlds and 2 sequences, ")


def test_a_trunk_kept_for_every_world_a_changed_public_model_and_a_leak_raise_alarms(lab):
    common = {"kind": "point", "rank": 2, "collection": 1, "tells_more_than": None, "public_differs": 0.01}
    all_layers = {**common, "layers": "all", "cache_ratio": 1.0}
    half = {**common, "layers": "top:1", "cache_ratio": 0.5}

    def alarms(**changed):
        rows = [all_layers, {**half, **changed}]
        given = {"regime": "depth", "preset": "quick", "seed": 0, "scale": {}, "notes": [], "seconds": 0.0}
        return [line.startswith("ALARM") for line in depth.verdicts(Result(**given, rows=rows, provenance={}))]

    assert alarms() == [False, False, False]
    assert alarms(cache_ratio=1.0) == [True, False, False]
    assert alarms(public_differs=0.2) == [False, True, False]
    assert alarms(tells_more_than="charge") == [False, False, True]
