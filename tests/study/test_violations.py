"""The violation test stays silent at the bound and speaks above it. Seeded; false alarms are what the file states."""

from __future__ import annotations

import numpy as np
import pytest

from paclm.study.violations import (
    FALSE_ALARMS,
    break_ties,
    describe_excess,
    excess_in_errors,
    is_violation,
    p_of_hits,
    p_of_mean,
)

CELLS, TRIALS = 24, 400


def any_alarm(success: float, bound: float, rng: np.random.Generator) -> bool:
    """Both attacks in 24 cells, one round."""
    hits = rng.binomial(TRIALS, success, CELLS)
    samples = rng.normal(success, 0.1, (CELLS, TRIALS))
    p_values = [p_of_hits(int(h), TRIALS, bound) for h in hits] + [p_of_mean(row, bound) for row in samples]
    return any(is_violation(p, 2 * CELLS) for p in p_values)


def test_attacks_exactly_at_the_bound_raise_an_alarm_about_as_rarely_as_stated():
    rng = np.random.default_rng(0)
    alarms = sum(any_alarm(0.1, 0.1, rng) for _ in range(200))
    assert alarms <= 8  # 2 expected at 1 %; more than 8 with probability 2e-4


def test_attacks_above_the_bound_are_caught():
    rng = np.random.default_rng(1)
    assert all(any_alarm(0.2, 0.1, rng) for _ in range(20))


def test_without_allowing_for_the_looks_false_alarms_would_be_common():
    rng = np.random.default_rng(2)
    p_values = [p_of_hits(int(h), TRIALS, 0.1) for h in rng.binomial(TRIALS, 0.1, 1000)]
    assert sum(p < FALSE_ALARMS for p in p_values) > 0
    assert not any(is_violation(p, 48 * 20) for p in p_values)


def test_p_values_of_known_cases():
    assert p_of_hits(0, 10, 0.5) == 1.0
    assert p_of_hits(10, 10, 0.5) == pytest.approx(2.0**-10)
    assert p_of_mean(np.tile([0.4, 0.6], 20), 0.5) == pytest.approx(0.5)
    assert p_of_mean(np.full(50, 0.5), 0.5) == 1.0
    assert p_of_mean(np.full(50, 0.9), 0.5) == pytest.approx(np.exp(-2 * 50 * 0.16))


def test_means_of_lopsided_samples_can_be_called_violations_where_nothing_is_broken():
    """Why the rate is not promised for every shape: 0.52 nearly always, 0.02 in 4 of 100, and 0.5 on average."""
    rng = np.random.default_rng(4)
    samples = np.where(rng.random((400, 100)) < 0.04, 0.02, 0.52) + rng.normal(0.0, 1e-3, (400, 100))
    alarms = sum(is_violation(p_of_mean(row, 0.5), 2 * CELLS) for row in samples)
    assert 1 <= alarms <= 20  # 7 expected; 0.1 if Student's t were right


def test_a_handful_of_samples_raises_no_alarm_however_alike_they_are():
    for count in (1, 2, 5):
        assert not is_violation(p_of_mean(np.full(count, 0.7), 0.5), 48)
        assert p_of_mean(np.full(count, 0.3), 0.5) == 1.0


def test_ties_are_broken_by_their_share():
    rng = np.random.default_rng(3)
    assert break_ties(np.array([1.0, 0.0, 1.0]), rng) == 2
    assert 140 < break_ties(np.full(1000, 0.2), rng) < 260


def cell(membership: float, world: float = 0.01, sessions: int = 8, error: float = 0.02) -> dict[str, object]:
    attacks = {"membership_rate": membership, "membership_stderr": error, "membership_bound": 0.5}
    attacks |= {"world_rate": world, "world_stderr": 0.0, "world_bound": 0.02}
    return {"budget": "2^-16", "horizon": 384, "sessions": sessions, **attacks}


def test_the_largest_excess_is_told_in_standard_errors_with_a_verdict_that_fits():
    def told(*rows):
        return describe_excess(rows)

    assert told(cell(0.49), cell(0.48)) == "No attack is above its bound in any of 4 looks (two attacks in 2 cells)."
    few = told(cell(0.53), cell(0.51), cell(0.49))
    assert "in 2 of 6 looks, by 1.5 standard errors over 8 sessions (membership at 2^-16 and 384 tokens) at most" in few
    assert few.endswith("too few to say more.")
    assert told(cell(0.53, sessions=100)).endswith("as chance allows in so many looks.")
    loud = told(cell(0.49), cell(0.6, sessions=100))
    assert loud.startswith("AN ATTACK IS ABOVE ITS BOUND by 5.0 standard errors over 100 sessions (membership")
    assert told(cell(0.6, sessions=4)).endswith("too few to say more.")  # five errors of so few mean little


def test_an_attack_that_always_succeeds_has_no_spread_and_is_above_its_bound_all_the_same():
    assert excess_in_errors(cell(0.5, world=1.0), "world") == np.inf
    assert excess_in_errors(cell(0.5, world=0.0), "world") == -np.inf
    assert "(world at" in describe_excess([cell(0.49, world=1.0)])
    assert describe_excess([cell(0.49, world=1.0, sessions=1)]).endswith("too few to say more.")
    assert describe_excess([cell(0.9, sessions=20, error=0.0)]).startswith("AN ATTACK")
