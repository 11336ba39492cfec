"""Our accountants against another library's where both apply, and against what they claim where it does not."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.study.baselines.accountants import (
    best_epsilon,
    composed_pure,
    epsilon_of,
    log_expm1,
    pure_rdp,
    rdp_for,
    sampled_pure,
    sampled_rdp,
)
from paclm.study.baselines.gnmax import independent_rdp


@pytest.mark.parametrize("order", [2, 3, 8, 32, 64])
@pytest.mark.parametrize(("rate", "noise"), [(0.001, 1.0), (0.03, 0.8), (0.3, 2.0), (1.0, 5.0)])
def test_amplification_is_that_of_dp_accounting_for_gaussian_noise(order, rate, noise):
    k = np.arange(2.0, order + 1)
    ours = epsilon_of(1000 * sampled_rdp(order, rate, log_expm1((k - 1) * k / (2 * noise**2))), order, 1e-5)
    accountant = rdp.RdpAccountant(orders=[order])
    event = dp_accounting.GaussianDpEvent(noise)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event, 1000)
    assert float(ours) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-8)
    if rate == 1.0:  # GNMax: two counts that move by one
        gnmax = independent_rdp(noise * math.sqrt(2.0), np.array([float(order)]))
        assert best_epsilon(1000 * gnmax, [order], 1e-5) == pytest.approx(float(ours), rel=1e-9)


@pytest.mark.parametrize("flip", [0.02, 0.3, 0.9])
def test_pure_loss_is_that_of_randomised_response_in_dp_accounting(flip):
    epsilon = math.log((1 - flip / 2) / (flip / 2))
    orders = [1.5, 2.0, 8.0, 32.0]
    for order in orders:
        accountant = rdp.RdpAccountant([order], dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp_accounting.RandomizedResponseDpEvent(flip, 2), 10)
        ours = epsilon_of(10 * pure_rdp(epsilon, np.array([order])), order, 1e-5)
        assert float(ours[0]) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-8)


@given(epsilon=st.floats(0.05, 20.0), order=st.integers(2, 200), delta=st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_the_rigorous_reading_inverts_the_conversion(epsilon, order, delta):
    budget = rdp_for(epsilon, delta, order)
    if budget >= 0.0:
        assert float(epsilon_of(budget, order, delta)) == pytest.approx(epsilon, rel=1e-9)


@given(epsilon=st.floats(1e-6, 3.0), rate=st.floats(1e-4, 1.0))
def test_sampling_helps_and_composition_never_beats_the_sum(epsilon, rate):
    assert sampled_pure(epsilon, rate) <= epsilon * (1 + 1e-12)
    assert sampled_pure(epsilon, rate) >= rate * epsilon * (1 - 1e-12)  # ln is concave
    assert composed_pure(epsilon, 50, 1e-5) <= 50 * epsilon


def test_pure_loss_is_continuous_where_its_formula_changes_and_below_both_simple_bounds():
    orders = np.array([1.5, 2.0, 10.0, 64.0])
    for epsilon in (9.99e-4, 1.001e-3, 0.1, 3.0):
        loss = pure_rdp(epsilon, orders)
        assert (loss <= epsilon).all()
        assert (loss <= orders * epsilon**2 / 2).all()
    assert pure_rdp(9.9999e-4, orders) == pytest.approx(pure_rdp(1.00001e-3, orders), rel=2e-3)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: rdp_for(1.0, 0.0, 8), r"not 0\.0"),
        (lambda: rdp_for(1.0, 1e-5, 8, "kind"), "'kind'"),
        (lambda: sampled_rdp(2, 0.0, np.zeros(1)), r"not 0\.0"),
        (lambda: sampled_rdp(4, 0.5, np.zeros(1)), r"\(1,\)"),
        (lambda: sampled_rdp(1, 0.5, np.zeros(0)), "not 1"),
    ],
)
def test_values_outside_their_rules_are_refused_with_the_value(call, value):
    with pytest.raises(InvalidInput, match=value):
        call()
