"""Noise calibration against reference values, exact arithmetic and integration; mutants must be caught."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.privacy.belief import SUM_TOLERANCE
from paclm.privacy.calibration import FLOOR, Calibration, calibrate_noise, helmert
from reference.ambient import noise_covariance, vote_covariance
from reference.information import gaussian_bound, gaussian_information

SPLIT = np.array([100, 20, 8]) / 128
BUDGETS = [2.0**-60, 2.0**-40, 2.0**-32, 2.0**-16, 2.0**-8, 2.0**-4, 1.0, 2.0**4]


@st.composite
def masses(draw, sizes=(2, 3, 5, 17, 64), smallest=-300):
    """Masses behind distinct votes: balanced, skewed, down to 1e-300 and zero; they sum to one within the tolerance."""
    size = draw(st.sampled_from(sizes))
    mass = 10.0 ** np.array(draw(st.lists(st.floats(smallest, 0), min_size=size, max_size=size)))
    mass[draw(st.integers(0, size - 1))] = 1.0
    if smallest < -16 and draw(st.booleans()):
        mass[draw(st.integers(1, size - 1))] = 0.0
    return mass / mass.sum() * (1.0 + draw(st.floats(-1, 1)) * SUM_TOLERANCE)


def leak_bound(mass, per_token):
    return gaussian_bound(mass, *calibrate_noise(mass, per_token))


def solve(mass, per_token, floor):
    """The textbook calibration, by a general solver whose eigenvalues are raised by the floor."""
    basis = helmert(mass.size)
    eigenvalues, vectors = np.linalg.eigh((basis.T * mass) @ basis - np.outer(mass @ basis, mass @ basis))
    roots = np.sqrt(np.maximum(eigenvalues, 0.0) + floor)
    return Calibration(basis @ vectors, roots * roots.sum() / (2 * per_token))


def test_reference_split_has_the_published_spectrum_and_no_needless_noise():
    calibration = calibrate_noise(SPLIT, 2.0**-8)
    np.testing.assert_allclose(calibration.variances, [29.850074, 55.129759], atol=1e-6)
    assert calibration.scale == pytest.approx(math.sqrt(55.129759), rel=1e-7)
    assert leak_bound(SPLIT, 2.0**-32) >= 2.0**-32 * 0.999


@pytest.mark.parametrize(("exponent", "deviation"), [(-4, 2), (-8, 8), (-16, 128), (-24, 2048), (-32, 32768)])
def test_even_split_has_standard_deviation_one_over_twice_root_b(exponent, deviation):
    calibration = calibrate_noise(np.array([0.5, 0.5]), 2.0**exponent)
    assert calibration.scale == pytest.approx(deviation, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 7, 128])
def test_helmert_basis_is_orthonormal_and_blind_to_constants(size):
    basis = helmert(size)
    np.testing.assert_allclose(basis.T @ basis, np.eye(size - 1), atol=1e-14)
    np.testing.assert_allclose(basis.sum(axis=0), 0.0, atol=1e-13)


@pytest.mark.parametrize("counts", [[64, 64], [127, 1], [100, 20, 8], [40, 40, 30, 18], list(range(1, 16))])
def test_noise_covariance_equals_the_ambient_twin(counts):
    mass = np.array(counts) / sum(counts)
    axes, variances = calibrate_noise(mass, 2.0**-8)
    votes = np.repeat(np.arange(len(counts)), counts)
    twin = noise_covariance(vote_covariance(votes, np.full(len(votes), 1 / len(votes)), len(counts)), 2.0**-8)
    np.testing.assert_allclose((axes * variances) @ axes.T, twin, atol=1e-6 * variances.max())


@given(mass=masses(sizes=(3,), smallest=-12))
def test_three_masses_have_the_spectrum_of_a_general_solver(mass):
    axes, variances = calibrate_noise(mass, 2.0**-8)
    np.testing.assert_allclose(variances, solve(mass, 2.0**-8, FLOOR).variances, rtol=0.05, atol=1e-5)
    np.testing.assert_allclose(axes.T @ axes, np.eye(2), atol=1e-14)


@given(mass=masses(), per_token=st.sampled_from(BUDGETS))
def test_no_mass_lets_a_vote_leak_more_than_the_budget(mass, per_token):
    axes, variances = calibrate_noise(mass, per_token)
    assert np.isfinite(variances).all()
    assert (variances > 0).all()
    assert gaussian_bound(mass, axes, variances) <= per_token


@given(mass=masses(sizes=(2, 3), smallest=-6), exponent=st.integers(-12, 2))
def test_information_by_integration_is_within_the_budget(mass, exponent):
    assert gaussian_information(mass, *calibrate_noise(mass, 2.0**exponent)) <= 2.0**exponent * (1 + 1e-6)


@pytest.mark.parametrize(
    ("counts", "exponent", "share"),
    [([100, 20, 8], -8, 0.9979), ([100, 20, 8], -4, 0.9642), ([127, 1], -4, 0.618), ([127, 1], -2, 0.183)],
)
def test_information_has_the_published_share_of_the_budget(counts, exponent, share):
    mass = np.array(counts) / 128
    leaked = gaussian_information(mass, *calibrate_noise(mass, 2.0**exponent))
    assert leaked / 2.0**exponent == pytest.approx(share, abs=2e-3 if counts[1] == 1 else 6e-5)


def _mutant_dropped_factor_two(mass, per_token):
    axes, variances = calibrate_noise(mass, per_token)
    return Calibration(axes, variances / 2)


def _mutant_variance_as_deviation(mass, per_token):
    axes, variances = calibrate_noise(mass, per_token)
    return Calibration(axes, np.sqrt(variances))


def _mutant_floor_to_zero(mass, per_token):
    basis = helmert(mass.size)
    eigenvalues, vectors = np.linalg.eigh((basis.T * mass) @ basis - np.outer(mass @ basis, mass @ basis))
    roots = np.sqrt(np.where(eigenvalues < 1e-9, 0.0, eigenvalues))
    return Calibration(basis @ vectors, np.maximum(roots * roots.sum() / (2 * per_token), 1e-300))


def _mutant_prior_instead_of_belief(mass, per_token):
    return calibrate_noise(np.array([127, 1]) / 128, per_token)


@pytest.mark.parametrize(
    ("mutant", "mass"),
    [
        (_mutant_dropped_factor_two, SPLIT),
        (_mutant_variance_as_deviation, SPLIT),
        (_mutant_floor_to_zero, np.array([1.0 - 2e-10, 1e-10, 1e-10])),
        (_mutant_prior_instead_of_belief, np.array([0.5, 0.5])),
    ],
)
def test_each_wrong_calibration_is_caught_by_the_budget_check(mutant, mass):
    assert leak_bound(mass, 2.0**-8) <= 2.0**-8 * (1 + 1e-9)
    assert gaussian_bound(mass, *mutant(mass, 2.0**-8)) > 2.0**-8 * (1 + 1e-9)


@pytest.mark.parametrize("light", [1e-16, 10**-16.75, 1e-17, 1e-20])
def test_masses_near_the_rounding_of_a_solver_get_enough_noise(light):
    """A floor of 1e-17 instead of 1e-14 would let these leak several times the budget."""
    mass = np.array([1.0, light, light])
    assert leak_bound(mass, 2.0**-32) <= 2.0**-32
    assert light != 10**-16.75 or gaussian_bound(mass, *solve(mass, 2.0**-32, 1e-17)) > 2.0**-32


@pytest.mark.parametrize("light", [2e-14, 1.8e-13, 1e-12])
@pytest.mark.parametrize("size", [3, 5])
def test_masses_that_sum_to_a_little_more_than_one_get_enough_noise(size, light):
    """A heavy mass above one would cancel the variance of light ones and leak up to ten times the budget."""
    mass = np.array([1.0 - (size - 1) * light, *[light] * (size - 1)]) * (1.0 + 9e-13)
    assert leak_bound(mass, 2.0**-60) <= 2.0**-60
    assert light == 1e-12 or gaussian_bound(mass, *solve(mass, 2.0**-60, FLOOR)) > 1.2 * 2.0**-60


def test_as_many_distinct_votes_as_worlds_stay_within_the_budget():
    assert leak_bound(np.random.default_rng(0).dirichlet(np.full(128, 0.3)), 2.0**-32) <= 2.0**-32


def test_a_mass_that_underflows_still_gets_noise():
    variance = calibrate_noise(np.array([1.0, 0.0]), 2.0**-32).variances[0]
    assert variance == pytest.approx(FLOOR / (2 * 2.0**-32))
    assert math.isfinite(variance)
