"""λ from a table is never above the exact one, and hardly below it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.study.baselines.divergence_table import LOG_RATIOS, compress, tabulate
from paclm.study.baselines.pmixed import mixing_weight

ORDERS = (2, 16, 64)


def ensemble(seed, spread, vocabulary=200):
    rng = np.random.default_rng(seed)
    public = rng.normal(0.0, 2.5, (3, vocabulary))
    logs = public[:, None] + rng.normal(0.0, spread, (3, 2, vocabulary))
    return logs - np.log(np.exp(logs).sum(-1, keepdims=True)), public - np.log(np.exp(public).sum(-1, keepdims=True))


def tables_of(shards, public, orders=ORDERS):
    return tabulate(compress(torch.from_numpy(shards), torch.from_numpy(public)).weights, orders)


@hypothesis_settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 0.2, 1.0, 3.0, 8.0]),
    radius=st.floats(-9.0, 1.0).map(lambda x: 10.0**x),
)
def test_the_tabulated_weight_is_safe_and_close(seed, spread, radius):
    shards, public = ensemble(seed, spread)
    for table in tables_of(shards, public):
        exact = mixing_weight(shards, public[:, None], table.order, radius)
        found = table.weight(radius).numpy()
        assert (found <= exact * (1 + 1e-9)).all()
        if spread <= 1.0:  # beyond, models share nothing, the intervals are coarse, and λ is only safe
            assert (found >= 0.93 * exact)[exact > 2e-4].all()  # as below the first step of the grid


def test_on_models_that_are_like_real_ones_the_loss_is_a_few_tenths_of_a_per_cent():
    shards, public = ensemble(1, 0.4, vocabulary=4000)
    for table in tables_of(shards, public, (2, 8)):
        for radius in (1e-4, 1e-2):
            exact = mixing_weight(shards, public[:, None], table.order, radius)
            found = table.weight(radius).numpy()
            assert found.mean() > 0.995 * exact.mean()
            assert (1.02 * found > exact).any()  # the twin: a table two per cent too generous is caught


def test_compression_keeps_mass_and_mean_and_never_lowers_a_convex_function():
    shards, public = ensemble(4, 1.5)
    weights = compress(torch.from_numpy(shards), torch.from_numpy(public)).weights.numpy()
    ratios = np.exp(LOG_RATIOS)
    assert weights.sum(-1) == pytest.approx(1.0, abs=1e-10)
    assert (weights @ ratios) == pytest.approx(1.0, abs=1e-10)
    for power in (2.0, 5.0, -3.0):
        exact = (np.exp(public)[:, None] * np.exp(power * (shards - public[:, None]))).sum(-1)
        assert (weights @ ratios**power >= exact * (1 - 1e-12)).all()


def test_the_same_model_gets_all_the_weight_and_radius_zero_none_and_rows_can_be_picked():
    shards, public = ensemble(4, 1.5)
    (same,) = tables_of(public[:, None].repeat(2, axis=1), public, (2,))
    assert (same.weight(1e-9) == 1.0).all()
    (table,) = tables_of(shards, public, (2,))
    assert (table.weight(0.0) < 1e-9).all()
    assert np.array_equal(table.weight(0.01, np.array([2, 0])), table.weight(0.01)[[2, 0]])
    with pytest.raises(InvalidInput, match=r"e\^64"):  # a ratio beyond the table
        tables_of(np.log(np.full((1, 2, 2), 0.5)), np.log(np.array([[1e-40, 1.0 - 1e-40]])))


def test_gains_over_many_radii_are_those_of_the_weights_one_by_one(monkeypatch):
    shards, public = ensemble(6, 0.7)
    gains = np.random.default_rng(1).normal(size=(3, 2))
    radii = np.geomspace(1e-8, 40.0, 30)
    monkeypatch.setattr("paclm.study.baselines.divergence_table._ROWS_AT_ONCE", {"cpu": 4})
    for table in tables_of(shards, public):
        weights = [table.weight(float(radius)).numpy() for radius in radii]
        one_by_one = np.stack([(own * gains).mean(axis=1) for own in weights], axis=1)
        assert table.gains(radii, torch.from_numpy(gains)).numpy() == pytest.approx(one_by_one, rel=1e-12, abs=1e-15)
