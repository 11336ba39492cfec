"""Adapted layers and rank: the points, the choice of learning rates, and rows from a small workspace."""

import dataclasses

import pytest

from paclm.config import TrainingConfig
from paclm.study import depth_points
from paclm.study.depth_points import DepthPoint, DepthScale, Trainer, choose_points, climb
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regimes import depth
from study.rehearsal import build_trainable_workspace
from study.small_lab import interrupt, open_lab, rows_of

SCALE = DepthScale(
    worlds=4,
    records=1000,
    positions=80,
    draws=2,
    trial_worlds=2,
    most_rates=1,
    sessions=4,
    tokens=16,
    streams=2,
    timed_worlds=3,
    steps=1,
    ranks=(2, 4),
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
        ("top:15", 16),
        ("top:15", 32),
        ("top:8", 8),
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
def test_a_rate_is_doubled_or_halved_while_the_loss_falls(best, most, chosen, tried):
    asked = []

    def loss(rate):
        asked.append(rate)
        return max(rate / best, best / rate)

    assert climb(loss, 1.0, most) == chosen
    assert asked == tried


def test_the_rate_is_chosen_without_the_test_text_on_records_the_trial_worlds_have_not_seen(lab, monkeypatch):
    seen, scored = [], []
    train, score = Trainer.train, depth_points.score_targets

    def note_training(self, blocks, membership, *rest):
        seen.append({tuple(blocks[i].tolist()) for i in range(len(blocks)) if membership[blocks.records[i]].any()})
        return train(self, blocks, membership, *rest)

    def note_scoring(engine, tokens):
        scored.append(tuple(tokens))
        return score(engine, tokens)

    monkeypatch.setattr(Lab, "test_passages", property(lambda _: pytest.fail("the test text was read")))
    monkeypatch.setattr(Trainer, "train", note_training)
    monkeypatch.setattr(depth_points, "score_targets", note_scoring)
    scale = dataclasses.replace(SCALE, most_rates=3)
    rows = depth_points.search_rate(Trainer(lab), scale, DepthPoint(1, 2, 2), 0.05)
    best = min(rows, key=lambda row: row["loss"])
    assert [row for row in rows if row["is_chosen"]] == [best]
    assert len(rows) == len(seen) == 3
    assert len(set(scored)) == rows[0]["records_held"] >= 4
    assert len(seen[0]) > 20
    assert seen[0].isdisjoint(scored)


def test_all_layers_at_the_workspaces_settings_vote_as_its_own_worlds_do(lab, whole):
    arrays = depth_points.train_and_vote(Trainer(lab), SCALE, lab.workspace.training)
    point = TextVotes.from_arrays(arrays, "gumbel")
    lab.workspace = lab.train("full", lab.train("worlds", lab.workspace))
    votes = lab.text_votes(SCALE.positions, depth_points.DECODINGS)["gumbel"]
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
    assert found["top:1", 2]["parameters_per_world"] * 2 == own["parameters_per_world"]
    assert found["top:1", 4]["parameters_per_world"] == own["parameters_per_world"]
    assert found["top:1", 2]["cache_bytes_per_token"] < own["cache_bytes_per_token"]


def test_a_stopped_run_resumes_after_the_last_point_and_keeps_no_adapters(lab, whole, monkeypatch):
    with monkeypatch.context() as patch:
        from paclm.engine.training_job import TrainingJob

        interrupt(patch, TrainingJob, "plan", 4)  # two trainings a point
        with pytest.raises(KeyboardInterrupt):
            rows_of(lab, depth.REGIME, SCALE)
    with monkeypatch.context() as patch:
        calls = interrupt(patch, TrainingJob, "plan", 100)
        assert untimed(rows_of(lab, depth.REGIME, SCALE)) == untimed(whole)
    assert len(calls) == 3  # of six
    assert sorted(path.name for path in lab.workspace.adapters_path.iterdir()) == [
        "full.safetensors",
        "worlds.safetensors",
    ]


def test_a_trunk_kept_for_every_world_a_changed_public_model_and_a_leak_raise_alarms(lab):
    from paclm.study.results import Result

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
