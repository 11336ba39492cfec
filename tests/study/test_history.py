"""Known answers: leaked ÷ charged is the dissent of the same sessions; wrong noise is caught by the check that sees it.

Every test is seeded; with a fresh seed each would raise a false alarm less than once in ten thousand times (4 σ).
"""

from functools import partial

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.privacy import gaussian
from paclm.privacy.belief import uniform_belief
from paclm.privacy.releases import Rule, rule_named
from paclm.study.history import follow_up, measure, play_queries
from paclm.study.serving import Played, carry_on, draw_secrets
from paclm.worlds.assignment import assign_worlds
from study.small_lab import HalfNoise, ScriptedStreams

M, SESSIONS, QUERIES, LENGTH = 16, 300, 2, 100
MEMBERSHIP = assign_worlds(40, M, seed=1)


def unaware(votes, belief, secret, per_token, noise):
    return gaussian.release(votes, belief, secret, per_token, HalfNoise(noise))


def measured(charged, horizon, noise_for=None, rule=None, dissent=0.3):
    secrets = draw_secrets(M, seed=5, count=SESSIONS)
    played = play_queries(
        ScriptedStreams(M, dissent, seed=2),
        partial(carry_on, rule or rule_named("gaussian"), noise_for or charged, 5, 0, secrets),
        [[[1]] * SESSIONS] * QUERIES,
        np.tile(uniform_belief(M), (SESSIONS, 1)),
        0,
        LENGTH,
    )
    return measure(Played(**played), charged, secrets, horizon, MEMBERSHIP)


@pytest.mark.parametrize("dissent", [0.1, 0.5])
def test_leaked_over_charged_is_the_dissent_of_the_same_sessions(dissent):
    for horizon in (LENGTH, 2 * LENGTH):
        row = measured(2.0**-10, horizon, dissent=dissent)
        assert row["dissent"] == pytest.approx(dissent, abs=0.02)
        assert abs(row["gap"]) < 4 * row["gap_stderr"]
        assert row["leaked_over_charged"] == pytest.approx(row["dissent"], rel=0.25)
        assert abs(row["estimators_parting"]) < 4 * row["estimators_parting_stderr"]
        assert row["step_information_nats"] == pytest.approx(row["charged_nats"] * row["dissent"])
        assert row["membership_rate"] <= row["membership_bound"] + 4 * row["membership_stderr"]
        assert row["world_rate"] <= row["world_bound"] + 4 * row["world_stderr"]


def test_noise_for_four_times_the_budget_with_a_belief_that_knows_is_caught_by_the_gap():
    row = measured(2.0**-10, 2 * LENGTH, noise_for=2.0**-8)
    assert row["gap"] > 4 * row["gap_stderr"]
    assert row["leaked_over_charged"] > 3 * row["dissent"]
    assert abs(row["estimators_parting"]) < 4 * row["estimators_parting_stderr"]  # this check cannot see it


@pytest.mark.parametrize(("release", "is_caught"), [(gaussian.release, False), (unaware, True)])
def test_noise_for_four_times_the_budget_with_a_belief_unaware_parts_the_two_estimators(release, is_caught):
    row = measured(2.0**-6, 200, rule=Rule("named", release, reads_secret=True))
    assert (abs(row["estimators_parting"]) > 4 * row["estimators_parting_stderr"]) == is_caught


def test_a_horizon_inside_a_query_is_refused():
    with pytest.raises(InvalidInput, match="150"):
        measured(2.0**-10, 150)


def test_follow_up_scores_first_tokens_by_the_text_and_all_tokens_by_agreement():
    tokens = np.array([[1, 2, 3, 4], [1, 2, 9, 4]])  # two sessions, two queries of two tokens
    beliefs = np.tile(uniform_belief(2), (2, 2, 1))
    realized = np.array([[1, 2, 3, 4], [1, 2, 3, 5]])
    zeros = np.zeros((2, 4))
    found = Played(tokens, realized, tokens + 1, zeros + 1, zeros, beliefs)
    truth = np.array([[1, 3], [0, 3]])
    whole, late = follow_up(found, truth, 0, 4), follow_up(found, truth, 2, 4)
    assert (whole["accuracy_released"], late["accuracy_released"]) == (0.5, 0.5)
    assert (whole["accuracy_realized"], late["accuracy_realized"]) == (0.75, 1.0)
    assert (whole["agreement_realized"], late["agreement_realized"]) == (0.75, 0.5)
    assert whole["agreement_public"] == 0.0
    assert "accuracy_full" not in whole
