"""Attacks with worlds as shadow models, on made-up gains whose truth is known.

Statistical tests are seeded; with fresh seeds each would fail a sound attack with the probability stated beside it.
"""

import math

import numpy as np
import pytest
from scipy import stats

from paclm.errors import InvalidInput
from paclm.privacy.bounds import success_bound
from paclm.study.attacks.record_scores import roc
from paclm.study.attacks.shadow import (
    Gains,
    attack_half,
    auc_in_each,
    chance_p,
    half_rates,
    lira,
    named_rate,
    p_at,
    ranks_of,
    world_scores,
)
from paclm.worlds.assignment import assign_worlds

N, M = 300, 16


def made_up(seed, leak, shift=0.3):
    """Worlds that gain `shift` more on their own records; a student that follows the secret world by a share `leak`.

    What worlds learn in common, how hard records are, and noise are added to both.
    """
    rng = np.random.default_rng(seed)
    membership = assign_worlds(N, M, seed=5)
    public = -3.0 + rng.normal(0.0, 1.0, N)
    common = 0.5 + rng.normal(0.0, 0.2, N)
    own = shift * rng.random((N, 1)) * membership + rng.normal(0.0, 0.05, (N, M))
    worlds = public[:, None] + common[:, None] + own
    secret = int(rng.integers(M))
    learnt = 0.4 * (common + own.mean(axis=1)) + leak * (own[:, secret] - own.mean(axis=1))
    student = public + 0.1 + learnt + rng.normal(0.0, 0.05, N)
    return Gains(student, worlds, public), membership, secret


def evidence_of(leak, attack, count, first=0):
    """Evidence (count, M), secrets (count,) of so many deployments."""
    found, secrets = [], []
    for seed in range(first, first + count):
        gains, membership, secret = made_up(seed, leak)
        found.append(attack_half(gains, membership)[attack].worlds)
        secrets.append(secret)
    return np.stack(found), np.array(secrets)


@pytest.mark.parametrize("attack", ["reference", "lira", "worlds"])
def test_a_student_that_follows_its_world_is_found(attack):
    evidence, secrets = evidence_of(0.5, attack, 6)
    assert chance_p(evidence, secrets, np.random.default_rng(0)) < 1e-4
    assert ranks_of(evidence, secrets).mean() < 3.0


def p_of_uniformity(evidence, secrets):
    """Of the p-values of deployments, each alone; spread over the steps of 1/M that they take."""
    rng = np.random.default_rng(1)
    each = [chance_p(row[None], secret[None], rng) for row, secret in zip(evidence, secrets, strict=True)]
    return stats.kstest(np.asarray(each) - rng.random(len(each)) / M, "uniform").pvalue


@pytest.mark.parametrize("attack", ["loss", "reference", "lira", "worlds"])
def test_a_student_that_says_nothing_is_a_guess(attack):
    """The p-values of 200 silent students are uniform; a sound attack fails this with one fresh seed in a thousand."""
    assert p_of_uniformity(*evidence_of(0.0, attack, 200)) > 1e-3


@pytest.mark.parametrize("attack", ["reference", "lira", "worlds"])
def test_the_same_check_sees_students_that_say_something(attack):
    assert p_of_uniformity(*evidence_of(0.2, attack, 200)) < 1e-3


def test_calibrated_attacks_find_more_than_the_plain_loss():
    rates = {"loss": [], "reference": [], "lira": [], "worlds": []}
    for seed in range(30):
        gains, membership, secret = made_up(seed, 0.3)
        for name, found in attack_half(gains, membership).items():
            rates[name].append(half_rates(found.records, membership[:, secret]).auc)
    mean = {name: float(np.mean(values)) for name, values in rates.items()}
    assert mean["loss"] < mean["reference"] < mean["lira"] < mean["worlds"]
    assert mean["loss"] < 0.55
    assert mean["worlds"] > 0.9


def test_the_likelihood_ratio_is_that_of_two_gaussians():
    """Many worlds, a student that is one of their kind: scores are the exact log ratio up to one factor."""
    rng = np.random.default_rng(3)
    membership = assign_worlds(40, 2000, seed=1)
    shift, spread = rng.uniform(0.2, 1.0, 40), 0.3
    common = rng.normal(0.0, 3.0, 40)
    worlds = common[:, None] + shift[:, None] * (membership - 0.5) + rng.normal(0.0, spread, (40, 2000))
    own = common + shift * rng.choice([-0.5, 0.5], 40) + rng.normal(0.0, spread, 40)
    exact = stats.norm.logpdf(own - common, shift / 2, spread) - stats.norm.logpdf(own - common, -shift / 2, spread)
    assert np.corrcoef(lira(own, worlds, membership), exact)[0, 1] > 0.97


