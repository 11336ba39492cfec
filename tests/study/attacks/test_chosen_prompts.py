"""Shares, releases and leaks of chosen prompts against closed forms, dense algebra and the real release."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import entr, ndtr
from scipy.stats import norm

from paclm.privacy import gaussian
from paclm.privacy.calibration import pair_variance
from paclm.privacy.leak import leak_by_entropy, leak_by_truth
from paclm.privacy.randomness import NoiseSource
from paclm.study.attacks.chosen_prompts import PromptPool, chase, forced_pool, release_many

WORLDS = 16
MEMBER = np.arange(WORLDS) % 2 == 0
UNIFORM = np.full(WORLDS, 1 / WORLDS)


def exact_share(votes, belief, is_member):
    """tr(C^(-1/2) C_M) / tr(C^(1/2)), by an eigendecomposition in the ambient space."""
    seen = (votes[:, None] == np.unique(votes)).astype(float)
    mean = belief @ seen
    covariance = (seen.T * belief) @ seen - np.outer(mean, mean)
    inside = belief @ is_member
    moved = (belief * is_member) @ seen - inside * mean
    values, vectors = np.linalg.eigh(covariance)
    roots = np.sqrt(np.where(values > 1e-12, values, 0.0))
    along = (vectors.T @ moved) ** 2 / (inside * (1 - inside))
    return float((along[roots > 0] / roots[roots > 0]).sum() / roots.sum())


class Fixed(NoiseSource):
    """Normal variables that are given."""

    def __init__(self, value):
        self._value = value

    def words(self, size):
        raise NotImplementedError

    def standard_normal(self, size):
        return np.full(size, self._value)


@pytest.mark.parametrize("distinct", [2, 3, 5])
def test_shares_are_those_of_dense_algebra(distinct):
    """Exactly for two votes; to within a fifth for more, whichever belief."""
    rng = np.random.default_rng(distinct)
    votes = rng.integers(distinct, size=(40, WORLDS))
    pool, belief = PromptPool.of(votes), rng.dirichlet(np.ones(WORLDS))
    found = pool.shares(belief[None], MEMBER)[0]
    exact = np.array([exact_share(row, belief, MEMBER) for row in pool.votes])
    assert found == pytest.approx(exact, rel=1e-9 if distinct == 2 else 0.2)
    assert np.corrcoef(found, exact)[0, 1] > 0.99


def test_the_share_is_one_where_exactly_members_differ_and_none_where_votes_say_nothing():
    blind = np.arange(WORLDS) // 2 % 2  # as often among members as among others
    pool = PromptPool.of(np.stack([MEMBER + 7, blind, np.full(WORLDS, 3)]))
    assert pool.shares(UNIFORM[None], MEMBER)[0] == pytest.approx([1.0, 0.0], abs=1e-12)
    assert (len(pool), pool.unanimous) == (2, 1)
    assert (pool.best(MEMBER, 1).votes == MEMBER + 7).all()


@pytest.mark.parametrize(("distinct", "noise"), [(2, 0.7), (2, -1.3), (3, 0.0), (6, 0.0)])
def test_many_releases_give_the_beliefs_of_the_real_one(distinct, noise):
    """With three votes and more an axis may point the other way, so noise is compared by its covariance elsewhere."""
    rng = np.random.default_rng(1)
    choice = np.stack([rng.permutation(np.arange(WORLDS) % distinct) for _ in range(20)])
    beliefs, secrets = rng.dirichlet(np.ones(WORLDS), size=20), rng.integers(WORLDS, size=20)
    found = release_many(choice, distinct, beliefs, secrets, 0.02, Fixed(noise))
    for i in range(20):
        real = gaussian.release(choice[i], np.log(beliefs[i]), int(secrets[i]), 0.02, Fixed(noise))
        assert found[i] == pytest.approx(np.exp(real.belief), rel=1e-9)


def test_without_noise_the_worlds_that_voted_otherwise_are_ruled_out():
    choice = np.array([np.arange(WORLDS) % 4])
    after = release_many(choice, 4, UNIFORM[None], np.array([2]), math.inf, np.random.default_rng(0))
    assert after[0] == pytest.approx((np.arange(WORLDS) % 4 == 2) / 4)


def sessions(pool, per_token, tokens, *, repeats=200, seed=0, is_adaptive=True, is_member=MEMBER):
    secrets = np.tile(np.arange(WORLDS), repeats)
    rng = np.random.default_rng(seed)
    beliefs, dissent = chase(pool, is_member, secrets, per_token, tokens, rng, is_adaptive=is_adaptive)
    return beliefs, dissent, secrets


def even_pool(distinct):
    """Prompts on which no world is alone, so that none is ruled out."""
    rng = np.random.default_rng(3)
    return PromptPool.of(np.stack([rng.permutation(np.arange(WORLDS) % distinct) for _ in range(30)]))


def about(beliefs, is_member=MEMBER):
    inside = beliefs @ is_member
    return math.log(2) - entr(inside) - entr(1 - inside)


def test_one_forced_token_leaks_and_guesses_as_integration_says():
    per_token = 2.0**-4
    beliefs, _, secrets = sessions(forced_pool(MEMBER), per_token, (1,))
    scale = math.sqrt(pair_variance(0.5, 0.5, per_token))
    side = math.sqrt(0.5)

    def term(r):
        here, there = norm.pdf(r, side, scale), norm.pdf(r, -side, scale)
        return here * math.log(2 * here / (here + there))

    exact = quad(term, -10 * scale, 10 * scale)[0]
    leaks = about(beliefs[0])
    error = leaks.std() / math.sqrt(len(leaks))
    assert abs(leaks.mean() - exact) < 4 * error  # seeded; for a fresh seed, false alarm < 1e-4
    assert abs(leaks.mean() - 2 * exact) > 4 * error
    hits = ((beliefs[0] @ MEMBER > 0.5) == MEMBER[secrets]).mean()
    assert abs(hits - ndtr(math.sqrt(2 * per_token))) < 4 * 0.5 / math.sqrt(len(secrets))


@pytest.mark.parametrize("times", [1, 4])
def test_what_leaks_is_within_the_budget_and_with_noise_for_more_it_is_not(times):
    per_token, tokens = 2.0**-8, 16
    beliefs, _, _ = sessions(even_pool(3), times * per_token, (tokens,))
    with np.errstate(divide="ignore"):  # a session may rule a world out
        found = leak_by_entropy(np.log(beliefs[0]))
    assert (found.mean > tokens * per_token + 4 * found.stderr) == (times == 4)  # false alarm < 1e-4


def test_beliefs_are_exact_so_both_estimates_of_the_leak_agree():
    beliefs, _, secrets = sessions(even_pool(3), 2.0**-8, (8,))
    table = np.log(beliefs[0])
    entropy, truth = leak_by_entropy(table), leak_by_truth(table, secrets)
    assert abs(entropy.mean - truth.mean) < 4 * math.hypot(entropy.stderr, truth.stderr)  # false alarm < 1e-4
    wrong = leak_by_truth(table, np.roll(secrets, 1))
    assert abs(entropy.mean - wrong.mean) > 4 * math.hypot(entropy.stderr, wrong.stderr)


def test_chosen_prompts_learn_more_of_the_record_than_random_ones():
    rng = np.random.default_rng(7)
    votes = np.concatenate([rng.integers(2, size=(40, WORLDS)), np.zeros((40, WORLDS), dtype=int)])
    votes[0] = np.where(np.arange(WORLDS) < 2, ~MEMBER, MEMBER)  # all but two worlds vote by membership
    pool = PromptPool.of(votes)
    chosen, asked, _ = sessions(pool, 2.0**-6, (4, 16))
    random, met, _ = sessions(pool, 2.0**-6, (4, 16), is_adaptive=False)
    assert about(chosen[1]).mean() > 3 * about(random[1]).mean()
    assert (asked == [[4], [16]]).all()
    assert 6 < met[1].mean() < 10  # half of the prompts are unanimous


def test_the_choice_follows_the_belief():
    """Once the belief excludes worlds that blur a prompt, that prompt is the better one."""
    first = np.where(np.arange(WORLDS) < 4, 0, MEMBER)
    second = np.where(np.arange(WORLDS) >= 12, 1, MEMBER)
    pool = PromptPool.of(np.stack([first, second]))
    late = (np.arange(WORLDS) >= 4) / 12
    assert pool.shares(late[None], MEMBER)[0, 0] == pytest.approx(1.0)
    early = (np.arange(WORLDS) < 12) / 12
    assert pool.shares(early[None], MEMBER)[0, 1] == pytest.approx(1.0)


def test_a_pool_without_dissent_teaches_nothing():
    beliefs, dissent, _ = sessions(PromptPool.of(np.zeros((3, WORLDS), dtype=int)), 0.1, (2,))
    assert (beliefs == 1 / WORLDS).all()
    assert not dissent.any()
