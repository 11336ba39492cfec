"""The releases by name, and which of them ever read the secret."""

from __future__ import annotations

from typing import NamedTuple

import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy import channel, gaussian, mixture, plurality
from paclm.privacy.randomness import NoiseSource
from paclm.privacy.step import Release, Step, checked


class Rule(NamedTuple):
    """A release mechanism as `[mechanism] release` names it."""

    name: str
    release: Release
    reads_secret: bool
    """False: a function of the history alone, which tells nothing about which half, so that nothing is charged."""

    def __call__(
        self, votes: npt.ArrayLike, belief: npt.ArrayLike, secret: int, per_token: float, noise: NoiseSource
    ) -> Step:
        """The release behind checks of everything it is given; `release` is the bare function for inner loops."""
        return checked(self.release, votes, belief, secret, per_token, noise)


RULES = {
    rule.name: rule
    for rule in (
        Rule("gaussian", gaussian.release, reads_secret=True),
        Rule("plurality", plurality.release, reads_secret=False),
        Rule("mixture", mixture.release, reads_secret=False),
        Rule("channel", channel.release, reads_secret=True),
    )
}


def rule_named(name: str) -> Rule:
    """The release of that name."""
    if name not in RULES:
        raise InvalidInput(f"There is no release {name!r}. Choose one of: {', '.join(RULES)}.")
    return RULES[name]
