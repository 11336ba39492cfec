"""The belief: uniform start, exact update also where probabilities underflow, membership."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput, UnsoundState
from paclm.privacy.belief import membership_probabilities, normalise, uniform_belief, update_belief
from paclm.worlds.assignment import assign_worlds

log_weights = st.lists(st.floats(-600, 0), min_size=4, max_size=4).map(np.array)


def test_uniform_belief_sums_to_one_and_odd_or_too_few_worlds_are_refused():
    assert np.exp(uniform_belief(128)).sum() == pytest.approx(1.0, abs=1e-14)
    for num_worlds in (0, 1, 7, -2, True):
        with pytest.raises(InvalidInput, match=repr(num_worlds)):
            uniform_belief(num_worlds)


@given(weights=log_weights, likelihood=st.lists(st.floats(-2000, 0), min_size=2, max_size=2).map(np.array))
def test_update_is_bayes_rule(weights, likelihood):
    belief = normalise(weights)
    choice = np.array([0, 1, 1, 0])
    after = update_belief(belief, choice, likelihood, np.bincount(choice, weights=np.exp(belief)))
    expected = belief + likelihood[choice]
    expected -= np.logaddexp.reduce(expected)
    np.testing.assert_allclose(after, expected, atol=1e-9)


def test_update_survives_a_likelihood_that_only_an_underflowed_world_explains():
    belief = np.array([0.0, -900.0])
    after = update_belief(belief, np.array([0, 1]), np.array([-np.inf, 0.0]), np.exp(belief))
    np.testing.assert_array_equal(after, [-np.inf, 0.0])


def test_update_keeps_its_digits_where_the_evidence_is_a_denormal_number():
    belief = np.array([0.0, math.log(1e-320), math.log(1e-320)])
    belief = np.append(belief, -np.inf)
    choice = np.array([0, 1, 2, 0])
    likelihood = np.array([-np.inf, math.log(0.25), math.log(0.75)])
    after = update_belief(belief, choice, likelihood, np.bincount(choice, weights=np.exp(belief)))
    np.testing.assert_allclose(np.exp(after), [0.0, 0.25, 0.75, 0.0], rtol=1e-12)


def test_a_belief_without_a_possible_world_or_with_nan_or_inf_and_impossible_evidence_are_refused():
    for weights in ([-np.inf, -np.inf], [math.nan, 0.0], [np.inf, 0.0]):
        with pytest.raises(UnsoundState):
            normalise(np.array(weights))
    with pytest.raises(UnsoundState):
        update_belief(uniform_belief(2), np.array([0, 1]), np.array([-np.inf, -np.inf]), np.array([0.5, 0.5]))


def test_membership_is_one_half_at_the_start_and_certain_at_the_end():
    membership = assign_worlds(50, 16, seed=1)
    np.testing.assert_allclose(membership_probabilities(uniform_belief(16), membership), 0.5, atol=1e-12)
    certain = np.full(16, -np.inf)
    certain[3] = 0.0
    np.testing.assert_array_equal(membership_probabilities(certain, membership), membership[:, 3])


@pytest.mark.parametrize("membership", [np.ones((3, 4)), np.ones((3, 5), bool), np.ones(4, bool)])
def test_membership_of_the_wrong_kind_is_refused(membership):
    with pytest.raises(InvalidInput, match=re.escape(str(membership.shape))):
        membership_probabilities(uniform_belief(4), membership)
