"""The attacks: useless against a private stream, perfect without noise, and no better than a guess at the start."""

import math

import pytest

from paclm.privacy.bounds import success_bound
from paclm.study.attacks.belief import attack_sessions
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.assignment import assign_worlds


@pytest.fixture
def recorded(vote_files):
    return RecordedVotes.load(vote_files["gumbel"])


MEMBERSHIP = assign_worlds(200, 128, seed=3)


def attack(recorded, per_token, tokens, release="gaussian"):
    return attack_sessions(
        recorded, MEMBERSHIP, release=release, per_token=per_token, sessions=20, tokens=tokens, seed=1
    )


def test_without_noise_every_record_and_the_world_are_found_out(recorded):
    found = attack(recorded, math.inf, 400)
    assert found.membership.mean > 0.99
    assert found.world.mean > 0.9


def test_against_the_private_stream_the_attack_is_near_a_guess_and_under_the_bound(recorded):
    found = attack(recorded, 2.0**-24, 400)
    assert found.membership.mean <= success_bound(400 * 2.0**-24, 1 / 2) + 4 * found.membership.stderr
    assert abs(found.membership.mean - 0.5) < 0.02


def test_secret_free_releases_leave_exactly_a_guess(recorded):
    found = attack(recorded, 1.0, 200, release="plurality")
    assert found.membership.mean == 0.5
    assert found.world.mean == pytest.approx(1 / 128)
