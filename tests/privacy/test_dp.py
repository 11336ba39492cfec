"""The account of DP training, against reference values, closed forms and a simulated attack."""

import math
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from paclm.errors import InvalidInput, MissingExtra
from paclm.privacy.dp import DpMechanism, calibrate_noise, default_delta, guarantee, tpr_bound

DELTA = 1e-5
TRIAL = DpMechanism(0.5, 2.064, 40)
FPRS = np.array([0.001, 0.01, 0.1, 0.3])


def gaussian_delta(epsilon, noise):
    """δ(ε) of one normal release of sensitivity 1, in closed form."""
    return norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * norm.cdf(-0.5 / noise - epsilon * noise)


def gaussian_epsilon(delta, noise):
    return brentq(lambda epsilon: gaussian_delta(epsilon, noise) - delta, 0.0, 500.0, xtol=1e-12)


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "noise"),
    [
        (0.5, 40, 8.0, 2.064),
        (0.5, 40, 2.0, 6.458),
        (0.5, 60, 8.0, 2.466),
        (0.5, 60, 2.0, 7.848),
        (0.25, 40, 8.0, 1.235),
        (0.25, 40, 2.0, 3.404),
    ],
)
def test_calibrated_noise_is_the_reference_value_and_never_gives_more_than_epsilon(rate, steps, epsilon, noise):
    sigma = calibrate_noise(epsilon, DELTA, rate, steps)
    assert noise <= sigma <= noise * 1.001  # rounded up
    assert guarantee([DpMechanism(rate, sigma, steps)], DELTA).epsilon <= epsilon
    assert guarantee([DpMechanism(rate, sigma * 0.998, steps)], DELTA).epsilon > epsilon  # the smallest, nearly


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps"),
    [
        (0.001, 1e-5, 0.5, 40),
        (0.05, 1e-10, 0.01, 10),
        (100.0, 1e-5, 1.0, 3),
        (3.0, 1e-8, 0.05, 500),
        (8.0, 1e-5, 0.02, 300),
        (4.0, 0.01, 1.0, 1),
    ],
)
def test_calibration_holds_at_the_ends_of_what_is_allowed(epsilon, delta, rate, steps):
    sigma = calibrate_noise(epsilon, delta, rate, steps)
    assert 0.98 * epsilon <= guarantee([DpMechanism(rate, sigma, steps)], delta).epsilon <= epsilon


def test_figures_of_the_trial_are_those_of_the_specification():
    found = guarantee([TRIAL], DELTA)
    assert found.mia_bound == pytest.approx(0.778, abs=5e-4)
    assert found.mia_bound < 0.9997  # what ε alone would give
    assert (found.tpr_at_fpr_0_1_percent, found.tpr_at_fpr_1_percent) == tuple(tpr_bound([TRIAL], [0.001, 0.01]))


@pytest.mark.parametrize(("noise", "steps"), [(5.0, 40), (1.0, 1), (40.0, 100)])
def test_without_sampling_the_account_is_the_closed_form_rounded_up(noise, steps):
    mechanism, one = DpMechanism(1.0, noise, steps), noise / math.sqrt(steps)
    for delta in (1e-3, 1e-5, 1e-10):
        exact = gaussian_epsilon(delta, one)
        assert exact <= guarantee([mechanism], delta).epsilon <= exact * 1.001 + 1e-6
    found = guarantee([mechanism], DELTA)
    exact = (1 + gaussian_delta(0.0, one)) / 2
    assert exact <= found.mia_bound <= exact + 1e-4
    curve = norm.cdf(norm.ppf(FPRS) + 1 / one)
    bound = tpr_bound([mechanism], FPRS)
    assert (curve <= bound).all()
    assert (bound <= curve + 2e-4).all()


@pytest.mark.parametrize("rate", [0.5, 0.01])
def test_one_sampled_step_is_the_closed_form_rounded_up(rate):
    """Amplification of removing a unit: δ(ε) = q·δ_normal(ln(1 + (e^ε − 1)/q))."""
    noise = 0.8
    exact = brentq(lambda e: rate * gaussian_delta(math.log1p(math.expm1(e) / rate), noise) - DELTA, 0.0, 50.0)
    assert exact <= guarantee([DpMechanism(rate, noise, 1)], DELTA).epsilon <= exact + 1e-3


def test_adding_and_removing_a_unit_are_both_covered():
    """One step at q = 1/2: adding is the smaller loss, bounded by ln 2; an account of it alone would say so."""
    assert guarantee([DpMechanism(0.5, 0.5, 1)], DELTA).epsilon > math.log(2)


