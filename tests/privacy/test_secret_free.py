"""Plurality and mixture: the secret is not read, the belief does not move, nothing is charged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES, release_mixture, release_plurality, rule_named, unreadable_secret

VOTES = np.repeat([7, 3, 5], [4, 2, 2])


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.reads_secret])
def test_the_secret_is_never_read_and_the_belief_never_moves(name):
    belief = uniform_belief(8)
    for votes in (VOTES, np.full(8, 2)):
        step = RULES[name].release(votes, belief, unreadable_secret(name), 2.0**-8, ResearchNoise(1))
        assert step.token in votes
        assert step.belief is belief
        assert step.information == 0.0


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.reads_secret])
def test_the_unreadable_secret_does_catch_a_release_that_reads_it(name):
    with pytest.raises(UnsoundState, match=name):
        RULES[name].release(VOTES, uniform_belief(8), unreadable_secret(name), 2.0**-8, ResearchNoise(1))


READINGS = {
    "an index": lambda secret: VOTES[secret],
    "an index of a list": lambda secret: VOTES.tolist()[secret],
    "a whole number": int,
    "a number": float,
    "a comparison": lambda secret: np.arange(8) == secret,
    "a comparison of numbers": lambda secret: secret == 3,
    "its order": lambda secret: secret > 3,
    "arithmetic": lambda secret: 2 * secret,
    "an array": lambda secret: np.array([secret]).astype(int),
    "one row of many": lambda secret: np.eye(8)[secret],
    "a key": lambda secret: {3: 1}.get(secret),
    "text": str,
    "a truth": bool,
    "an attribute": lambda secret: secret.real,
    "a type check": lambda secret: isinstance(secret, int),
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_no_way_of_looking_at_the_unreadable_secret_succeeds(reading):
    with pytest.raises(UnsoundState, match="example"):
        reading(unreadable_secret("example"))
    reading(3)  # the twin: a secret that may be read


def test_plurality_weighs_by_belief_not_by_heads():
    belief = np.log([0.02, 0.02, 0.02, 0.04, 0.3, 0.3, 0.15, 0.15])
    assert release_plurality(VOTES, uniform_belief(8), 0, 1.0, ResearchNoise(0)).token == 7
    assert release_plurality(VOTES, belief, 0, 1.0, ResearchNoise(0)).token == 3


def test_plurality_ties_go_to_the_smaller_token():
    assert release_plurality(np.array([9, 9, 4, 4]), uniform_belief(4), 0, 1.0, ResearchNoise(0)).token == 4


def test_mixture_releases_each_vote_with_its_belief():
    belief, noise, n = np.log([0.1, 0.1, 0.1, 0.1, 0.25, 0.25, 0.05, 0.05]), ResearchNoise(4), 20_000
    tokens = np.array([release_mixture(VOTES, belief, 0, 1.0, noise).token for _ in range(n)])
    for token, share in ((7, 0.4), (3, 0.5), (5, 0.1)):
        # Four standard errors on three counts: false alarm under 2e-4.
        assert abs((tokens == token).mean() - share) < 4 * math.sqrt(share * (1 - share) / n)
    assert abs((tokens == 7).mean() - 0.5) > 4 * 0.5 / math.sqrt(n)  # heads instead of belief would be seen


def test_an_unknown_release_is_refused_with_the_list():
    with pytest.raises(InvalidInput, match="gaussian, plurality, mixture, channel"):
        rule_named("gausian")
