"""Research mode: seeded sessions in memory, for studies. NOT PRIVATE: the secret follows from the seed."""

from __future__ import annotations

from paclm.privacy.arrays import FloatArray, IntArray, check_num_worlds, check_per_token
from paclm.privacy.belief import uniform_belief
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule
from paclm.privacy.step import Step

STAMP = "NOT PRIVATE: research mode, secret and noise follow from a seed"


class ResearchSession:
    """One stream of releases against one secret drawn at the start, from a uniform belief."""

    __slots__ = ("_noise", "_per_token", "_release", "belief", "secret")

    def __init__(self, num_worlds: int, rule: Rule, per_token: float, noise: ResearchNoise) -> None:
        self._release = rule.release
        self._per_token = check_per_token(per_token)
        self._noise = noise
        self.secret = noise.below(check_num_worlds(num_worlds))
        self.belief: FloatArray = uniform_belief(num_worlds)

    def release(self, votes: IntArray) -> Step:
        """Release one token on the votes of all worlds (m,), and carry the belief on."""
        step = self._release(votes, self.belief, self.secret, self._per_token, self._noise)
        self.belief = step.belief
        return step
