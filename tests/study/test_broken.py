"""Known answers on synthetic votes, and deliberately broken mechanisms, each caught by the check that can see it.

Every check has a twin: the sound mechanism passes it, the broken one fails it. All draws are seeded; false-alarm rates
are those of a fresh seed.
"""

import math

import numpy as np
import pytest

from paclm.privacy import gaussian
from paclm.privacy.leak import leak_by_entropy, leak_by_truth, mean_and_stderr
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import Rule, rule_named
from paclm.study.attacks.coins import attack_coins
from paclm.study.batched_sessions import ResearchSessions
from study.small_lab import HalfNoise

WORLDS, TOKENS = 16, 64


def generous(votes, belief, secret, per_token, noise):
    """Noise for four times the budget, and a belief that accounts for it."""
    return gaussian.release(votes, belief, secret, 4.0 * per_token, noise)


def unaware(votes, belief, secret, per_token, noise):
    """Noise for four times the budget, and a belief that assumes noise at the budget."""
    return gaussian.release(votes, belief, secret, per_token, HalfNoise(noise))


RULES = {
    "sound": rule_named("gaussian"),
    "generous": Rule("generous", generous, reads_secret=True),
    "unaware": Rule("unaware", unaware, reads_secret=True),
}


def play(rule, per_token, dissent, sessions=400, distinct=2):
    """Final sessions and the dissent of each, (sessions,): a balanced split among `distinct` where worlds differ."""
    rng, split = np.random.default_rng(7), np.tile(np.arange(WORLDS) % distinct, (sessions, 1))
    played = ResearchSessions.seeded(WORLDS, RULES[rule], per_token, seed=11, num_sessions=sessions)
    differs = []
    for _ in range(TOKENS):
        mixed = rng.permuted(split, axis=1)
        votes = np.where(rng.random((sessions, 1)) < dissent, mixed, 0)
        differs.append(played.release(votes).is_dissent)
    return played, np.mean(differs, axis=0)


def leak_against_dissent(rule, per_token, dissent, **options):
    """Mean and error of leaked ÷ charged − dissent, session by session, and the mean dissent."""
    played, differs = play(rule, per_token, dissent, **options)
    leaks = np.array([leak_by_entropy(belief[None]).mean for belief in played.beliefs])
    return mean_and_stderr(leaks / (TOKENS * per_token) - differs), float(differs.mean())


def estimator_difference(rule, per_token):
    """Mean and error of the difference between the two estimators, session by session."""
    played, _ = play(rule, per_token, 0.5)
    leaks = np.array([leak_by_entropy(belief[None]).mean for belief in played.beliefs])
    truths = [leak_by_truth(b[None], s[None]).mean for b, s in zip(played.beliefs, played.secrets, strict=True)]
    return mean_and_stderr(np.array(truths) - leaks)


