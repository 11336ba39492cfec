"""The attack by the belief: useless against a private stream, perfect without noise, a guess without the secret."""

import math

import pytest

from paclm.privacy.bounds import success_bound
from paclm.study.attacks.belief import attack_sessions
from paclm.study.recorded_votes import RecordedVotes
from paclm.worlds.assignment import assign_worlds


def test_the_attack_finds_all_without_noise_and_nothing_in_private_streams(vote_files):
    recorded, membership = RecordedVotes.load(vote_files["gumbel"]), assign_worlds(200, 128, seed=3)

    def attack(per_token, release="gaussian"):
        return attack_sessions(
            recorded, membership, release=release, per_token=per_token, sessions=20, tokens=400, seed=1
        )

    noiseless = attack(math.inf)
    assert noiseless.membership.mean > 0.99
    assert noiseless.world.mean > 0.9
    private = attack(2.0**-24).membership
    assert private.mean <= success_bound(400 * 2.0**-24, 1 / 2) + 4 * private.stderr
    assert abs(private.mean - 0.5) < 0.02
    secret_free = attack(1.0, "plurality")
    assert secret_free.membership.mean == 0.5
    assert secret_free.world.mean == pytest.approx(1 / 128)
