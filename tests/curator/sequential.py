"""The plain twin of the curator's bookkeeping: the same votes and noise, one release after another."""

import os
from contextlib import contextmanager

import numpy as np
import pytest

from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.releases import rule_named


class Recorded(NoiseSource):
    """Noise that was drawn before, again."""

    __slots__ = ("_words",)

    def __init__(self, draws):
        self._words = iter(draws)

    def words(self, size):
        draw = next(self._words)
        assert len(draw) == 8 * size
        return np.frombuffer(draw, dtype=np.uint64)


@contextmanager
def recorded_noise():
    """Every draw that releases make from the operating system; sealing draws 12 bytes at a time and is left out."""
    draws = []
    original = os.urandom

    def urandom(size):
        drawn = original(size)
        if size % 8 == 0:
            draws.append(drawn)
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", urandom)
        yield draws


def world_of(curator):
    return world_in(curator._custody)


def world_in(custody):
    return int(custody.secret._Secret__world.reveal())


def belief_of(curator):
    return curator._custody.belief.reveal()


class Reference:
    """Replays what the engine voted, from a uniform belief."""

    def __init__(self, num_worlds, world, draws):
        self.belief = uniform_belief(num_worlds)
        self.world = world
        self.noise = Recorded(draws)
        self.tokens = []

    def follow(self, ballot, is_private, release, per_token):
        for votes, public, private in zip(ballot.votes, ballot.public.tolist(), is_private, strict=True):
            self.tokens.append(self.release(votes, release, per_token) if private else public)

    def release(self, votes, release, per_token):
        """The token that these votes release; the belief moves on."""
        step = rule_named(release).release(votes, self.belief, self.world, per_token, self.noise)
        self.belief = step.belief
        return step.token
