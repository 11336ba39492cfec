"""The two estimators of the leak agree if belief and noise match, and differ if not."""

import math

import numpy as np
import pytest

from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy import gaussian
from paclm.privacy.belief import uniform_belief
from paclm.privacy.leak import (
    leak_by_entropy,
    leak_by_truth,
    leak_samples_by_entropy,
    leak_samples_by_truth,
    mean_and_stderr,
)
from paclm.privacy.releases import RULES
from reference.simulation import ScaledNoise, random_votes, run_session


def play(
    release, per_token, *, sessions, tokens, dissent=1.0, num_worlds=32, noise_factor=1.0, seed=0, num_candidates=2
):
    """Final beliefs and secrets of independent sessions on random balanced votes; also the dissent that occurred."""
    rng = np.random.default_rng(seed)
    beliefs, secrets, dissenting = [], [], []
    for session in range(sessions):
        noise = ScaledNoise(seed * 100_000 + session, noise_factor)
        secret = noise.below(num_worlds)
        votes = random_votes(rng, tokens, num_worlds, dissent, num_candidates)
        beliefs.append(run_session(release, votes, secret, per_token, noise)[0])
        secrets.append(secret)
        dissenting.append((votes != votes[:, :1]).any(axis=1).sum())
    return np.array(beliefs), np.array(secrets), float(np.mean(dissenting))


def gap(beliefs, secrets):
    """The difference of the two estimators, paired by session, in standard errors."""
    by_entropy = [math.log(row.size) + float(np.exp(row) @ row) for row in beliefs]
    by_truth = math.log(beliefs.shape[1]) + beliefs[np.arange(len(secrets)), secrets]
    difference = mean_and_stderr(by_truth - by_entropy)
    return difference.mean / difference.stderr


THREE_VOTES = {"sessions": 700, "num_worlds": 48, "num_candidates": 3}


@pytest.mark.parametrize(
    ("name", "factor", "options"),
    [
        ("gaussian", 1.0, {"sessions": 1200}),
        ("gaussian", 0.5, {"sessions": 1200}),
        ("gaussian", 2.0, {"sessions": 1200}),
        ("gaussian", 1.0, THREE_VOTES),
        ("gaussian", 0.5, THREE_VOTES),
        ("channel", 1.0, {"sessions": 800}),
    ],
)
def test_estimators_agree_when_the_belief_knows_the_noise_and_differ_when_not(name, factor, options):
    beliefs, secrets, _ = play(RULES[name].release, 2.0**-4, tokens=16, noise_factor=factor, **options)
    distance = abs(gap(beliefs, secrets))
    assert distance < 4 if factor == 1.0 else distance > 8  # false alarm under 1e-4


@pytest.mark.parametrize("made_for", [1, 2])
def test_leak_equals_budget_times_dissent_and_doubles_with_noise_for_twice_the_budget(made_for):
    budget = 2.0**-13
    beliefs, _, dissenting = play(gaussian.release, made_for * budget, sessions=400, tokens=48, dissent=0.4)
    leak = leak_by_entropy(beliefs)
    assert leak.stderr < 0.05 * leak.mean  # precise enough to separate b from 2b
    assert abs(leak.mean - made_for * budget * dissenting) < 4 * leak.stderr  # false alarm under 1e-4
    assert abs(leak.mean - (3 - made_for) * budget * dissenting) > 8 * leak.stderr


@pytest.mark.parametrize("name", ["plurality", "mixture"])
def test_secret_free_releases_leak_exactly_nothing(name):
    beliefs, secrets, _ = play(RULES[name].release, 1.0, sessions=20, tokens=16)
    assert leak_by_entropy(beliefs).mean == pytest.approx(0.0, abs=1e-15)
    assert leak_by_truth(beliefs, secrets).mean == pytest.approx(0.0, abs=1e-15)


def test_a_certain_belief_has_leaked_log_m_and_a_single_session_has_no_standard_error():
    certain = np.full((3, 8), -np.inf)
    certain[:, 2] = 0.0
    assert leak_by_entropy(certain).mean == pytest.approx(math.log(8))
    assert leak_by_truth(certain, [2, 2, 2]).mean == pytest.approx(math.log(8))
    assert math.isnan(leak_by_entropy(uniform_belief(8)[None]).stderr)


def test_the_leak_of_each_session_equals_the_plain_formula():
    beliefs, secrets, _ = play(gaussian.release, 2.0**-20, sessions=30, tokens=4)
    one_by_one = [float(np.exp(row) @ (row + math.log(row.size))) for row in beliefs]
    assert leak_samples_by_entropy(beliefs) == pytest.approx(one_by_one, rel=1e-9)
    pairs = zip(beliefs, secrets, strict=True)
    assert leak_samples_by_truth(beliefs, secrets).tolist() == [math.log(32) + row[s] for row, s in pairs]
    assert leak_samples_by_entropy(np.empty((0, 8))).size == 0


def test_one_unsound_belief_among_many_no_sessions_and_missing_secrets_are_refused():
    beliefs = np.tile(uniform_belief(8), (5, 1))
    leak_samples_by_entropy(beliefs)
    for wrong in (math.nan, math.inf, -1.0):
        beliefs[3, 2] = wrong
        with pytest.raises(UnsoundState, match="belief"):
            leak_samples_by_entropy(beliefs)
    with pytest.raises(InvalidInput, match=r"\(0,\)"):
        leak_by_entropy(np.empty((0, 8)))
    with pytest.raises(InvalidInput, match=r"\(2,\)"):
        leak_by_truth(uniform_belief(8)[None], [1, 2])
