"""An audit of DP training: scores of trainings with and without a canary unit, against the curve that is promised.

A score is any number computed from a trained adapter, higher where the canary seems to be in. No threshold on it may
find more canaries (true positives) at its false-positive rate than the trade-off curve allows. Two tests:

    curve     over all thresholds at once. Rates are within the Dvoretzky–Kiefer–Wolfowitz band of the truth; an alarm
              needs the whole band above the curve
    epsilon   the empirical ε at one threshold, chosen on one half of the scores and judged on the other, by
              Clopper–Pearson: (ε, δ)-DP means TPR ≤ e^ε · FPR + δ, and 1 − FPR ≤ e^ε · (1 − TPR) + δ

Sound training raises an alarm with probability FALSE_ALARMS at most, in each of the two. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.stats import beta

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray

FALSE_ALARMS = 0.01
_FEWEST = 20  # scores on each side
_CHOICES = 200  # thresholds that are tried on the first half


class CurveTest(NamedTuple):
    """Where the rates are farthest above the promised curve."""

    band: float  # half-width, of either rate
    false_positives: float  # measured
    true_positives: float
    bound: float  # the curve at false_positives + band
    excess: float  # true_positives − band − bound; above 0: alarm

    @property
    def is_alarm(self) -> bool:
        return self.excess > 0.0


def rates(with_canary: FloatArray, without: FloatArray) -> tuple[FloatArray, FloatArray]:
    """False- and true-positive rates when scores of at least t are called "in", over all t, from none to all."""
    if min(len(with_canary), len(without)) < _FEWEST:
        raise InvalidInput(f"An audit needs at least {_FEWEST} trainings on each side.")
    if not (np.isfinite(with_canary).all() and np.isfinite(without).all()):
        raise InvalidInput("Every score must be a finite number.")
    thresholds = np.unique(np.concatenate([with_canary, without]))[::-1]
    sides = (np.sort(side) for side in (without, with_canary))
    false, true = (1.0 - side.searchsorted(thresholds, side="left") / side.size for side in sides)
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def check_curve(
    with_canary: FloatArray, without: FloatArray, tpr_bound: Callable[[FloatArray], FloatArray]
) -> CurveTest:
    """Compare all thresholds with the curve; `tpr_bound` maps false-positive rates to the largest true-positive one."""
    false, true = rates(with_canary, without)
    band = max(math.sqrt(math.log(2.0 / FALSE_ALARMS) / (2.0 * len(side))) for side in (with_canary, without))
    bound = tpr_bound(np.minimum(1.0, false + band))
    worst = int((true - bound).argmax())
    return CurveTest(
        band, float(false[worst]), float(true[worst]), float(bound[worst]), float(true[worst] - band - bound[worst])
    )


def empirical_epsilon(with_canary: FloatArray, without: FloatArray, delta: float) -> float:
    """A lower bound on the ε of the training at this δ that is wrong with probability FALSE_ALARMS at most."""
    rates(with_canary, without)  # checks
    (first_in, second_in), (first_out, second_out) = ((side[::2], side[1::2]) for side in (with_canary, without))
    thresholds = np.quantile(np.concatenate([first_in, first_out]), np.linspace(0.002, 0.998, _CHOICES))
    best = max(thresholds, key=lambda t: _epsilon_at(first_in, first_out, float(t), delta))
    return _epsilon_at(second_in, second_out, float(best), delta)


def _epsilon_at(with_canary: FloatArray, without: FloatArray, threshold: float, delta: float) -> float:
    hits, alarms = int((with_canary >= threshold).sum()), int((without >= threshold).sum())
    lowest_true, most_false = _at_least(hits, len(with_canary)), _at_most(alarms, len(without))
    found = [0.0]
    for numerator, denominator in ((lowest_true, most_false), (1.0 - most_false, 1.0 - lowest_true)):
        if numerator > delta:
            found.append(math.log((numerator - delta) / denominator))
    return max(found)


def _at_least(hits: int, trials: int) -> float:
    return float(beta.ppf(FALSE_ALARMS / 2, hits, trials - hits + 1)) if hits else 0.0


def _at_most(hits: int, trials: int) -> float:
    return float(beta.ppf(1.0 - FALSE_ALARMS / 2, hits + 1, trials - hits)) if hits < trials else 1.0
