"""λ and β never lie on the unsafe side, grow with the budget, and T queries compose to at most ε."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.study.baselines.accountants import composed_pure, epsilon_of, mix, renyi_divergence, symmetric_divergence
from paclm.study.baselines.pmixed import (
    PMixedSettings,
    mixing_weight,
    query_loss,
    radius_for,
    release_distribution,
    strict_query_epsilon,
    strict_weight,
)

ensembles = st.tuples(st.integers(0, 10**6), st.sampled_from([0.05, 0.5, 2.0, 4.0]))
orders = st.sampled_from([2, 3, 8, 32, 64])


def ensemble(seed, spread, shards=4, vocabulary=40):
    rng = np.random.default_rng(seed)
    public = rng.normal(0.0, 2.0, vocabulary)
    logs = public + rng.normal(0.0, spread, (shards, vocabulary))
    return logs - np.log(np.exp(logs).sum(-1, keepdims=True)), public - np.log(np.exp(public).sum())


@given(made=ensembles, order=orders, radius=st.floats(1e-9, 2.0), factor=st.floats(1.0, 10.0))
def test_the_weight_stays_inside_the_ball_and_is_the_largest_that_does(made, order, radius, factor):
    shards, public = ensemble(*made)
    weights = mixing_weight(shards, public, order, radius)
    distance = symmetric_divergence(mix(shards, public, weights), public, order)
    assert (distance <= order * radius * (1 + 1e-10) + 1e-15).all()
    more = np.minimum(1.0, weights * (1 + 1e-6) + 1e-12)
    beyond = symmetric_divergence(mix(shards, public, more), public, order)
    assert ((weights == 1.0) | (beyond > order * radius * (1 - 1e-7) - 1e-13)).all()
    assert (weights <= mixing_weight(shards, public, order, radius * factor) + 1e-12).all()  # grows with the radius


@given(
    budget=st.floats(1e-12, 5.0),
    members=st.integers(1, 64),
    rate=st.sampled_from([1e-4, 0.01, 0.3, 1.0]),
    order=orders,
    factor=st.floats(1.0, 10.0),
)
def test_the_radius_spends_at_most_the_budget_nearly_all_of_it_and_grows_with_it(budget, members, rate, order, factor):
    radius = radius_for(budget, members, rate, order)
    assert query_loss(radius, members, rate, order) <= budget
    if radius < np.exp(9.9):
        assert query_loss(radius * (1 + 1e-9), members, rate, order) >= budget * (1 - 1e-6)
    assert radius_for(budget * factor, members, rate, order) >= radius


@given(
    order=orders,
    rate=st.sampled_from([1e-3, 0.05, 0.5, 1.0]),
    queries=st.integers(1, 10**6),
    epsilon=st.floats(0.3, 8.0),
    num_shards=st.integers(2, 40),
)
def test_all_queries_together_stay_within_epsilon(order, rate, queries, epsilon, num_shards):
    settings = PMixedSettings(num_shards=num_shards, order=order, rate=rate, queries=queries, epsilon=epsilon)
    sizes = [n for n in range(1, num_shards + 1) if settings.radii[n] > 0.0]
    for members in sizes:
        spent = queries * query_loss(settings.radii[members], members, rate, order)
        assert float(epsilon_of(spent, order, settings.delta)) <= epsilon * (1 + 1e-12)
    assert bool(sizes) == (settings.rdp > 0.0)


@given(
    rate=st.sampled_from([1e-3, 0.05, 1.0]), queries=st.integers(1, 10**6), epsilon=st.floats(0.1, 8.0), made=ensembles
)
def test_strict_queries_compose_within_epsilon_and_bound_every_ratio(rate, queries, epsilon, made):
    settings = PMixedSettings(num_shards=4, order=2, rate=rate, queries=queries, epsilon=epsilon, ball="strict")
    bound = settings.radii[-1]
    assert composed_pure(strict_query_epsilon(bound, rate, 4), queries, settings.delta) <= epsilon
    shards, public = ensemble(*made)
    mixed = mix(shards, public, settings.weights(shards, public, 4))
    assert np.abs(mixed - public).max() <= bound * (1 + 1e-9) + 1e-14
    wider = mix(shards, public, np.minimum(1.0, settings.weights(shards, public, 4) * 1.001))
    is_free = settings.weights(shards, public, 4) >= 1.0
    assert (is_free | (np.abs(wider - public).max(-1) > bound)).all()


def test_two_averages_that_differ_in_one_member_keep_the_strict_ratio():
    """What the strict accountant rests on, on random ensembles and on the extreme one that attains it."""
    bound = 0.3
    most = np.log((1 + np.exp(2 * bound)) / 2)
    for seed in range(50):
        shards, public = ensemble(seed, 3.0, shards=3)
        mixed = mix(shards, public, strict_weight(shards, public, bound))
        whole = np.log(np.exp(mixed).mean(0))
        without = np.log(np.exp(mixed[:2]).mean(0))
        assert symmetric_divergence(whole, without, np.inf) <= most
    up, down = np.exp(bound), np.exp(-bound)
    assert np.log((up + down) / 2 / down) == pytest.approx(most)


def test_the_release_is_the_mean_of_the_sampled_mixtures():
    shards, public = ensemble(3, 1.0)
    settings = PMixedSettings(num_shards=4, order=4, rate=0.5, queries=10, epsilon=4.0)
    chosen = np.array([True, False, True, True])
    released, weights = release_distribution(shards, public, chosen, settings)
    assert 0.0 < weights.min() < 1.0
    clipped = settings.order * settings.radii[3]  # the twin: without clipping, models lie outside the ball
    assert (renyi_divergence(shards, public, settings.order) > clipped).any()
    by_hand = weights[:, None] * np.exp(shards[chosen]) + (1 - weights[:, None]) * np.exp(public)
    assert np.exp(released) == pytest.approx(by_hand.mean(0))
    assert np.exp(released).sum() == pytest.approx(1.0)
    released, weights = release_distribution(shards, public, np.zeros(4, dtype=bool), settings)
    assert released is public  # an empty sample
    assert weights.size == 0


@pytest.mark.parametrize(
    "wrong", [{"reading": "generous", "ball": "strict"}, {"ball": "round"}, {"num_shards": 1}, {"queries": 0}]
)
def test_settings_that_make_no_sense_and_a_public_model_without_full_support_are_refused(wrong):
    with pytest.raises(InvalidInput):
        PMixedSettings(**{"num_shards": 8, "order": 2, "queries": 10, "epsilon": 1.0} | wrong)
    with pytest.raises(InvalidInput):
        mixing_weight(np.log([0.5, 0.5]), np.array([0.0, -np.inf]), 2, 0.1)
