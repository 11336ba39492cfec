"""What a token costs is decided on the very votes that are released."""

from __future__ import annotations

import numpy as np
import pytest

from paclm.config import MechanismConfig
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret, prior_belief
from paclm.curator.step import Releaser
from paclm.engine.engine import Ballot
from paclm.errors import InvalidInput
from paclm.privacy.accounting import Account
from paclm.privacy.belief import is_unanimous

WORLDS = 8
DISPUTED = np.repeat([3, 5], WORLDS // 2)


def releaser() -> tuple[Releaser, Account]:
    config = MechanismConfig(per_token=2.0**-8, total=1.0, charge="dissent")
    return Releaser(Secret(Redacted(1), WORLDS), config), Account.open(config.total)


def ballot(*rows: np.ndarray) -> Ballot:
    votes = np.ma.stack(rows) if any(np.ma.isMaskedArray(row) for row in rows) else np.stack(rows)
    return Ballot(votes.copy(), votes, np.full(len(rows), 9))


def test_disputed_tokens_are_charged_and_agreed_ones_are_not() -> None:
    own, account = releaser()
    outcomes, _ = own.release(ballot(DISPUTED, np.full(WORLDS, 4)), account, prior_belief(WORLDS))
    assert [outcome.units for outcome in outcomes] == [own.price(is_dissent=True), 0]
    assert outcomes[1].token.reveal() == 4


def test_votes_that_only_look_alike_are_charged_as_what_they_are() -> None:
    """Masked numbers have the same bytes, and are all there once the mask is off."""
    own, account = releaser()
    masked = np.ma.masked_array(DISPUTED, mask=True)
    assert is_unanimous(masked)
    belief = prior_belief(WORLDS)
    (outcome,), after = own.release(ballot(masked), account, belief)
    assert outcome.units == own.price(is_dissent=True)
    assert not np.array_equal(after.reveal(), belief.reveal())  # something was told, and it was charged


def test_an_engine_that_writes_into_its_votes_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own, account = releaser()
    votes = np.full((1, WORLDS), 4)
    price = Releaser.price

    def overwrite(self: Releaser, *, is_dissent: bool) -> int:
        votes[0] = DISPUTED
        return price(self, is_dissent=is_dissent)

    monkeypatch.setattr(Releaser, "price", overwrite)
    (outcome,), _ = own.release(Ballot(votes, votes, np.array([9])), account, prior_belief(WORLDS))
    assert (outcome.token.reveal(), outcome.units) == (4, 0)


def test_votes_that_are_no_integers_are_refused_before_anything_is_charged() -> None:
    own, account = releaser()
    with pytest.raises(InvalidInput, match="one integer per world"):
        own.release(Ballot(DISPUTED[None], DISPUTED[None] + 0.5, np.array([9])), account, prior_belief(WORLDS))


def test_dissent_of_a_world_that_is_all_but_ruled_out_is_charged_too() -> None:
    own, account = releaser()
    belief = np.full(WORLDS, -800.0)
    belief[1] = 0.0
    votes = np.full(WORLDS, 4)
    votes[-1] = 5
    (outcome,), _ = own.release(ballot(votes), account, Redacted(belief))
    assert (outcome.units, outcome.mark) == (own.price(is_dissent=True), "disputed")
