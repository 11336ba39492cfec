"""Batched research sessions equal single sessions bit for bit, and both are stamped NOT PRIVATE."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.curator.research import STAMP, ResearchSession
from paclm.errors import InvalidInput
from paclm.privacy import gaussian
from paclm.privacy.belief import normalise
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES, Rule, rule_named
from paclm.study import streams
from paclm.study.batched_sessions import ResearchSessions, release_pairs
from paclm.study.recorded_votes import RecordedVotes


def noises(count, seed):
    return [ResearchNoise(child) for child in np.random.SeedSequence(seed).spawn(count)]


def run_both(votes, release, per_token, seed=3):
    """Votes (steps, sessions, m) through both; every step is compared exactly."""
    count, worlds = votes.shape[1:]
    together = ResearchSessions(worlds, rule_named(release), per_token, noises(count, seed))
    alone = [ResearchSession(worlds, rule_named(release), per_token, noise) for noise in noises(count, seed)]
    assert ResearchSession.stamp == ResearchSessions.stamp == STAMP
    assert "NOT PRIVATE" in STAMP
    assert together.secrets.tolist() == [session.secret for session in alone]
    for rows in votes:
        steps = together.release(rows)
        expected = [session.release(row) for session, row in zip(alone, rows, strict=True)]
        assert steps.tokens.tolist() == [step.token for step in expected]
        assert steps.is_dissent.tolist() == [step.is_dissent for step in expected]
        assert steps.information.tolist() == [step.information for step in expected]
        assert steps.noise_scales.tolist() == [step.noise_scale for step in expected]
        assert together.beliefs.tobytes() == np.stack([session.belief for session in alone]).tobytes()
    return together


@pytest.mark.parametrize("release", sorted(RULES))
@pytest.mark.parametrize("per_token", [2.0**-16, 2.0**-4])
def test_batched_sessions_equal_single_sessions_bit_for_bit(release, per_token, vote_files):
    """On real votes: two distinct votes, more, and none, mixed; longer than the random words fetched ahead."""
    votes = np.load(vote_files["gumbel"])["votes"][: 120 * 16].reshape(120, 16, 128).astype(np.int64)
    distinct = {len(set(row.tolist())) for row in votes.reshape(-1, 128)}
    assert {1, 2, 3} <= distinct
    run_both(votes, release, per_token)


def test_they_stay_equal_when_the_belief_has_collapsed_onto_one_world():
    """Large budgets and single dissenters drive masses to underflow, where the update works in log space."""
    rng = np.random.default_rng(0)
    votes = (rng.random((200, 8, 16)) < 0.15).astype(np.int64)
    together = run_both(votes, "gaussian", 3.0)
    assert together.beliefs.min() < -700  # e^-700 underflows


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([2, 8, 30]))
def test_any_votes_give_the_same_tokens_and_beliefs(seed, count, worlds):
    rng = np.random.default_rng(seed)
    votes = rng.integers(-1, rng.integers(1, 5), size=(6, count, worlds))
    run_both(votes, "gaussian", float(rng.choice([2.0**-32, 2.0**-8, 1.0])), seed)


def test_without_noise_the_realized_vote_itself_is_released():
    sessions = ResearchSessions.seeded(8, rule_named("gaussian"), np.inf, seed=1, num_sessions=40)
    votes = np.random.default_rng(2).integers(0, 3, size=(40, 8))
    assert sessions.release(votes).tokens.tolist() == votes[np.arange(40), sessions.secrets].tolist()


def test_secrets_are_spread_over_the_worlds():
    secrets = ResearchSessions.seeded(4, rule_named("gaussian"), 0.1, seed=5, num_sessions=2000).secrets
    assert np.bincount(secrets, minlength=4).min() > 400  # seeded; a fresh seed fails once in 1e6


@given(
    sides=st.lists(st.integers(0, 1), min_size=4, max_size=32).filter(
        lambda s: 0 < sum(s) < len(s) and len(s) % 2 == 0
    ),
    spread=st.sampled_from([0.0, 1.0, 30.0, 900.0]),
    exponent=st.integers(-40, 3),
    seed=st.integers(0, 2**32),
)
def test_the_release_of_two_distinct_votes_equals_algorithm_1_bit_for_bit(sides, spread, exponent, seed):
    """With e^-900 behind a vote the sum underflows."""
    votes, rng = np.array(sides), np.random.default_rng(seed)
    belief = normalise(-spread * rng.random(votes.size))
    secret, per_token = int(rng.integers(votes.size)), 2.0**exponent
    plain = gaussian.release(votes, belief, secret, per_token, ResearchNoise(seed))
    normals = ResearchNoise(seed).standard_normal(1)
    tokens, beliefs, scales = release_pairs(votes[None], belief[None], np.array([secret]), per_token, normals)
    assert (tokens.item(), scales.item()) == (plain.token, plain.noise_scale)
    assert beliefs.tobytes() == plain.belief.tobytes()


def test_the_comparison_notices_noise_that_is_wrong_by_one_part_in_a_million():
    case = np.array([[0, 0, 1, 1]]), np.full((1, 4), -np.log(4)), np.array([0]), 0.01
    right, wrong = (release_pairs(*case, np.array([draw]))[1] for draw in (0.3, 0.3 * (1 + 1e-6)))
    assert right.tobytes() != wrong.tobytes()


def test_only_algorithm_1_itself_is_vectorised_not_another_rule_of_its_name():
    def loud(votes, belief, secret, per_token, noise):
        return gaussian.release(votes, belief, secret, 4 * per_token, noise)

    votes = np.tile(np.arange(8) % 2, (40, 1))
    rules = rule_named("gaussian"), Rule("gaussian", loud, reads_secret=True)
    scales = [ResearchSessions.seeded(8, rule, 0.01, 1, 40).release(votes).noise_scales for rule in rules]
    assert scales[0] == pytest.approx(2 * scales[1])


def test_some_sessions_of_a_batch_can_be_released_and_the_others_stay():
    sessions = ResearchSessions.seeded(8, rule_named("gaussian"), 0.1, seed=1, num_sessions=4)
    before = sessions.beliefs.copy()
    done = sessions.release(np.array([np.arange(8) % 2, np.arange(8) % 3]), np.array([3, 1]))
    assert done.is_dissent.all()
    moved = (sessions.beliefs != before).any(axis=1)
    assert moved.tolist() == [False, True, False, True]


@pytest.mark.parametrize("make", [lambda v: v.astype(float), lambda v: v[:1], lambda v: v[:, :4]])
def test_votes_of_another_shape_or_kind_are_refused(make):
    sessions = ResearchSessions.seeded(8, rule_named("gaussian"), 0.1, seed=0, num_sessions=2)
    with pytest.raises(InvalidInput, match=r"\(2, 8\)"):
        sessions.release(make(np.zeros((2, 8), dtype=np.int64)))


@pytest.mark.parametrize("release", sorted(RULES))
def test_streams_played_in_batches_equal_single_sessions_bit_for_bit(release, vote_files, monkeypatch):
    """The session protocol of `paclm replay`; five sessions in batches of three."""
    monkeypatch.setattr(streams, "_BATCH", 3)
    recorded = RecordedVotes.load(vote_files["gumbel"])
    played = list(streams.play_sessions(recorded, rule_named(release), 2.0**-8, 5, 300, seed=7))
    assert len(played) == 5
    for stream, noise in zip(played, noises(5, 7), strict=True):
        start = noise.below(recorded.num_positions)
        session = ResearchSession(recorded.num_worlds, rule_named(release), 2.0**-8, noise)
        rows = recorded.votes[(start + np.arange(300)) % recorded.num_positions]
        done = [session.release(row) for row in rows]
        assert stream.secrets.tolist() == [session.secret]
        assert stream.released.tolist() == [one.token for one in done]
        assert stream.scales.tolist() == [one.noise_scale for one in done if one.is_dissent]
        assert stream.information == sum(one.information for one in done)
        assert stream.beliefs.tobytes() == session.belief.tobytes()
