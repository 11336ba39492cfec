"""The whole regime on a small workspace: its rows, and what must not depend on chance."""

import math
from dataclasses import replace

import numpy as np
import pytest

from paclm.study.baselines.distributions import text_distributions
from paclm.study.eval_text import Passage
from paclm.study.expectation import ExpectedReleases
from paclm.study.lab import Lab
from paclm.study.regimes import pmixed
from paclm.study.regimes.pmixed import READINGS, REGIME, PMixedScale
from paclm.study.run import run_regime
from study.small_lab import interrupt, open_lab

SEARCH = {"orders": (2, 16, 64), "rates": (0.5, 0.2, 0.02)}
INK = {"search_positions": 30, "temperatures": (0.8, 1.0)}
SCALE = PMixedScale(
    40, (4, 6), False, 48, 20, horizons=(100, 10**4), draws=4, gumbel_draws=2, passes=2, **SEARCH, **INK
)


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
    for name in (
        "InvisibleInk, any",
        "InvisibleInk, public",
        "AdaPMixED",
        "SubMix",
        "GNMax",
        "PMixED, strict",
        "PAC, gaussian",
    ):
        assert name in methods
    assert all(row["guarantee"] for row in neighbours)


def test_no_probability_sits_at_a_floor_and_the_interval_holds_the_gain(result):
    for row in result.select(kind="validation"):
        assert not row["is_at_floor"]
        assert row["gain_low"] <= row["gain"] <= row["gain_high"]
        assert 0.0 < row["mean_weight"] <= 1.0
        assert math.isfinite(row["perplexity"])


def test_accuracy_of_pmixed_is_computed_and_agrees_with_its_draws(result):
    for row in result.select(kind="matched"):
        assert abs(row["accuracy"] - row["accuracy_of_draws"]) <= 6 * row["stderr_of_draws"] + 1e-12  # seeded


def test_invisible_ink_without_public_text_is_fixed_beforehand_and_takes_all_shards(result):
    rows = result.select(kind="ink")
    assert len(rows) == 2 * len(SCALE.epsilons) * len(SCALE.horizons) * 2  # shard counts and neighbours
    for row in rows:
        assert (row["is_searched"], row["temperature"], row["expected_gain"]) == (False, 1.0, None)
        assert row["is_selected"] == (row["num_shards"] == 6)
        assert row["epsilon_public"] < row["epsilon_any"]
        assert row[f"epsilon_{row['adjacency']}"] == pytest.approx(row["epsilon"])


def test_with_public_text_one_searched_setting_is_selected_per_point(template, tmp_path):
    rng = np.random.default_rng(0)
    public = [Passage.of(rng.integers(0, 600, 40).tolist()) for _ in range(2)]
    own = open_lab(template, tmp_path / "clinic")
    lab = Lab(own.workspace, runtime=own.runtime, public_text=public, start_task=own.start_task)
    small = replace(SCALE, horizons=(100,), epsilons=(1.0,), orders=(2, 16))
    result = run_regime(lab, REGIME, "quick", scale=small)
    for adjacency in ("any", "public"):
        for is_searched in (False, True):
            rows = result.select(kind="ink", adjacency=adjacency, is_searched=is_searched)
            assert [row["num_shards"] for row in rows] == [4, 6]
            (chosen,) = (row for row in rows if row["is_selected"])
            assert not is_searched or chosen["expected_gain"] == max(row["expected_gain"] for row in rows)
            assert all(row["clip"] > 0.0 for row in rows)
    assert "public text" in " ".join(result.notes)


def test_an_ensemble_is_computed_once_whatever_others_there_are(template, tmp_path, monkeypatch):
    """Stopped in the second ensemble, resumed, and with another one added after the end; PAC is computed once, too."""
    computed, whole = [], pmixed._of_ensemble

    def stopping(lab, scale, passages, num_shards, entry):
        computed.append(num_shards)
        if len(computed) == 2:
            raise KeyboardInterrupt
        return whole(lab, scale, passages, num_shards, entry)

    monkeypatch.setattr(pmixed, "_of_ensemble", stopping)
    pac = interrupt(monkeypatch, ExpectedReleases, "__init__", at=-1)
    small = replace(SCALE, shard_counts=(4, 6), horizons=(100,), epsilons=(1.0,), orders=(2,))

    def run_again(**changes):
        return run_regime(open_lab(template, tmp_path / "clinic"), REGIME, "quick", scale=replace(small, **changes))

    with pytest.raises(KeyboardInterrupt):
        run_again()
    first, counted = run_again(shard_counts=(4,)), len(pac)
    both = run_again()
    assert run_again().rows == both.rows
    assert (computed, len(pac)) == ([4, 6, 6], counted)
    for kind in ("ensemble", "validation"):
        assert first.one(kind=kind) == both.one(kind=kind, num_shards=4)
    assert {row["num_shards"] for row in both.select(kind="neighbour") if "num_shards" in row} == {6}
    run_again(draws=5)
    assert computed == [4, 6, 6, 4, 6]  # the twin: another scale shares nothing


def test_the_search_reads_the_public_text_and_no_scored_record(template, tmp_path, monkeypatch):
    shown = []

    def noting(engine, passages):
        shown.append(list(passages))
        return text_distributions(engine, passages)

    monkeypatch.setattr(pmixed, "text_distributions", noting)
    rng = np.random.default_rng(0)
    public = [Passage.of(rng.integers(0, 600, 40).tolist()) for _ in range(2)]
    small = replace(SCALE, shard_counts=(4,), horizons=(100,), epsilons=(1.0,), orders=(2, 16))
    own = open_lab(template, tmp_path / "clinic")
    found = {}
    for name, text in (("public", public), ("scored", None)):
        lab = Lab(own.workspace, runtime=own.runtime, public_text=text, start_task=own.start_task)
        shown.clear()
        result = run_regime(lab, REGIME, "quick", scale=small)
        searched, *scored = shown
        records = {record[: len(p.tokens)] for p in searched for record in [w.tokens for w in lab.test_passages]}
        found[name] = any(p.tokens in records for p in searched)
        assert all(p.tokens in {w.tokens[: len(p)] for w in lab.test_passages} for some in scored for p in some)
        assert sum(p.num_scored for p in searched) == 30
        assert ("flatters" in " ".join(result.notes)) is (name == "scored")
    assert found == {"public": False, "scored": True}
