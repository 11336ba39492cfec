import numpy as np
import pytest

from paclm.study.continuations import Continuations
from paclm.study.regimes.ablation import REGIME, VARIANTS, AblationScale, depth_of_dissent
from paclm.study.run import run_regime
from study.small_lab import rows_of

SCALE = AblationScale(trials=4, length=8, prompt=8)


def released(small_lab, budget, together=4):
    prompts = small_lab.prompts(SCALE.trials, SCALE.prompt, "ablation")
    return Continuations(small_lab, "ablation", 16, together).released(prompts, VARIANTS[1], budget, 3, SCALE.length)


def test_every_rule_is_measured_at_both_budgets(small_lab):
    result = run_regime(small_lab, REGIME, "quick", scale=SCALE)
    assert len(result.rows) == 2 * len(VARIANTS)
    coupled = result.one(variant="Gumbel, τ = 1.0", budget="2^-8")
    apart = result.one(variant="independent", budget="2^-8")
    assert apart["unanimity"] < coupled["unanimity"]
    assert apart["distinct_given_dissent"] > coupled["distinct_given_dissent"]
    assert len(REGIME.summary(result)) == 2 * len(VARIANTS)


def test_the_same_seed_gives_the_same_rows(small_lab):
    assert rows_of(small_lab, REGIME, SCALE) == rows_of(small_lab, REGIME, SCALE)


def test_trials_are_paired_across_budgets(small_lab):
    """With the same coins, world and noise words, budgets can part only where noise decides: after a dissent."""
    loose, tight = (released(small_lab, budget) for budget in SCALE.budgets)
    assert np.array_equal(loose["distinct"][:, 0], tight["distinct"][:, 0])
    for trial in range(4):
        parted = np.flatnonzero(loose["tokens"][trial] != tight["tokens"][trial])
        if parted.size:
            assert loose["distinct"][trial, parted[0]] > 1


def test_smaller_batches_give_the_same_trials(small_lab):
    whole, split = (released(small_lab, 2.0**-8, together) for together in (4, 3))
    assert np.array_equal(whole["tokens"], split["tokens"])


def test_depth_is_measured_where_worlds_differ():
    row = depth_of_dissent(np.array([[1, 1, 2, 4], [1, 1, 1, 3]]), np.random.default_rng(0))
    assert row["unanimity"] == 5 / 8
    assert row["distinct_given_dissent"] == 3.0
    assert row["p95_distinct"] == pytest.approx(3.9)
    assert row["p99_distinct"] == pytest.approx(3.98)
    assert depth_of_dissent(np.ones((2, 3), int), np.random.default_rng(0))["p95_distinct"] is None
