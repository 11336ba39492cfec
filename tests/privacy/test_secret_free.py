"""Plurality and mixture: the secret is not read, the belief does not move, nothing is charged."""

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


USES = {
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


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_the_unreadable_secret_raises(use):
    with pytest.raises(UnsoundState, match="example"):
        use(unreadable_secret("example"))
    use(3)  # the twin: a plain secret can be read


def test_plurality_weighs_by_belief_not_by_number_of_worlds_and_ties_go_to_the_smaller_token():
    belief = np.log([0.02, 0.02, 0.02, 0.04, 0.3, 0.3, 0.15, 0.15])
    assert release_plurality(VOTES, uniform_belief(8), 0, 1.0, ResearchNoise(0)).token == 7
    assert release_plurality(VOTES, belief, 0, 1.0, ResearchNoise(0)).token == 3
    assert release_plurality(np.array([9, 9, 4, 4]), uniform_belief(4), 0, 1.0, ResearchNoise(0)).token == 4


def test_mixture_releases_each_vote_with_its_belief():
    belief, noise, n = np.log([0.1, 0.1, 0.1, 0.1, 0.25, 0.25, 0.05, 0.05]), ResearchNoise(4), 20_000
    tokens = np.array([release_mixture(VOTES, belief, 0, 1.0, noise).token for _ in range(n)])
    for token, share in ((7, 0.4), (3, 0.5), (5, 0.1)):
        # Four standard errors on three counts: false alarm under 2e-4.
        assert abs((tokens == token).mean() - share) < 4 * math.sqrt(share * (1 - share) / n)
    assert abs((tokens == 7).mean() - 0.5) > 4 * 0.5 / math.sqrt(n)  # counting worlds instead of belief fails


def test_an_unknown_release_is_refused():
    with pytest.raises(InvalidInput, match="gausian"):
        rule_named("gausian")
