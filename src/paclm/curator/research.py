"""Research mode: a seeded session in memory, for studies. NOT PRIVATE: the secret follows from the seed."""

from __future__ import annotations

from paclm.privacy.accounting import check_per_token
from paclm.privacy.belief import FloatArray, IntArray, Release, check_num_worlds, uniform_belief
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import Rule, unreadable_secret

STAMP = "NOT PRIVATE: research mode, secret and noise follow from a seed"


class ResearchSession:
    """One stream of releases against one secret drawn at the start, from a uniform belief.

    `resumed`: the secret and the belief of an earlier session, to go on from. A rule registered with reads_secret=False
    gets a secret that raises when it is read.
    """

    __slots__ = ("_noise", "_per_token", "_release", "_secret_shown", "belief", "secret")

    stamp = STAMP

    def __init__(
        self,
        num_worlds: int,
        rule: Rule,
        per_token: float,
        noise: ResearchNoise,
        resumed: tuple[int, FloatArray] | None = None,
    ) -> None:
        self._release = rule.release
        self._per_token = check_per_token(per_token)
        self._noise = noise
        self.belief: FloatArray
        if resumed is None:
            self.secret, self.belief = noise.below(check_num_worlds(num_worlds)), uniform_belief(num_worlds)
        else:
            self.secret, self.belief = resumed
        self._secret_shown = self.secret if rule.reads_secret else unreadable_secret(rule.name)

    def release(self, votes: IntArray) -> Release:
        """Release one token on the votes of all worlds (m,), and update the belief."""
        released = self._release(votes, self.belief, self._secret_shown, self._per_token, self._noise)
        self.belief = released.belief
        return released
