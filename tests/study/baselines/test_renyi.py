"""Divergences: both directions, their limits, and the same on tensors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.study.baselines import distributions
from paclm.study.baselines.accountants import mix, renyi_divergence, symmetric_divergence


def random_logs(rng, *shape, spread=2.0):
    logs = rng.normal(0.0, spread, shape)
    return logs - np.log(np.exp(logs).sum(-1, keepdims=True))


def test_orders_rise_from_kl_to_the_largest_log_ratio():
    rng = np.random.default_rng(1)
    p, q = random_logs(rng, 30), random_logs(rng, 30)
    values = [float(renyi_divergence(p, q, order)) for order in (1, 1.01, 2, 8, 64, 4096, math.inf)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(float((np.exp(p) * (p - q)).sum()))
    assert values[0] == pytest.approx(values[1], rel=0.05)
    assert values[-1] == pytest.approx(float((p - q).max()))
    assert values[-2] == pytest.approx(values[-1], rel=1e-2)


def test_a_token_that_only_the_first_has_makes_the_divergence_infinite_and_the_reverse_does_not():
    with np.errstate(divide="ignore"):
        p, q = np.log([0.5, 0.5, 0.0]), np.log([0.5, 0.0, 0.5])
    some = np.log([0.25, 0.5, 0.25])
    assert renyi_divergence(p, q, 2) == math.inf
    assert math.isfinite(renyi_divergence(p, some, 2))
    assert renyi_divergence(p, p, 2) == 0.0
    assert symmetric_divergence(p, some, 2) == math.inf
    with pytest.raises(InvalidInput, match=r"0\.5"):
        renyi_divergence(p, some, 0.5)


@given(seed=st.integers(0, 10**6), order=st.sampled_from([2, 3, 18, 64]), weight=st.floats(0.0, 1.0))
def test_tensors_and_arrays_agree(seed, order, weight):
    rng = np.random.default_rng(seed)
    p, q = random_logs(rng, 4, 25), random_logs(rng, 4, 25)
    one, other = torch.from_numpy(p), torch.from_numpy(q)
    symmetric = distributions.symmetric(one, other, order).numpy()
    assert symmetric == pytest.approx(symmetric_divergence(p, q, order), rel=1e-12)
    weights = torch.full((4,), weight, dtype=torch.float64)
    mixed = distributions.mixed(one, other, weights).numpy()
    assert mixed == pytest.approx(mix(p, q, weights.numpy()), rel=1e-12)
    assert np.exp(mixed).sum(-1) == pytest.approx(1.0)
    assert distributions.log_mean(one, 0).numpy() == pytest.approx(np.log(np.exp(p).mean(0)))
