"""Small synthetic sessions for statistical tests, and a wrong source of noise."""

import numpy as np

from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import NoiseSource, ResearchNoise


class ScaledNoise(NoiseSource):
    """Research noise whose normals are multiplied by a factor: noise for another budget than the belief assumes."""

    def __init__(self, seed, factor):
        self._inner = ResearchNoise(seed)
        self._factor = factor

    def words(self, size):
        return self._inner.words(size)

    def standard_normal(self, size):
        return self._factor * self._inner.standard_normal(size)


def random_votes(rng, num_tokens, num_worlds, dissent=1.0, num_candidates=2):
    """Votes (tokens, m): balanced among the candidates where the worlds differ, all zero elsewhere."""
    balanced = np.arange(num_worlds) % num_candidates
    rows = np.array([rng.permutation(balanced) for _ in range(num_tokens)])
    rows[rng.random(num_tokens) >= dissent] = 0
    return rows


def run_session(release, votes, secret, per_token, noise):
    """Final belief and tokens of one session."""
    belief, tokens = uniform_belief(votes.shape[1]), []
    for row in votes:
        step = release(row, belief, secret, per_token, noise)
        belief = step.belief
        tokens.append(step.token)
    return belief, tokens
