"""GNMax: noise that is enough, and a data-dependent bound that is never below the exact loss."""

import math

import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from paclm.errors import InvalidInput
from paclm.study.baselines.accountants import ORDERS, best_epsilon, renyi_divergence
from paclm.study.baselines.gnmax import (
    dependent_epsilon,
    dependent_rdp,
    independent_rdp,
    log_miss_bound,
    noise_for,
    release,
)


@pytest.mark.parametrize("queries", [1, 100, 10**4])
def test_the_noise_is_enough_and_hardly_more(queries):
    noise = noise_for(1.0, 1e-5, queries)
    assert best_epsilon(queries * independent_rdp(noise, ORDERS), ORDERS, 1e-5) <= 1.0
    assert best_epsilon(queries * independent_rdp(noise * 0.999, ORDERS), ORDERS, 1e-5) > 1.0


@pytest.mark.parametrize("gap", [2, 10, 20, 40, 80])
@pytest.mark.parametrize("noise", [5.0, 10.0])
def test_the_dependent_bound_covers_the_exact_loss_of_two_candidates(gap, noise):
    """With two candidates the release is a coin with probability Φ(gap / √2σ); a neighbour moves the gap by two."""

    def coin(difference):
        return np.array([log_ndtr(difference / (math.sqrt(2) * noise)), log_ndtr(-difference / (math.sqrt(2) * noise))])

    log_miss = float(log_miss_bound(np.array([100.0 + gap, 100.0]), noise))
    assert log_miss == pytest.approx(min(float(log_ndtr(-gap / (math.sqrt(2) * noise))), math.log(0.5)))
    orders = np.array([2.0, 4.0, 8.0])
    bound = dependent_rdp(log_miss, noise, orders)
    assert (bound <= independent_rdp(noise, orders)).all()
    for order, most in zip(orders, bound, strict=True):
        for other in (gap - 2, gap + 2):
            assert renyi_divergence(coin(gap), coin(other), order) <= most * (1 + 1e-9)  # the direction it is for


def test_near_unanimity_the_dependent_bound_is_far_smaller_and_without_it_the_same():
    orders = np.array([4.0])
    unanimous = float(log_miss_bound(np.array([100.0, 0.0, 0.0]), 5.0))
    split = float(log_miss_bound(np.array([34.0, 33.0, 33.0]), 5.0))
    assert dependent_rdp(unanimous, 5.0, orders)[0] < 1e-6 * independent_rdp(5.0, orders)[0]
    assert dependent_rdp(split, 5.0, orders)[0] == independent_rdp(5.0, orders)[0]
    counts = np.tile([100.0, 0.0, 0.0], (50, 1))
    assert dependent_epsilon(counts, 5.0, 1e-5) < best_epsilon(50 * independent_rdp(5.0, ORDERS), ORDERS, 1e-5)


def test_the_argmax_is_missed_as_often_as_the_noise_says_and_the_check_sees_half_the_noise():
    rng = np.random.default_rng(3)
    counts = np.tile([12.0, 4.0], (20000, 1))
    expected = float(ndtr(-8.0 / (math.sqrt(2) * 10.0)))
    error = 4 * math.sqrt(expected * (1 - expected) / 20000)  # seeded; for a fresh seed, false alarm < 1e-4
    assert abs((release(counts, 10.0, rng) == 1).mean() - expected) < error
    assert abs((release(counts, 5.0, rng) == 1).mean() - expected) > error
    with pytest.raises(InvalidInput, match=r"0\.0"):
        release(counts, 0.0, rng)
