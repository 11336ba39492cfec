"""The rate–distortion channel: reference values, exact information, optimality against a slow twin, exact belief."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.privacy import channel
from paclm.privacy.belief import tally, uniform_belief
from paclm.privacy.channel import optimal_channel
from paclm.privacy.randomness import ResearchNoise
from reference.information import table_information


def given_vote(built, vote):
    """P(·|vote) of what is drawn from, as floats."""
    row = built.row(vote)
    return np.array([weight / sum(row) for weight in row])


def table(mass, built):
    return np.array([given_vote(built, v) for v in range(len(mass))])


def agreement(mass, built):
    return float(np.asarray(mass) @ np.diag(table(mass, built)))


def blahut_arimoto(mass, gain, rounds=20_000):
    """The slow twin: alternate between channel and marginal at a fixed price of error until convergence."""
    mass = np.asarray(mass)
    reward = 1.0 + gain * np.eye(len(mass))
    marginal = np.full(len(mass), 1.0 / len(mass))
    for _ in range(rounds):
        rows = marginal * reward
        rows /= rows.sum(axis=1, keepdims=True)
        after = mass @ rows
        if np.abs(after - marginal).max() < 1e-15:
            break
        marginal = after
    return rows, marginal


@st.composite
def masses(draw, smallest=-300):
    size = draw(st.sampled_from([2, 3, 6, 40]))
    mass = 10.0 ** np.array(draw(st.lists(st.floats(smallest, 0), min_size=size, max_size=size)))
    mass[draw(st.integers(0, size - 1))] = 1.0
    return mass / mass.sum()


@pytest.mark.parametrize(
    ("mass", "values"),
    [
        ((0.5, 0.5), (0.6749, 0.5442, 0.5028)),
        ((0.9, 0.1), (0.9265, 0.9018, 0.9000)),
        ((0.6, 0.3, 0.1), (0.6711, 0.6055, 0.6000)),
    ],
)
def test_reference_values(mass, values):
    for exponent, value in zip((-4, -8, -16), values, strict=True):
        assert agreement(mass, optimal_channel(np.array(mass), 2.0**exponent)) == pytest.approx(value, abs=5.1e-5)


@given(mass=masses(smallest=-5), exponent=st.integers(-24, 2))
def test_information_is_the_smaller_of_budget_and_entropy(mass, exponent):
    per_token, entropy, built = 2.0**exponent, -float(mass @ np.log(mass)), optimal_channel(mass, 2.0**exponent)
    leaked = table_information(mass, table(mass, built))
    assert leaked <= min(per_token, entropy) * (1 + 1e-12)
    assert leaked >= min(per_token, entropy) * (1 - 3e-6)
    if -20 <= exponent <= 0:
        assert leaked <= built.information * (1 + 1e-9)
        assert built.information <= leaked * (1 + 1e-6) + 1e-15


@pytest.mark.parametrize("exponent", [-40, -36, -20, -4])
def test_the_realized_vote_itself_is_released_only_where_its_entropy_fits(exponent):
    """Masses around H(π) = b, where an entropy computed with cancellation would be too small."""
    per_token = 2.0**exponent
    low, high = 1e-17, 0.5
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        entropy = -middle * math.log(middle) - (1 - middle) * math.log1p(-middle)
        low, high = (middle, high) if entropy < per_token else (low, middle)
    for shift in np.linspace(-3e-4, 3e-4, 41):
        x = low * (1 + shift)
        built = optimal_channel(np.array([1 - x, x]), per_token)
        with mpmath.workdps(40):
            exact = float(-mpmath.mpf(x) * mpmath.log(x) - (1 - mpmath.mpf(x)) * mpmath.log(1 - mpmath.mpf(x)))
        if built.gain == math.inf:
            assert exact <= per_token
            assert exact <= built.information <= exact * (1 + 1e-9)


def exact_information(mass, rows):
    """I(V; Y) with sixty digits, for rows in any proportion."""
    with mpmath.workdps(60):
        prior = [mpmath.mpf(p) for p in mass]
        table = [[mpmath.mpf(x) / sum(map(mpmath.mpf, row)) for x in row] for row in rows]
        marginal = [sum(p * row[y] for p, row in zip(prior, table, strict=True)) for y in range(len(prior))]
        terms = (
            p * x * mpmath.log(x * sum(prior) / q)
            for p, row in zip(prior, table, strict=True)
            for x, q in zip(row, marginal, strict=True)
            if x
        )
        return sum(terms) / sum(prior)


SKEWED = [
    *((0.5, 0.5), (0.6, 0.4), (0.9, 0.1), (0.6, 0.3, 0.1), (0.4, 0.4, 0.2), (0.25,) * 4),
    *((1 - 1e-6, 1e-6), (1 - 1e-12, 1e-12), (0.5 + 1e-9, 0.5 - 1e-9), (0.334, 0.333 + 1e-12, 0.333 - 1e-12)),
    (*(2.0**-n for n in range(1, 20)), 2.0**-19),
]
TINY = [2.0**-20, 2.0**-40, 2.0**-50, 2.0**-55, 2.0**-60]


@pytest.mark.parametrize("mass", SKEWED)
def test_the_channel_that_is_drawn_from_leaks_the_budget_down_to_the_smallest_one(mass):
    """Never more, and at most 2e-6 of it less; a step of the ledger is 2^-60."""
    for per_token in TINY:
        built = optimal_channel(np.array(mass), per_token)
        leaked = exact_information(mass, [built.row(vote) for vote in range(len(mass))])
        if built.gain < math.inf:
            assert per_token * (1 - 2e-6) <= leaked <= per_token
        assert leaked <= built.information <= leaked * (1 + 1e-11)


def test_drawing_in_floats_would_leak_another_amount_than_stated():
    """Why rows are integers: at 2^-60 the rounding of float64 is seen. And the check above sees twice the budget."""
    mass, per_token = (0.6, 0.3, 0.1), 2.0**-60
    rows = [optimal_channel(np.array(mass), 2 * per_token).row(vote) for vote in range(3)]
    assert exact_information(mass, rows) > 1.99 * per_token
    balanced = optimal_channel(np.array([0.25] * 4), per_token)
    rounded = [np.float32(given_vote(balanced, vote)) for vote in range(4)]
    assert not per_token * (1 - 2e-6) <= exact_information([0.25] * 4, np.float64(rounded)) <= per_token


@pytest.mark.parametrize("mass", [(0.5, 0.5), (0.6, 0.3, 0.1), (1 - 1e-6, 1e-6)])
def test_the_belief_moves_by_the_likelihood_of_what_is_drawn_from(mass):
    for per_token in TINY:
        built = optimal_channel(np.array(mass), per_token)
        rows = [built.row(vote) for vote in range(len(mass))]
        for token in np.flatnonzero(built.weights):
            found = built.log_likelihood(int(token))
            with mpmath.workdps(60):
                exact = [mpmath.log(mpmath.mpf(row[token]) / sum(map(mpmath.mpf, row))) for row in rows]
                for vote in range(1, len(mass)):
                    assert found[vote] - found[0] == pytest.approx(float(exact[vote] - exact[0]), rel=1e-6, abs=1e-25)


@given(mass=masses(), exponent=st.sampled_from([-60, -40, -32, -8, 0, 4]))
def test_every_mass_gives_a_channel_within_the_budget(mass, exponent):
    built = optimal_channel(mass, 2.0**exponent)
    rows = table(mass, built)
    assert np.isfinite(rows).all()
    assert (rows >= 0).all()
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
    assert table_information(mass, rows) <= 2.0**exponent * (1 + 1e-9)


@pytest.mark.parametrize("mass", [(0.5, 0.5), (0.9, 0.1), (0.6, 0.3, 0.1), (0.4, 0.3, 0.2, 0.1)])
@pytest.mark.parametrize("exponent", [-8, -4, -2])
def test_channel_equals_the_alternating_twin_at_the_same_gain(mass, exponent):
    built = optimal_channel(np.array(mass), 2.0**exponent)
    rows, marginal = blahut_arimoto(mass, built.gain)
    np.testing.assert_allclose(built.weights, marginal, atol=1e-6)
    np.testing.assert_allclose(table(mass, built), rows, atol=1e-6)


def test_no_random_channel_of_the_same_information_agrees_more_often():
    rng, mass, per_token = np.random.default_rng(0), np.array([0.5, 0.3, 0.2]), 2.0**-4
    best = agreement(mass, optimal_channel(mass, per_token))
    nearest = 0.0
    for _ in range(150):
        noisy = np.tile(rng.dirichlet(mass * 20), (3, 1))
        low, high = 0.0, 1.0  # share of the identity to mix in, for the same leak
        for _ in range(40):
            middle = (low + high) / 2
            rows = (1 - middle) * noisy + middle * np.eye(3)
            low, high = (middle, high) if table_information(mass, rows) <= per_token else (low, middle)
        reached = float(mass @ np.diag((1 - low) * noisy + low * np.eye(3)))
        assert reached <= best + 1e-9
        nearest = max(nearest, reached)
    assert nearest > best - 0.05  # the search does come close, so the comparison means something


def test_budget_above_the_entropy_is_the_realized_vote_itself():
    mass = np.array([0.7, 0.3])
    built = optimal_channel(mass, 0.7)
    assert built.gain == math.inf
    np.testing.assert_array_equal(table(mass, built), np.eye(2))
    assert built.information == pytest.approx(-(mass * np.log(mass)).sum())


def test_tiny_budget_is_uniform_over_tied_tops_and_plurality_otherwise():
    tied = optimal_channel(np.array([0.4, 0.4, 0.2]), 2.0**-40)
    np.testing.assert_allclose(tied.weights, [0.5, 0.5, 0.0], atol=1e-5)
    plain = optimal_channel(np.array([0.6, 0.3, 0.1]), 2.0**-40)
    np.testing.assert_allclose(plain.weights, [1.0, 0.0, 0.0], atol=1e-9)


def test_belief_equals_brute_force_bayes():
    rng, noise, belief = np.random.default_rng(3), ResearchNoise(3), uniform_belief(32)
    twin = np.exp(belief)
    for _ in range(40):
        votes = rng.integers(0, 4, 32)
        candidates, choice, mass = tally(votes, belief)
        step = channel.release(votes, belief, 7, 2.0**-5, noise)
        rows = table(mass, optimal_channel(mass / mass.sum(), 2.0**-5))
        twin = twin * rows[choice, candidates.tolist().index(step.token)]
        twin /= twin.sum()
        belief = step.belief
        np.testing.assert_allclose(np.exp(belief), twin, atol=1e-9)


def test_votes_are_released_as_often_as_the_channel_says():
    votes = np.repeat([5, 6, 7], [20, 8, 4])
    belief, noise, n = uniform_belief(32), ResearchNoise(11), 20_000
    expected = given_vote(optimal_channel(np.array([20, 8, 4]) / 32, 2.0**-3), 1)
    counts = np.bincount([channel.release(votes, belief, 25, 2.0**-3, noise).token - 5 for _ in range(n)], minlength=3)
    # Four standard errors on each of three counts: false alarm under 2e-4; a channel for twice the budget is outside.
    errors = 4 * np.sqrt(expected * (1 - expected) / n) + 1e-12
    assert (np.abs(counts / n - expected) <= errors).all()
    wrong = given_vote(optimal_channel(np.array([20, 8, 4]) / 32, 2 * 2.0**-3), 1)
    assert (np.abs(counts / n - wrong) > errors).any()


def test_a_vote_without_weight_is_never_released_and_a_world_ruled_out_is_legal():
    belief = np.full(4, -np.inf)
    belief[:2] = math.log(0.5)
    noise = ResearchNoise(0)
    votes = np.array([1, 2, 3, 3])
    tokens = {channel.release(votes, belief, 0, 2.0**-8, noise).token for _ in range(500)}
    assert tokens == {1, 2}
