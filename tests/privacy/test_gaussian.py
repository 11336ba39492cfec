"""Algorithm 1: exact Bayes, the paper's canary probabilities, extreme beliefs, and refused inputs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

import paclm
from paclm.errors import InvalidInput, RandomnessMisuse, UnsoundState
from paclm.privacy import gaussian
from paclm.privacy.belief import check_belief, tally, uniform_belief
from paclm.privacy.calibration import calibrate_noise
from paclm.privacy.randomness import Coins, NoiseSource, ResearchNoise
from paclm.privacy.releases import RULES
from reference import ambient


class Recorded(NoiseSource):
    """Research noise that records its last draw, so that a twin can compute the same release."""

    def __init__(self, seed):
        self._inner = ResearchNoise(seed)
        self.last = None

    def words(self, size):
        return self._inner.words(size)

    def standard_normal(self, size):
        self.last = super().standard_normal(size)
        return self.last


class Untouchable(NoiseSource):
    """Noise that must not be drawn."""

    def words(self, size):
        raise AssertionError("noise was drawn")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("per_token", [2.0**-16, math.inf])
def test_unanimous_vote_draws_no_noise_and_leaves_the_belief_alone(name, per_token):
    belief = uniform_belief(128)
    released = RULES[name].release(np.full(128, 9), belief, 3, per_token, Untouchable())
    assert released.belief is belief
    assert released == (9, belief, False, 0.0, 0.0)


@pytest.mark.parametrize("num_candidates", [2, 3, 5, 9])
def test_belief_equals_brute_force_bayes_in_the_ambient_space(num_candidates):
    rng, noise = np.random.default_rng(num_candidates), Recorded(num_candidates)
    num_worlds, secret, per_token = 32, 5, 2.0**-5
    belief = uniform_belief(num_worlds)
    twin = np.exp(belief)
    for _ in range(12):
        votes = rng.integers(0, num_candidates, num_worlds)
        candidates, choice, mass = tally(votes, belief)
        step = gaussian.release(votes, belief, secret, per_token, noise)
        if step.is_dissent:
            axes, variances = calibrate_noise(mass, per_token)
            released = np.zeros(num_candidates)
            released[candidates] = axes @ (axes[choice[secret]] + np.sqrt(variances) * noise.last)
            released[candidates] += 1 / len(candidates)  # the constant direction, which carries no noise
            sigma = ambient.noise_covariance(ambient.vote_covariance(votes, twin, num_candidates), per_token)
            twin = ambient.posterior(votes, twin, released, sigma)
            assert step.token == candidates[np.argmax(released[candidates])]
        belief = step.belief
        np.testing.assert_allclose(np.exp(belief), twin, atol=1e-9)


def test_belief_check_catches_an_update_with_the_deviation_for_the_variance():
    """The same release with √Λ in the likelihood is far outside the tolerance of the comparison above."""
    votes, belief, noise = np.arange(32) % 3, uniform_belief(32), Recorded(1)
    step = gaussian.release(votes, belief, 5, 2.0**-5, noise)
    _, choice, mass = tally(votes, belief)
    axes, variances = calibrate_noise(mass, 2.0**-5)
    released = axes[choice[5]] + np.sqrt(variances) * noise.last
    wrong = belief - 0.5 * (((released - axes) ** 2) @ (1 / np.sqrt(variances)))[choice]
    wrong -= np.log(np.exp(wrong).sum())
    assert np.abs(np.exp(step.belief) - np.exp(wrong)).max() > 1e-4


def test_each_axis_gets_its_own_draw():
    """Three votes have two axes; one draw for both would reveal the realized vote."""
    noise = Recorded(2)
    gaussian.release(np.arange(32) % 3, uniform_belief(32), 5, 2.0**-5, noise)
    assert noise.last.shape == (2,)
    assert noise.last[0] != noise.last[1]


def test_a_dissenting_world_of_no_belief_still_is_dissent():
    votes, belief = np.array([1, 1, 1, 2]), np.array([0.0, -800.0, -800.0, -800.0])
    step = gaussian.release(votes, belief, 0, 2.0**-16, ResearchNoise(0))
    assert step.is_dissent
    assert step.noise_scale > 0


def test_a_realized_world_that_the_belief_ruled_out_is_refused():
    belief = np.array([math.log(0.5), math.log(0.5), -np.inf, -np.inf])
    for rule in (RULES["gaussian"], RULES["channel"]):
        with pytest.raises(UnsoundState):
            rule(np.array([1, 1, 2, 2]), belief, 3, 2.0**-4 if rule.name == "gaussian" else 5.0, ResearchNoise(0))


def test_votes_of_any_integer_type_are_distinguished():
    for dtype in (np.uint8, np.int16, np.uint64):
        big = np.array([0, 1] * 2, dtype=dtype) + np.array(2**53 if dtype == np.uint64 else 0, dtype=dtype)
        token, _ = paclm.release_token(big, uniform_belief(4), 1, math.inf, ResearchNoise(0))
        assert token == int(big[1])


def test_a_release_does_not_print_its_belief():
    step = gaussian.release(np.array([1, 2]), np.log([0.25, 0.75]), 0, 2.0**-4, ResearchNoise(0))
    assert "belief" not in repr(step)
    assert str(step.belief[0])[:6] not in repr(step)


@pytest.mark.parametrize(("exponent", "advantage", "factor"), [(-4, 0.2763, 1), (-8, 0.0704, 1), (-4, 0.2763, 4)])
def test_even_split_has_the_published_advantage_and_not_with_less_noise(exponent, advantage, factor):
    votes, belief, noise, n = np.arange(128) % 2, uniform_belief(128), ResearchNoise(exponent + 99), 40_000
    hits = sum(gaussian.release(votes, belief, 1, factor * 2.0**exponent, noise).token == 1 for _ in range(n))
    expected = ndtr(math.sqrt(2 * 2.0**exponent))
    assert 2 * expected - 1 == pytest.approx(advantage, abs=5e-5)
    # False alarm at four standard errors: under 1e-4. Noise for four times the budget is caught.
    assert (abs(hits / n - expected) < 4 * 0.5 / math.sqrt(n)) == (factor == 1)


@st.composite
def situations(draw):
    num_worlds = draw(st.sampled_from([2, 4, 32, 128]))
    num_candidates = draw(st.integers(1, num_worlds))
    votes = np.array(draw(st.lists(st.integers(0, num_candidates - 1), min_size=num_worlds, max_size=num_worlds)))
    if draw(st.booleans()):
        votes = np.arange(num_worlds)  # as many distinct votes as worlds
    kind = draw(st.sampled_from(["uniform", "skewed", "one left"]))
    secret = draw(st.integers(0, num_worlds - 1))
    if kind == "uniform":
        belief = uniform_belief(num_worlds)
    elif kind == "skewed":
        belief = -np.array(draw(st.lists(st.floats(0, 690), min_size=num_worlds, max_size=num_worlds)))
        belief -= belief.max()
        belief -= np.log(np.exp(belief).sum())
    else:
        belief = np.full(num_worlds, -np.inf)
        belief[secret] = 0.0
    return votes, belief, secret


@given(situation=situations(), exponent=st.sampled_from([-40, -32, -16, -4, 0, 4, math.inf]), seed=st.integers(0, 99))
def test_every_belief_and_budget_gives_a_voted_token_and_a_belief_that_sums_to_one(situation, exponent, seed):
    votes, belief, secret = situation
    token, after = paclm.release_token(votes, belief, secret, 2.0**exponent, ResearchNoise(seed))
    assert token in votes
    assert not np.isnan(after).any()
    assert np.exp(after).sum() == pytest.approx(1.0, abs=1e-12)
    if exponent == math.inf:
        assert token == votes[secret]


def test_belief_keeps_its_sum_over_many_releases():
    rng, noise, belief = np.random.default_rng(0), ResearchNoise(0), uniform_belief(128)
    for _ in range(3000):
        belief = gaussian.release(rng.integers(0, 3, 128), belief, 7, 2.0**-9, noise).belief
    assert abs(np.exp(belief).sum() - 1.0) < 1e-13


@pytest.mark.parametrize("num_worlds", [512, 514, 4_098, 38_368, 60_002])
def test_the_mass_behind_a_vote_of_many_worlds_is_exact_to_a_few_bits(num_worlds):
    """Equal numbers added one by one round the same way every time."""
    votes = np.zeros(num_worlds, dtype=np.int64)
    votes[-2:] = 1, 2
    belief = uniform_belief(num_worlds)
    exact = [math.fsum(np.exp(belief[votes == vote]).tolist()) for vote in (0, 1, 2)]
    np.testing.assert_allclose(tally(votes, belief).mass, exact, rtol=2.0**-43)
    one_by_one = np.bincount(votes, np.exp(belief))
    assert num_worlds < 10_000 or abs(one_by_one[0] / exact[0] - 1.0) > 2.0**-43


@pytest.mark.parametrize("num_worlds", [38_368, 65_536])
@pytest.mark.parametrize("exponent", [-60, -8, 1])
def test_a_belief_over_very_many_worlds_is_accepted_again_after_every_release(num_worlds, exponent):
    rng, noise, belief = np.random.default_rng(1), ResearchNoise(1), uniform_belief(num_worlds)
    for distinct in (2, 3, 40):
        votes = rng.integers(0, distinct, num_worlds)
        _, belief = paclm.release_token(votes, belief, 7, 2.0**exponent, noise)
    check_belief(belief, num_worlds)


def test_no_noise_rules_out_every_world_that_voted_otherwise():
    token, belief = paclm.release_token([4, 4, 5, 5], np.log([0.25] * 4), 3, math.inf, ResearchNoise(0))
    assert token == 5
    np.testing.assert_array_equal(belief, [-np.inf, -np.inf, math.log(0.5), math.log(0.5)])


def test_candidates_are_in_order_of_tokens_whatever_the_order_of_worlds():
    assert tally(np.array([9, 3, 9, 3]), uniform_belief(4)).candidates.tolist() == [3, 9]


GOOD = {"votes": [1, 1, 2, 2], "belief": np.log([0.25] * 4), "secret": 0, "per_token": 0.1, "noise": ResearchNoise(0)}


@pytest.mark.parametrize(
    ("change", "error", "value"),
    [
        ({"votes": [1, 2, 3]}, InvalidInput, "3"),
        ({"votes": [[1, 2]]}, InvalidInput, r"\(1, 2\)"),
        ({"votes": [0.5, 1.0]}, InvalidInput, "float64"),
        ({"belief": np.log([0.5, 0.5])}, InvalidInput, r"\(2,\)"),
        ({"belief": [0.25] * 4}, UnsoundState, "5.136"),
        ({"belief": np.log([0.25] * 4) + 1e-8}, UnsoundState, "1.00000001"),
        ({"belief": [math.nan] * 4}, UnsoundState, "NaN"),
        ({"secret": 4}, InvalidInput, "3"),
        ({"secret": -1}, InvalidInput, "3"),
        ({"secret": 1.0}, InvalidInput, "float"),
        ({"per_token": 0.0}, InvalidInput, "0.0"),
        ({"per_token": -1.0}, InvalidInput, "-1.0"),
        ({"per_token": math.nan}, InvalidInput, "nan"),
        ({"per_token": True}, InvalidInput, "True"),
        ({"per_token": 2.0**-61}, InvalidInput, r"2\^-60"),
        ({"noise": Coins(1)}, RandomnessMisuse, "Coins"),
        ({"noise": np.random.default_rng(0)}, RandomnessMisuse, "Generator"),
    ],
)
@pytest.mark.parametrize("name", ["release_token", *RULES])
def test_bad_input_is_refused_with_the_value(name, change, error, value):
    release = paclm.release_token if name == "release_token" else RULES[name]
    release(**GOOD)
    with pytest.raises(error, match=value):
        release(**{**GOOD, **change})


def test_an_error_about_the_secret_does_not_print_it():
    with pytest.raises(InvalidInput) as caught:
        paclm.release_token(**{**GOOD, "secret": 1234})
    assert "1234" not in str(caught.value)
