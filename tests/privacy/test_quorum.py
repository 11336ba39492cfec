"""The quorum: the same as a slow twin, nothing released without it, and its bound on what a record can add."""

from collections import Counter

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.privacy import quorum as module
from paclm.privacy.belief import uniform_belief
from paclm.privacy.quorum import apply_quorum
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.assignment import assign_groups, assign_worlds


def is_allowed(token, row, public, membership, quorum):
    """By its definition, one record after another."""
    return token == public or all((row[~is_member] == token).sum() >= quorum for is_member in membership)


def by_hand(votes, public, membership, quorum):
    """The slow twin."""
    kept = votes.copy()
    for t, row in enumerate(votes):
        counts = Counter(row.tolist())
        allowed = [y for y in counts if is_allowed(y, row, public[t], membership, quorum)]
        fallback = min(allowed, key=lambda y: (-counts[y], y)) if allowed else public[t]
        kept[t] = [y if y in allowed else fallback for y in row.tolist()]
    return kept


@pytest.mark.parametrize("quorum", [1, 2, 4])
@pytest.mark.parametrize("records", [1, 3, 40])
def test_the_votes_are_those_of_the_slow_twin(quorum, records, monkeypatch):
    rng = np.random.default_rng([quorum, records])
    votes = (rng.geometric(rng.uniform(0.3, 1.0, size=(300, 1)), size=(300, 12)) * 7) % 23
    public, membership = votes[:, 0] * (rng.random(300) < 0.7), assign_worlds(records, 12, seed=records)
    expected = by_hand(votes, public, membership, quorum)
    np.testing.assert_array_equal(apply_quorum(votes, public, membership, quorum), expected)
    assert (expected != votes).any()
    monkeypatch.setattr(module, "_POSITIONS_AT_ONCE", 7)  # the same in pieces
    monkeypatch.setattr(module, "_COUNTS_AT_ONCE", 5 * records)
    np.testing.assert_array_equal(apply_quorum(votes, public, membership, quorum), expected)


@pytest.mark.parametrize("quorum", [1, 8])
def test_on_real_votes_nothing_is_left_that_lacks_the_quorum_for_any_record(vote_files, quorum):
    recorded = RecordedVotes.load(vote_files["gumbel"])
    differs = np.flatnonzero(recorded.is_dissent)[:300]
    votes, public, membership = recorded.votes[differs], recorded.public[differs], assign_worlds(256, 128, seed=1)
    kept = apply_quorum(votes, public, membership, quorum)
    broken = 0
    for t, row in enumerate(votes):
        assert all(is_allowed(y, row, public[t], membership, quorum) for y in set(kept[t].tolist()))
        broken += not all(is_allowed(y, row, public[t], membership, quorum) for y in set(row.tolist()))
    assert broken > 100  # the same check fails on many rows as they were cast


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_only_worlds_with_the_record_propose_is_never_released_whatever_the_secret(rule):
    """A canary that all of its worlds vote for, against others who agree: half of the mass. No chance is involved."""
    membership, secret_text, other = assign_worlds(64, 32, seed=2), 3, 4  # a tie goes to the smaller token
    cast = np.where(membership[5], secret_text, other)[None]
    for public in (other, 6):
        votes = apply_quorum(cast, np.array([public]), membership, 1)
        for secret in range(32):
            step = rule(votes[0], uniform_belief(32), secret, 2.0**-4, ResearchNoise(secret))
            assert step.token == other
    noise = ResearchNoise(3)
    without = [rule(cast[0], uniform_belief(32), secret, 2.0**-4, noise).token for secret in range(32)]
    assert secret_text in without  # the twin: votes as they were cast do release it
    assert (apply_quorum(cast, np.array([secret_text]), membership, 1) == cast).all()  # public anyway


def test_records_of_one_group_are_protected_together_and_two_groups_are_not():
    """The limit that the page states: worlds without one holder of a text may hold it from another."""
    membership = assign_groups(["anna", "anna", "ben", "cleo"], 16, seed=0)
    assert (membership[0] == membership[1]).all()
    anna, ben = membership[0], membership[2]
    public = np.array([1])
    assert (apply_quorum(np.where(anna, 9, 1)[None], public, membership, 1) == 1).all()
    assert 9 in apply_quorum(np.where(anna | ben, 9, 1)[None], public, membership, 1)


def test_a_record_can_make_a_token_more_likely_by_a_known_factor_only():
    """P(released) ≤ m ÷ 2q times the mean over the worlds without the record, plus the public model's probability.

    Coupled Gumbel over 20,000 draws of coins: false alarm below 1e-6 (five errors of a share). The record raises the
    token's probability from 0.002 to 0.9; without a quorum the plurality alone breaks the same bound.
    """
    m, quorum, draws = 32, 8, 20_000
    membership, rng = assign_worlds(1, m, seed=3), np.random.default_rng(4)
    share = np.where(membership[0], 0.9, 0.002)[:, None]  # of token 0; the others are equally likely
    logits = np.log(np.concatenate([share, np.repeat((1.0 - share) / 4, 4, axis=1)], axis=1))  # (m, 5)
    logits[:, 1:] += 0.3 * rng.normal(size=(m, 4))
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    coins = rng.gumbel(size=(draws, 1, 5))
    votes = (logits + coins).argmax(axis=2)  # (draws, m)
    public = (np.log([0.002, *[0.2495] * 4]) + coins[:, 0]).argmax(axis=1)
    bound = m / (2 * quorum) * probability[~membership[0], 0].mean() + 0.002
    most_released = (apply_quorum(votes, public, membership, quorum) == 0).any(axis=1)  # by any release at all
    assert most_released.mean() <= bound + 5 * np.sqrt(bound / draws)
    assert ((votes == 0).sum(axis=1) > m // 2 - 1).mean() > 20 * bound  # the twin


@pytest.mark.parametrize("quorum", [0, -1, 5])
def test_a_quorum_that_no_token_needs_or_none_can_reach_is_refused(quorum):
    membership = assign_worlds(3, 8, seed=0)
    with pytest.raises(InvalidInput, match="from 1 to 4"):
        apply_quorum(np.ones((2, 8), dtype=int), np.ones(2, dtype=int), membership, quorum)


def test_votes_and_membership_of_other_shapes_are_refused():
    votes, public, membership = np.ones((2, 8), dtype=int), np.ones(2, dtype=int), assign_worlds(3, 8, seed=0)
    for wrong in ((votes, public[:1], membership), (votes, public, membership[:, :6]), (votes, public, membership[:0])):
        with pytest.raises(InvalidInput, match=r"shape|for \(2, 8\)"):
            apply_quorum(*wrong, 1)
    with pytest.raises(InvalidInput, match="int64"):
        apply_quorum(votes, public, membership.astype(int), 1)
