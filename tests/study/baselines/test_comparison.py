"""The whole regime on a small workspace: its rows, and what must not depend on chance."""

import math
from dataclasses import replace

import pytest

from paclm.study.regimes.pmixed import READINGS, REGIME, PMixedScale
from paclm.study.run import run_regime
from study.small_lab import open_lab

SEARCH = {"orders": (2, 16, 64), "rates": (0.5, 0.2, 0.02)}
SCALE = PMixedScale(40, (4, 6), False, 48, 20, horizons=(100, 10**4), draws=4, gumbel_draws=2, passes=2, **SEARCH)


@pytest.fixture(scope="module")
def result(template, tmp_path_factory):
    lab = open_lab(template, tmp_path_factory.mktemp("regime") / "clinic")
    return run_regime(lab, REGIME, "quick", scale=SCALE)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(template, tmp_path, result):
    small = replace(SCALE, shard_counts=(4,), horizons=(100,), epsilons=(1.0,))
    wanted = {"kind": "matched", "num_shards": 4, "queries": 100, "epsilon": 1.0, "reading": "generous"}
    names = ("accuracy", "stderr", "order", "rate", "empty", "mean_weight", "perplexity")
    first = result.one(**wanted)
    for seed in (0, 1):
        lab = open_lab(template, tmp_path / f"clinic-{seed}", seed=seed)
        again = run_regime(lab, REGIME, "quick", scale=small).one(**wanted)
        assert ([first[name] for name in names] == [again[name] for name in names]) is (seed == 0)


def test_every_point_has_one_selected_configuration_per_reading(result):
    for epsilon in SCALE.epsilons:
        for queries in SCALE.horizons:
            for reading in READINGS:
                rows = result.select(kind="matched", epsilon=epsilon, queries=queries, reading=reading)
                assert {row["num_shards"] for row in rows} == {4, 6}
                assert sum(row["is_selected"] for row in rows) == 1
                chosen = next(row for row in rows if row["is_selected"])
                assert chosen["expected_gain"] == max(row["expected_gain"] for row in rows)


def test_pac_rows_have_the_matched_budget_and_all_releases(result):
    rows = result.select(kind="pac", epsilon=1.0, queries=10**4)
    assert {row["release"] for row in rows} == {"gaussian", "plurality", "mixture", "channel"}
    for row in rows:
        assert row["per_token_nats"] * 10**4 == pytest.approx(0.1109468, abs=1e-7)
        assert row["mia_bound"] == pytest.approx(0.7310613, abs=1e-7)


def test_both_sides_read_the_same_text(result):
    ensemble = result.select(kind="ensemble")[0]
    neighbours = result.select(kind="neighbour")
    assert ensemble["positions"] == 40
    assert {row["queries"] for row in neighbours} == {20}
    methods = " ".join(row["method"] for row in neighbours)
    for name in ("AdaPMixED", "SubMix", "GNMax", "PMixED, strict", "PAC, gaussian"):
        assert name in methods
    assert all(row["guarantee"] for row in neighbours)


def test_no_probability_sits_at_a_floor_and_the_interval_holds_the_gain(result):
    for row in result.select(kind="validation"):
        assert not row["is_at_floor"]
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
        assert 0.0 < row["mean_weight"] <= 1.0
        assert math.isfinite(row["perplexity"])
