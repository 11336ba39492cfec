"""What a token costs is decided on the very votes that are released."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.config import MechanismConfig
from paclm.curator.curator import Charge, Releaser, usage_by_tag
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret, prior_belief
from paclm.errors import UnsoundState
from paclm.privacy.accounting import Account, units_up
from paclm.privacy.releases import RULES

WORLDS = 8
DISPUTED = np.repeat([3, 5], WORLDS // 2)


def releaser():
    config = MechanismConfig(per_token=2.0**-8, total=1.0, charge="dissent")
    return Releaser(Secret(Redacted(1), WORLDS), config), Account.open(config.total)


def released(own, votes, account, belief):
    """Charges, tokens and the belief after one step on these votes (n, m)."""
    checked = own.checked(votes, votes[:, 0], len(votes), 10**6)
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
            own.checked(votes, np.zeros(1, dtype=np.int64), 1, 10**6)


@pytest.mark.parametrize("wrong", [-1, 99, 2**31 - 1])
def test_votes_outside_the_vocabulary_are_refused_before_anything_is_charged(wrong):
    """A world whose logits are NaN votes so. Refused after its release, it would tell which world is realized."""
    own, _ = releaser()
    votes, public = np.full((1, WORLDS), 4), np.full(1, 4)
    assert own.checked(votes, public, 1, 99).shape == votes.shape
    for tokens in (votes, public):
        tokens.flat[0] = wrong
        with pytest.raises(UnsoundState):
            own.checked(votes, public, 1, 99)
        tokens.flat[0] = 4


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


@given(
    rows=st.lists(st.booleans(), max_size=12),
    left=st.integers(1, 12),
    charge=st.sampled_from(["dissent", "every-token"]),
    release=st.sampled_from(list(RULES)),
)
def test_charges_in_one_pass_are_those_of_one_row_after_another(rows, left, charge, release):
    config = MechanismConfig(per_token=2.0**-8, total=1.0, charge=charge, release=release)
    own, total = Releaser(Secret(Redacted(1), WORLDS), config), units_up(1.0)
    account = start = Account(total, max(0, total - left * units_up(2.0**-8) + 1))  # a unit too little for the last
    votes = np.array([DISPUTED if is_dissent else np.full(WORLDS, 4) for is_dissent in rows]).reshape(-1, WORLDS)
    alone = []
    for row, is_dissent in zip(votes, rows, strict=True):
        (charged,) = own.charges(row[None], account)
        alone.append(charged)
        if charged.mark != "public":
            account = account.charge(charged.units, is_dissent=is_dissent)
    assert own.charges(votes, start) == alone


def test_a_stream_that_reserved_its_worst_case_is_never_cut_short_in_silence():
    config = MechanismConfig(per_token=2.0**-8, total=1.0, on_exhausted="refuse")
    own = Releaser(Secret(Redacted(1), WORLDS), config)
    with pytest.raises(UnsoundState, match="reserved"):
        own.charges(np.stack([DISPUTED] * 3), Account(2 * units_up(2.0**-8)))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["agreed", "disputed", "public"])), max_size=20))
def test_usage_by_tag_counts_every_token_once(tokens):
    units = {"agreed": 0, "disputed": 7, "public": 0}
    entries = usage_by_tag([tag for tag, _ in tokens], [Charge(mark, units[mark]) for _, mark in tokens])
    assert [entry.key for entry in entries] == list(dict.fromkeys(tag for tag, _ in tokens))
    for entry in entries:
        own = Counter(mark for tag, mark in tokens if tag == entry.key)
        assert (entry.tokens, entry.public_tokens) == (own["agreed"] + own["disputed"], own["public"])
        assert entry.dissent_tokens == entry.charged_tokens == entry.units / 7 == own["disputed"]
