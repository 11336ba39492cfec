"""The middle of a step: what each token costs, from the votes alone, and then the releases.

Nothing is durable yet, so every token stays redacted. `Curator.step` commits the charges and the belief afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paclm.config import MechanismConfig
from paclm.curator.redacted import Redacted, redact_errors
from paclm.curator.secret import Secret
from paclm.curator.streams import Mark
from paclm.errors import UnsoundState
from paclm.ledger.events import Usage
from paclm.privacy.accounting import Account, charge_units
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import Noise
from paclm.privacy.releases import rule_named


class Charge(NamedTuple):
    """What one token costs. Follows from the votes alone."""

    mark: Mark
    units: int


class Releaser:
    """Prices votes and releases tokens with the configured mechanism."""

    def __init__(self, secret: Secret, config: MechanismConfig) -> None:
        self._secret = secret
        self._config = config
        self._rule = rule_named(config.release)
        self._noise = Noise()

    def price(self, *, is_dissent: bool) -> int:
        """Units that a private token costs."""
        return charge_units(
            self._config.charge, self._config.per_token, reads_secret=self._rule.reads_secret, is_dissent=is_dissent
        )

    def checked(self, votes: IntArray, public: IntArray, num_streams: int, vocabulary: int) -> IntArray:
        """A copy of the votes (n, m): what is priced is what is released, whatever the engine does to its own array.

        Nothing that follows may fail for some of these tokens and not for others.
        """
        own = np.array(votes)
        if own.shape != (num_streams, self._secret.num_worlds) or own.dtype.kind not in "iu":
            raise UnsoundState(f"The engine returned votes {own.dtype} {own.shape}. Nothing was released.")
        for tokens in (own, np.asarray(public)):
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
                raise UnsoundState("The engine returned votes that are no token ids. Nothing was released.")
        return own

    def charges(self, votes: IntArray, account: Account) -> list[Charge]:
        """The charge of each row of checked votes (n, m), in order, as far as the account affords them."""
        disputed = Charge("disputed", self.price(is_dissent=True))
        agreed = Charge("agreed", self.price(is_dissent=False))
        charges = [disputed if is_dissent else agreed for is_dissent in (votes != votes[:, :1]).any(axis=1).tolist()]
        if account.affords(len(charges) * disputed.units):
            return charges
        return self._within(account, charges, disputed.units)

    def _within(self, account: Account, charges: list[Charge], worst: int) -> list[Charge]:
        """These charges in order, as long as the budget covers dissent; from then on all are the public model's.

        Also those that would cost nothing: or else the marks would show everyone where the worlds dissent.
        """
        covered = []
        for charge in charges:
            if account.affords(worst):
                account = account.charge(charge.units, is_dissent=charge.mark == "disputed")
                covered.append(charge)
            elif self._config.on_exhausted == "refuse":
                raise UnsoundState("The budget ended inside a stream that had reserved its worst case.")
            else:
                covered.append(Charge("public", 0))
        return covered

    def release(
        self, votes: IntArray, public: IntArray, charges: list[Charge], belief: Redacted[FloatArray]
    ) -> tuple[Redacted[list[int]], Redacted[FloatArray]]:
        """One token per row and the belief after the last. Unanimous votes need no release (`lem:singular` iii)."""
        dissent = [row for row, charge in enumerate(charges) if charge.mark == "disputed"]
        released, belief = self._secret.release(self._rule, votes[dissent], belief, self._config.per_token, self._noise)
        return _in_order(charges, votes[:, 0], public, released), belief


@redact_errors
def _in_order(
    charges: list[Charge], agreed: IntArray, public: IntArray, released: Redacted[list[int]]
) -> Redacted[list[int]]:
    dissent = iter(released.reveal())
    rows = zip(charges, agreed.tolist(), public.tolist(), strict=True)
    return Redacted([next(dissent) if mark == "disputed" else p if mark == "public" else a for (mark, _), a, p in rows])


def usage_by_tag(tags: Iterable[str], charges: Iterable[Charge]) -> list[Usage]:
    """The step's entries for the ledger, one per tag."""
    entries: dict[str, Usage] = {}
    for (tag, (mark, units)), n in Counter(zip(tags, charges, strict=True)).items():
        is_private = mark != "public"
        more = Usage(tag, n * is_private, n * (mark == "disputed"), n * (units > 0), n * units, n * (not is_private))
        entries[tag] = entries[tag].plus(more) if tag in entries else more
    return list(entries.values())
