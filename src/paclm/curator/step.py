"""From votes to outcomes: one release after another, each against the belief that the last one left.

What a token costs follows from the votes alone. Nothing here is durable yet, so every token stays hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paclm.config import MechanismConfig
from paclm.curator.outcomes import Outcome
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret
from paclm.errors import UnsoundState
from paclm.privacy.accounting import Account, charge_units
from paclm.privacy.belief import FloatArray, check_votes, is_unanimous
from paclm.privacy.randomness import Noise
from paclm.privacy.releases import rule_named

if TYPE_CHECKING:
    from paclm.engine.engine import Ballot


class Releaser:
    """The release rule in force, over one secret, with noise that nobody can set."""

    def __init__(self, secret: Secret, config: MechanismConfig) -> None:
        self._secret = secret
        self._config = config
        self._rule = rule_named(config.release)
        self._noise = Noise()

    def price(self, *, is_dissent: bool) -> int:
        """Units that a private token costs where the votes differ, or where they are all equal."""
        return charge_units(
            self._config.charge,
            self._config.per_token,
            reads_secret=self._rule.reads_secret,
            is_dissent=is_dissent,
        )

    def release(
        self, ballot: Ballot, account: Account, belief: Redacted[FloatArray]
    ) -> tuple[list[Outcome], Redacted[FloatArray]]:
        """One outcome per row of the ballot, in order, and the belief after the last."""
        outcomes = []
        for row, public in zip(ballot.votes, ballot.public.tolist(), strict=True):
            votes = check_votes(np.array(row))  # our own copy: what is priced is what is released
            is_dissent = not is_unanimous(votes)
            units = self.price(is_dissent=is_dissent)
            if not account.affords(units):
                if self._config.on_exhausted == "refuse":
                    raise UnsoundState("A stream met the end of a budget that was held free for it.")
                outcomes.append(Outcome(Redacted(public), "public", 0))
                continue
            account = account.charge(units, is_dissent=is_dissent)
            token, belief = self._secret.release(self._rule, votes, belief, self._config.per_token, self._noise)
            outcomes.append(Outcome(token, "disputed" if is_dissent else "agreed", units))
        return outcomes, belief