def test_scores_do_not_depend_on_the_scale_or_shift_of_a_student():
    gains, membership, _ = made_up(0, 0.3)
    own, worlds = gains.own - gains.public, gains.worlds - gains.public[:, None]
    for attack in (lambda x: stats.rankdata(lira(x, worlds, membership)), lambda x: world_scores(x, worlds)):
        assert attack(0.1 * own - 2.0) == pytest.approx(attack(own))


def test_a_world_is_its_own_likeliest_and_a_flat_student_likes_none():
    gains, _, _ = made_up(0, 0.0)
    worlds = gains.worlds - gains.public[:, None]
    for world in range(M):
        assert world_scores(worlds[:, world], worlds).argmax() == world
    assert not world_scores(np.ones(N), worlds).any()
    assert not world_scores(worlds.mean(axis=1), worlds).max() > 1e-6


def test_the_auc_of_every_world_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(2)
    scores, membership = rng.integers(0, 6, 50).astype(float), assign_worlds(50, 4, seed=1)
    for world, auc in enumerate(auc_in_each(scores, membership)):
        inside, outside = scores[membership[:, world]], scores[~membership[:, world]]
        pairs = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
        assert auc == pytest.approx(pairs.mean())


def test_rates_are_those_of_the_curve():
    rng = np.random.default_rng(4)
    is_member = rng.random(2000) < 0.5
    scores = rng.normal(0.0, 1.0, 2000) + 2.0 * is_member
    found = half_rates(scores, is_member)
    assert found.auc == pytest.approx(stats.norm.cdf(math.sqrt(2.0)), abs=0.02)
    assert found.success == pytest.approx(stats.norm.cdf(1.0), abs=0.03)
    false, true = roc(scores, is_member)
    assert found.true_positives == true[false <= 0.01].max()
    assert found.rare_true_positives <= found.true_positives
    assert half_rates(np.zeros(10), np.arange(10) < 5).success == 0.5


def test_chance_is_the_place_of_the_realized_world():
    evidence = np.arange(8.0)[None]
    for secret in range(8):
        assert chance_p(evidence, np.array([secret]), np.random.default_rng(0)) == (8 - secret) / 8
        assert ranks_of(evidence, np.array([secret])) == [8 - secret]
    assert chance_p(np.zeros((1, 8)), np.array([3]), np.random.default_rng(0)) == 1.0
    assert named_rate(np.zeros((2, 8)), np.array([3, 4])) == 1 / 8
    both = np.tile(evidence, (2, 1))
    assert chance_p(both, np.array([7, 7]), np.random.default_rng(0)) == pytest.approx(1 / 64, rel=0.1)
    assert chance_p(both, np.array([7, 6]), np.random.default_rng(0)) == pytest.approx(3 / 64, rel=0.1)


def test_charged_nats_excuse_what_they_allow_and_no_more():
    assert p_at(0.001, 0.0) == 0.001
    assert 0.001 < p_at(0.001, 2.0**-16) < 0.003
    assert p_at(0.001, 0.5) == success_bound(0.5, 0.001)
    assert p_at(1 / 64, math.log(64)) == pytest.approx(1.0, abs=1e-6)
    assert p_at(0.2, math.inf) == p_at(1.0, 0.1) == 1.0


def test_an_event_at_the_bound_of_its_nats_is_no_alarm():
    """A student that names its secret with probability q: I(S; student) is known, and P(named) ≤ p_at(1/M, I)."""
    for q in (0.1, 0.3, 0.9):
        rest = (1.0 - q) / (M - 1)
        nats = math.log(M) + q * math.log(q) + (M - 1) * rest * math.log(rest)
        assert q <= p_at(1 / M, nats) * (1.0 + 1e-9)
        assert q > p_at(1 / M, 0.5 * nats)


def test_what_does_not_fit_together_is_refused():
    gains, membership, _ = made_up(0, 0.0)
    with pytest.raises(InvalidInput):
        attack_half(gains, membership[:, 1:])
    with pytest.raises(InvalidInput):
        lira(gains.own, gains.worlds[:, :2], membership[:, :2])
    with pytest.raises(InvalidInput):
        auc_in_each(gains.own, np.ones((N, 1), dtype=bool))
