"""The attacker who sees tokens only: exact where exactness can be computed, below the history, above nothing."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from paclm.curator.research import ResearchSession
from paclm.errors import InvalidInput
from paclm.privacy.calibration import calibrate_noise, pair_variance
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, mean_and_stderr
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import rule_named
from paclm.study.attacks.token_only import calibrate_many, leak_samples_by_tokens, token_belief

HALF = 1 / math.sqrt(2)


def play(per_token, tokens, sessions, distinct, worlds=16, seed=0):
    """Sessions on balanced votes: final beliefs, secrets, votes and tokens."""
    rng = np.random.default_rng(seed)
    split = np.arange(worlds) % distinct
    beliefs, secrets, seen = [], [], []
    for number in range(sessions):
        votes = np.array([rng.permutation(split) for _ in range(tokens)])
        session = ResearchSession(worlds, rule_named("gaussian"), per_token, ResearchNoise(number))
        seen.append((votes, np.array([session.release(row).token for row in votes])))
        beliefs.append(session.belief)
        secrets.append(session.secret)
    return np.array(beliefs), np.array(secrets), seen


def filtered(seen, per_token, particles, seed=1):
    rng = np.random.default_rng(seed)
    return np.stack([token_belief(votes, tokens, per_token, rng, particles) for votes, tokens in seen])


def test_one_token_on_two_votes_is_bayes_in_closed_form():
    votes, per_token = np.array([[3, 3, 3, 5]]), 0.3
    chance = ndtr(HALF / math.sqrt(pair_variance(0.75, 0.25, per_token)))  # that a vote is released as it is
    exact = np.array([chance, chance, chance, 1 - chance])
    found = token_belief(votes, np.array([3]), per_token, np.random.default_rng(0), 20_000)
    # E[belief | token] over 20,000 drawn R; the belief has a spread under 0.2, so five errors are under 0.008.
    assert np.exp(found) == pytest.approx(exact / exact.sum(), abs=0.008)


def test_two_tokens_agree_with_integration_over_the_hidden_r():
    """The second step's noise depends on the first R: the exact posterior is an integral over it, done on a grid."""
    votes, tokens, per_token = np.array([[0, 0, 1, 1], [0, 1, 1, 1]]), np.array([0, 1]), 0.25
    sigma = math.sqrt(pair_variance(0.5, 0.5, per_token))
    grid = np.linspace(0.0, HALF + 9 * sigma, 20_001)  # R ≥ 0 released token 0
    density = np.stack([np.exp(-0.5 * ((grid - side) / sigma) ** 2) for side in (HALF, HALF, -HALF, -HALF)])  # (4, g)
    belief = density / density.sum(axis=0)
    second = np.sqrt(pair_variance(belief[0], 1.0 - belief[0], per_token))  # (g,)
    released = np.stack([ndtr(np.where(v == 1, HALF, -HALF) / second) for v in votes[1]])  # P(token 1 | world, R)
    exact = (density * released).sum(axis=1)
    found = token_belief(votes, tokens, per_token, np.random.default_rng(0), 40_000)
    assert np.exp(found) == pytest.approx(exact / exact.sum(), abs=0.006)
    # The twin: taking the belief as uniform at the second step, as a careless attacker would, misses by more.
    uniform = math.sqrt(pair_variance(0.25, 0.75, per_token))
    careless = density.sum(axis=1) * np.array([ndtr((HALF if v == 1 else -HALF) / uniform) for v in votes[1]])
    assert np.abs(careless / careless.sum() - exact / exact.sum()).max() > 0.006


def test_at_small_budgets_two_votes_let_tokens_tell_two_over_pi_of_the_history():
    beliefs, _, seen = play(2.0**-10, 24, 200, 2)
    leaked = mean_and_stderr(leak_samples_by_tokens(beliefs, filtered(seen, 2.0**-10, 48)))
    history = leak_by_entropy(beliefs)
    error = math.hypot(leaked.stderr, 2 / math.pi * history.stderr)
    assert abs(leaked.mean - 2 / math.pi * history.mean) < 4 * error  # false alarm under 1e-4
    assert abs(leaked.mean - history.mean) > 4 * error  # and the two leaks differ


def test_with_more_votes_the_bound_lies_between_nothing_and_the_history():
    beliefs, secrets, seen = play(2.0**-4, 20, 60, 4)
    q = filtered(seen, 2.0**-4, 48)
    leaked, history = mean_and_stderr(leak_samples_by_tokens(beliefs, q)), leak_by_entropy(beliefs)
    assert 4 * leaked.stderr < leaked.mean < history.mean
    by_truth = leak_by_truth(q, secrets)
    assert abs(by_truth.mean - leaked.mean) < 4 * by_truth.stderr  # two estimates of the same expectation


def test_an_attacker_with_the_wrong_votes_shows_no_leak():
    beliefs, _, seen = play(2.0**-4, 20, 40, 2)
    wrong = [(np.roll(votes, 1, axis=1), tokens) for votes, tokens in seen]
    assert leak_samples_by_tokens(beliefs, filtered(wrong, 2.0**-4, 32)).mean() < 0.0


def test_unanimous_votes_teach_nothing_and_a_world_ruled_out_by_the_history_does_not_count():
    votes = np.full((5, 4), 9)
    assert token_belief(votes, votes[:, 0], 0.1, np.random.default_rng(0)) == pytest.approx(math.log(1 / 4))
    belief = np.array([[math.log(0.5), math.log(0.5), -np.inf, -np.inf]])
    assert leak_samples_by_tokens(belief, belief) == pytest.approx(math.log(2))


def test_calibration_of_many_masses_is_that_of_each():
    masses = np.random.default_rng(2).dirichlet(np.ones(5), size=7)
    axes, variances = calibrate_many(masses, 0.01)
    for mass, own, variance in zip(masses, axes, variances, strict=True):
        one = calibrate_noise(mass, 0.01)
        assert (own * variance) @ own.T == pytest.approx((one.axes * one.variances) @ one.axes.T)
        assert variance == pytest.approx(one.variances, rel=1e-13)  # nearer than the margin that both have


@pytest.mark.parametrize(
    ("tokens", "per_token", "value"), [(np.zeros(3, int), 0.1, r"\(3,\)"), (np.zeros(2, int), math.inf, "inf")]
)
def test_what_cannot_be_filtered_is_refused(tokens, per_token, value):
    with pytest.raises(InvalidInput, match=value):
        token_belief(np.zeros((2, 4), int), tokens, per_token, np.random.default_rng(0))
