"""What a token costs is decided on the very votes that are released."""

import numpy as np
import pytest

from paclm.config import MechanismConfig
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret, prior_belief
from paclm.curator.step import Releaser
from paclm.errors import UnsoundState
from paclm.privacy.accounting import Account

WORLDS = 8
DISPUTED = np.repeat([3, 5], WORLDS // 2)


def releaser():
    config = MechanismConfig(per_token=2.0**-8, total=1.0, charge="dissent")
    return Releaser(Secret(Redacted(1), WORLDS), config), Account.open(config.total)


def released(own, votes, account, belief):
    """Charges, tokens and the belief after one step on these votes (n, m)."""
    checked = own.checked(votes, len(votes))
    charges = own.charges(checked, account)
    tokens, after = own.release(checked, np.full(len(votes), 9), charges, belief)
    return charges, tokens.reveal(), after


def test_disputed_tokens_are_charged_and_agreed_ones_are_not():
    own, account = releaser()
    charges, tokens, _ = released(own, np.stack([DISPUTED, np.full(WORLDS, 4)]), account, prior_belief(WORLDS))
    assert [charge.units for charge in charges] == [own.price(is_dissent=True), 0]
    assert tokens[1] == 4


def test_votes_that_only_look_alike_are_charged_as_what_they_are():
    """Masked numbers have the same bytes, and are all there once the mask is off."""
    own, account = releaser()
    masked = np.ma.masked_array(DISPUTED[None], mask=True)
    assert not np.any(masked != masked[:, :1])
    belief = prior_belief(WORLDS)
    (charge,), _, after = released(own, masked, account, belief)
    assert charge.units == own.price(is_dissent=True)
    assert not np.array_equal(after.reveal(), belief.reveal())  # something leaked, and it was charged


def test_an_engine_that_writes_into_its_votes_meanwhile_changes_nothing(monkeypatch):
    own, account = releaser()
    votes = np.full((1, WORLDS), 4)
    price = Releaser.price

    def overwrite(self, *, is_dissent):
        votes[0] = DISPUTED
        return price(self, is_dissent=is_dissent)

    monkeypatch.setattr(Releaser, "price", overwrite)
    (charge,), tokens, _ = released(own, votes, account, prior_belief(WORLDS))
    assert (tokens, charge.units) == ([4], 0)


def test_votes_that_are_no_integers_are_refused_before_anything_is_charged():
    own, _ = releaser()
    for votes in (DISPUTED[None] + 0.5, DISPUTED[None, :-2], DISPUTED[None].astype(bool)):
        with pytest.raises(UnsoundState):
            own.checked(votes, 1)


def test_dissent_of_a_world_that_is_all_but_ruled_out_is_charged_too():
    own, account = releaser()
    belief = np.full(WORLDS, -800.0)
    belief[1] = 0.0
    votes = np.full(WORLDS, 4)
    votes[-1] = 5
    (charge,), _, _ = released(own, votes[None], account, Redacted(belief))
    assert charge == ("disputed", own.price(is_dissent=True))


def test_each_release_of_a_step_starts_from_the_belief_that_the_last_one_left(monkeypatch):
    own, account = releaser()
    ready = iter(2 * [bytes(range(start, start + 8)) for start in (0, 80, 160)])
    monkeypatch.setattr("os.urandom", lambda _: next(ready))
    votes = np.stack([DISPUTED, np.roll(DISPUTED, 2), DISPUTED[::-1]])
    _, together, after = released(own, votes, account, prior_belief(WORLDS))
    belief, alone = prior_belief(WORLDS), []
    for row in votes:
        _, tokens, belief = released(own, row[None], account, belief)
        alone += tokens
    assert together == alone
    assert after.reveal().tobytes() == belief.reveal().tobytes()
