"""The release from the prior at every step: an exact bound on its leak, an exact belief, and never served."""

from pathlib import Path

import numpy as np
import pytest

from paclm.privacy import gaussian
from paclm.privacy.belief import uniform_belief
from paclm.privacy.calibration import calibrate_noise, information_bound
from paclm.privacy.leak import leak_by_entropy, leak_by_truth
from paclm.privacy.randomness import ResearchNoise
from paclm.privacy.releases import RULES
from paclm.study.regimes.forgetting import release_forgetting
from reference.information import gaussian_bound, gaussian_information

SOURCE = Path(gaussian.__file__).parent.parent


@pytest.mark.parametrize("num_candidates", [2, 3, 6])
def test_at_the_prior_forgetting_equals_algorithm_1(num_candidates):
    votes = np.arange(32) % num_candidates
    for seed in range(20):
        steps = [
            release(votes, uniform_belief(32), 5, 2.0**-6, ResearchNoise(seed))
            for release in (gaussian.release, release_forgetting)
        ]
        assert steps[0].token == steps[1].token
        assert steps[0].belief == pytest.approx(steps[1].belief, abs=1e-12)
        assert steps[0].noise_scale == pytest.approx(steps[1].noise_scale)


def test_forgetting_keeps_the_noise_of_the_prior_at_any_belief():
    votes = np.arange(8) % 2
    sure = np.log(np.array([0.93, *[0.01] * 7]))
    forgetful = release_forgetting(votes, sure, 0, 2.0**-6, ResearchNoise(1))
    tracking = gaussian.release(votes, sure, 0, 2.0**-6, ResearchNoise(1))
    assert forgetful.noise_scale == pytest.approx(calibrate_noise(np.array([0.5, 0.5]), 2.0**-6).scale)
    assert tracking.noise_scale < forgetful.noise_scale / 2


@pytest.mark.parametrize("exponent", [-2, -8, -20])
@pytest.mark.parametrize("mass", [[0.5, 0.5], [0.9, 0.06, 0.04]])
def test_the_bound_on_the_leak_of_a_token_lies_between_its_leak_and_its_budget(mass, exponent):
    weights = np.array(mass)
    for other in (weights, weights[::-1]):  # noise for these masses, and for others
        calibration = calibrate_noise(other, 2.0**exponent)
        bound = information_bound(weights, calibration)
        assert gaussian_information(weights, *calibration) <= bound * (1 + 1e-6)
        assert bound <= float(gaussian_bound(weights, *calibration)) * (1 + 1e-9)
    assert information_bound(weights, calibrate_noise(weights, 2.0**exponent)) <= 2.0**exponent * (1 + 1e-9)


def test_noise_for_the_prior_leaks_more_than_the_budget_once_two_worlds_are_left():
    votes = np.array([1, 2, *[3] * 30])  # each of the two is alone with its vote
    rivals = np.log(np.array([0.4999, 0.4999, *[0.0002 / 30] * 30]))
    step = release_forgetting(votes, rivals, 0, 2.0**-10, ResearchNoise(0))
    assert step.information > 4 * 2.0**-10
    assert gaussian.release(votes, rivals, 0, 2.0**-10, ResearchNoise(0)).information == 2.0**-10


def test_both_leak_estimates_agree_because_the_belief_is_exact():
    beliefs, secrets = [], []
    votes = np.array([np.random.default_rng(1).integers(0, 3, 16) for _ in range(40)])
    for seed in range(300):
        noise, belief = ResearchNoise(seed), uniform_belief(16)
        secret = noise.below(16)
        for row in votes:
            belief = release_forgetting(row, belief, secret, 2.0**-6, noise).belief
        beliefs.append(belief)
        secrets.append(secret)
    first, second = leak_by_entropy(beliefs), leak_by_truth(beliefs, secrets)
    # seeded; for a fresh seed, false alarm < 1e-4
    assert abs(first.mean - second.mean) < 4 * np.hypot(first.stderr, second.stderr)
    unaware = leak_by_truth(np.roll(beliefs, 1, axis=0), secrets)  # the twin: beliefs about other sessions
    assert abs(first.mean - unaware.mean) > 4 * np.hypot(first.stderr, unaware.stderr)


def test_forgetting_is_not_registered_and_no_serving_room_mentions_it():
    assert release_forgetting not in [rule.release for rule in RULES.values()]
    serving = [path for room in ("curator", "server", "ledger", "cli") for path in (SOURCE / room).rglob("*.py")]
    assert serving
    assert not [path for path in serving if "release_forgetting" in path.read_text()]
