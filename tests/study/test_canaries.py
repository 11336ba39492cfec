"""Canaries under study: forced votes, their known advantage, and the regime from end to end."""

import math

import numpy as np
import pytest

from paclm.privacy.releases import rule_named
from paclm.study.batched_sessions import ResearchSessions
from paclm.study.regimes.canaries import advantage, even_split_advantage, force_votes, gap
from paclm.worlds.assignment import assign_worlds

WORLDS, PAYLOAD, OTHER = 32, 7, 3
MEMBERS = assign_worlds(1, WORLDS, seed=1)[0]


def forced_trials(per_token, trials, factor=1.0):
    """One token per trial on an even split; factor: of the budget that the noise is really for."""
    votes = force_votes(np.full((trials, WORLDS), OTHER), MEMBERS, PAYLOAD, others_agree=True)
    sessions = ResearchSessions.seeded(WORLDS, rule_named("gaussian"), factor * per_token, 5, trials)
    return sessions.release(votes).tokens == PAYLOAD, MEMBERS[sessions.secrets]


@pytest.mark.parametrize("exponent", [4, 8, 16])
def test_forced_canaries_have_the_advantage_of_theory(exponent):
    emitted, realized = forced_trials(2.0**-exponent, 40_000)
    found = advantage(emitted, realized)
    assert abs(found.mean - even_split_advantage(2.0**-exponent)) < 4 * found.stderr  # false alarm under 1e-4
    assert emitted.mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(40_000))  # the payload is said all the same


def test_the_theory_is_the_published_one_and_less_noise_gives_more_away():
    generous = advantage(*forced_trials(2.0**-4, 6000, factor=4.0))  # noise for four times the budget
    assert generous.mean - even_split_advantage(2.0**-4) > 4 * generous.stderr
    assert [round(even_split_advantage(2.0**-n), 4) for n in (4, 8, 16)] == [0.2763, 0.0704, 0.0044]
    assert even_split_advantage(math.inf) == 1.0
    assert advantage(*forced_trials(math.inf, 200)) == (1.0, 0.0)


def test_forcing_changes_exactly_the_member_worlds_unless_the_others_are_made_to_agree():
    votes = np.random.default_rng(0).integers(4, size=(50, WORLDS))
    own = force_votes(votes, MEMBERS, PAYLOAD, others_agree=False)
    assert (own[:, MEMBERS] == PAYLOAD).all()
    assert (own[:, ~MEMBERS] == votes[:, ~MEMBERS]).all()
    agreed = force_votes(votes, MEMBERS, PAYLOAD, others_agree=True)
    expected = [np.bincount(row).argmax() for row in votes[:, ~MEMBERS]]
    assert (agreed[:, ~MEMBERS] == np.array(expected)[:, None]).all()
    tie = force_votes(np.array([[5, 2, 2, 5, 7]]), np.arange(5) == 4, PAYLOAD, others_agree=True)
    assert tie.tolist() == [[2, 2, 2, 2, PAYLOAD]]  # ties to the smaller token
    assert (votes < 4).all()  # what was cast is left alone


def test_the_gap_between_worlds_is_a_difference_of_means_with_the_error_of_one():
    values = np.where(MEMBERS, 2.0, 1.0) + np.random.default_rng(1).normal(size=WORLDS) * 0.1
    found = gap(values, MEMBERS)
    assert abs(found.mean - 1.0) < 4 * found.stderr
    assert found.stderr == pytest.approx(0.1 * math.sqrt(2 / 16), rel=0.5)
    assert math.isnan(gap(np.array([1.0, 2.0]), np.array([True, False])).stderr)