@pytest.mark.parametrize("dissent", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("distinct", [2, 4])
def test_leaked_over_charged_equals_dissent_on_a_source_with_chosen_dissent(dissent, distinct):
    gap, seen = leak_against_dissent("sound", 2.0**-14, dissent, distinct=distinct)
    assert abs(seen - dissent) < 4 * math.sqrt(dissent * (1 - dissent) / (400 * TOKENS)) + 1e-12
    assert abs(gap.mean) < 4 * gap.stderr  # false alarm under 1e-4
    assert 4 * gap.stderr < 0.3 * dissent  # precise enough to see a third


def test_noise_for_four_times_the_budget_shows_in_leaked_over_charged():
    gap, seen = leak_against_dissent("generous", 2.0**-14, 0.25)
    assert gap.mean > 4 * gap.stderr
    assert gap.mean == pytest.approx(3 * seen, abs=4 * gap.stderr)  # four times what was charged leaks


@pytest.mark.parametrize("rule", RULES)
def test_the_two_estimators_differ_only_when_the_belief_assumes_other_noise(rule):
    difference = estimator_difference(rule, 2.0**-8)
    if rule == "unaware":
        assert abs(difference.mean) > 8 * difference.stderr
    else:  # also for a generous rule whose belief knows: this check cannot see it
        assert abs(difference.mean) < 4 * difference.stderr  # false alarm under 1e-4


def test_a_belief_that_assumes_other_noise_hides_the_leak_from_the_first_estimator():
    gap, _ = leak_against_dissent("unaware", 2.0**-14, 0.25)
    assert gap.mean < -4 * gap.stderr  # estimates a quarter of the charge while four times the charge leaks


SUPPORT, STEPS, SESSIONS = 12, 24, 600
LOGITS = np.random.default_rng(3).normal(size=(STEPS, WORLDS, SUPPORT)) * 0.7


def sound_coins(session, step, _):
    return Coins(session, step).gumbel(SUPPORT)


def seeded_by_the_secret(_, step, secret):
    return Coins(secret, step).gumbel(SUPPORT)


def drawn_until_the_realized_world_agrees(session, step, secret):
    """Coins drawn again until the realized world votes with the plurality."""
    coins = Coins(session, 1000 * step)
    while True:
        drawn = coins.gumbel(SUPPORT)
        votes = (LOGITS[step] + drawn).argmax(axis=1)
        if votes[secret] == np.bincount(votes).argmax():
            return drawn


def watch(draw):
    """What an attacker with the adapters computes from the coins of each session, and the secrets."""
    secrets = np.random.default_rng(5).integers(WORLDS, size=SESSIONS)
    first, agreeing = [], []
    for session, secret in enumerate(secrets.tolist()):
        coins = np.stack([draw(session, step, secret) for step in range(STEPS)])  # (steps, k)
        votes = (LOGITS + coins[:, None]).argmax(axis=2)  # (steps, m)
        tops = np.array([np.bincount(row).argmax() for row in votes])
        first.append(coins[0])
        agreeing.append((votes == tops[:, None]).mean(axis=0))
    return {"coins": np.array(first), "agreement": np.array(agreeing)}, secrets


@pytest.mark.parametrize("feature", ["coins", "agreement"])
def test_sound_coins_leak_nothing_to_the_attacker(feature):
    seen, secrets = watch(sound_coins)
    found = attack_coins(seen[feature], secrets, WORLDS)
    assert found.chance > 1e-4  # false alarm 1e-4
    assert found.guesses == SESSIONS // 2
    assert found.prior == 1 / WORLDS


@pytest.mark.parametrize(
    ("draw", "feature"), [(seeded_by_the_secret, "coins"), (drawn_until_the_realized_world_agrees, "agreement")]
)
def test_coins_that_depend_on_the_secret_are_caught_by_reading_them(draw, feature):
    seen, secrets = watch(draw)
    found = attack_coins(seen[feature], secrets, WORLDS)
    assert found.chance < 1e-8
    assert found.right > 3 * found.guesses * found.prior


def test_leaky_coins_are_not_seen_by_the_belief():
    """Why the attack is needed: with coins that reveal the secret, both estimators of the leak look sound."""
    secrets = np.random.default_rng(5).integers(WORLDS, size=SESSIONS)
    played = ResearchSessions.seeded(WORLDS, RULES["sound"], 2.0**-10, seed=2, num_sessions=SESSIONS)
    played.secrets = secrets
    for step in range(STEPS):
        coins = np.stack([seeded_by_the_secret(0, step, s) for s in secrets.tolist()])
        played.release((LOGITS[step] + coins[:, None]).argmax(axis=2))
    by_truth, by_entropy = leak_by_truth(played.beliefs, secrets), leak_by_entropy(played.beliefs)
    assert by_entropy.mean < STEPS * 2.0**-10 + 4 * by_entropy.stderr
    assert abs(by_truth.mean - by_entropy.mean) < 4 * by_truth.stderr