def simulated_tpr(mechanism, num_trials, generator):
    """An optimal attack on real draws: the likelihood ratio of all steps, at each FPR; (f,), standard error.

    A second computation of the trade-off, without PLDs.
    """
    q, sigma = mechanism.sampling_rate, mechanism.noise_multiplier

    def losses(is_member):
        total = np.zeros(num_trials)
        for _ in range(mechanism.steps):
            drawn = sigma * generator.standard_normal(num_trials)
            if is_member:
                drawn += generator.random(num_trials) < q
            total += np.log1p(q * np.expm1((drawn - 0.5) / sigma**2))
        return total

    outside, inside = losses(False), losses(True)
    tpr = np.array([(inside > np.quantile(outside, 1 - fpr)).mean() for fpr in FPRS])
    # of the threshold and of the rate; the curve's slope is at most TPR/FPR below the point
    stderr = np.sqrt((tpr * (1 - tpr) + (tpr / FPRS) ** 2 * FPRS * (1 - FPRS)) / num_trials)
    return tpr, stderr


def test_the_best_attack_reaches_the_curve_and_does_not_pass_it():
    """Seeded; for fresh seeds each of the eight comparisons fails with probability below 1e-6 (5 standard errors)."""
    tpr, stderr = simulated_tpr(TRIAL, 200_000, np.random.default_rng(7))
    bound = tpr_bound([TRIAL], FPRS)
    assert (tpr <= bound + 5 * stderr).all()
    assert (tpr >= bound - 5 * stderr - 1e-3).all()


def test_the_attack_passes_the_curve_of_noise_that_was_only_claimed():
    halved = DpMechanism(TRIAL.sampling_rate, TRIAL.noise_multiplier / 2, TRIAL.steps)
    tpr, stderr = simulated_tpr(halved, 50_000, np.random.default_rng(7))
    assert (tpr > tpr_bound([TRIAL], FPRS) + 5 * stderr).all()


def test_trainings_add_up_in_any_order_and_more_than_each_alone():
    other = DpMechanism(0.25, 3.404, 60)
    both, reversed_ = guarantee([TRIAL, other], DELTA), guarantee([other, TRIAL], DELTA)
    assert both.epsilon == pytest.approx(reversed_.epsilon, rel=1e-9)
    alone = [guarantee([one], DELTA) for one in (TRIAL, other)]
    assert max(one.epsilon for one in alone) < both.epsilon < sum(one.epsilon for one in alone)
    assert both.mia_bound > max(one.mia_bound for one in alone)
    assert both.tpr_at_fpr_0_1_percent > max(one.tpr_at_fpr_0_1_percent for one in alone)


def test_two_equal_trainings_are_one_of_twice_the_steps():
    twice = DpMechanism(TRIAL.sampling_rate, TRIAL.noise_multiplier, 2 * TRIAL.steps)
    assert guarantee([TRIAL, TRIAL], DELTA).epsilon == pytest.approx(guarantee([twice], DELTA).epsilon, rel=1e-6)


def test_very_different_trainings_add_up_without_understatement():
    weak, strong = DpMechanism(1.0, 2000.0, 10), DpMechanism(1.0, 1.0, 4)
    exact = gaussian_epsilon(DELTA, (10 / 2000.0**2 + 4) ** -0.5)
    assert exact <= guarantee([weak, strong], DELTA).epsilon <= exact * 1.001


def test_the_curve_is_monotone_and_a_probability_everywhere():
    curve = tpr_bound([TRIAL], np.linspace(0, 1, 101))
    assert (np.diff(curve) >= -1e-9).all()
    assert 0 <= curve[0] < 1e-6
    assert curve[-1] == 1
    assert (curve >= np.linspace(0, 1, 101)).all()


def test_default_delta():
    assert default_delta(2088) == pytest.approx(2088**-1.1)
    with pytest.raises(InvalidInput):
        default_delta(1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: calibrate_noise(0.0, DELTA, 0.5, 40),
        lambda: calibrate_noise(math.inf, DELTA, 0.5, 40),
        lambda: calibrate_noise(math.nan, DELTA, 0.5, 40),
        lambda: calibrate_noise(8.0, 0.0, 0.5, 40),
        lambda: calibrate_noise(8.0, 0.5, 0.5, 40),
        lambda: calibrate_noise(8.0, DELTA, 0.0, 40),
        lambda: calibrate_noise(8.0, DELTA, 1.5, 40),
        lambda: calibrate_noise(8.0, DELTA, 0.5, 0),
        lambda: guarantee([], DELTA),
        lambda: guarantee([TRIAL], 0.0),
        lambda: tpr_bound([TRIAL], [1.5]),
        lambda: DpMechanism(0.5, 0.0, 40),
        lambda: DpMechanism(0.5, math.nan, 40),
    ],
)
def test_what_has_no_account_is_refused(call):
    with pytest.raises(InvalidInput):
        call()


def test_without_the_extra_the_command_that_installs_it_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "dp_accounting"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra) as caught:
        guarantee([DpMechanism(0.5, 3.21, 3)], DELTA)  # not composed before, so not cached
    assert "[dp]" in str(caught.value)
