"""Account of DP training: how much noise (ε, δ) needs, and what a number of trainings promises together.

One training takes T steps; each samples every unit with probability q, clips its gradient to norm C, and adds normal
noise of scale σ·C to the sum. Neighbouring corpora differ in one unit, added or removed. The privacy loss distribution
(PLD) of all steps is computed by `dp_accounting` on a grid, rounded so that ε and δ are never understated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal, localcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paclm.errors import InvalidInput, MissingExtra, UnsoundState
from paclm.privacy.belief import FloatArray

LEAST_EPSILON, MOST_EPSILON = 1e-3, 100.0
LEAST_DELTA, MOST_DELTA = 1e-10, 0.125

_FOURIER_ERROR = 1e-12  # more than the transforms of a composition lose of δ
_SUM_ERROR = 1e-9  # more than sums over the grid lose of a probability
_CURVE_POINTS = 2000
_DIGITS = 4  # significant digits of a calibrated σ


@dataclass(frozen=True, slots=True)
class DpMechanism:
    """What one training does: `steps` sums of clipped gradients, Poisson sampled, with noise."""

    sampling_rate: float
    """q."""
    noise_multiplier: float
    """σ: the noise's standard deviation, in units of the clipping norm."""
    steps: int
    """T."""

    def __post_init__(self) -> None:
        if not 0 < self.sampling_rate <= 1:
            raise InvalidInput(f"sampling_rate must be above 0 and at most 1, not {self.sampling_rate!r}.")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise InvalidInput(f"noise_multiplier must be a positive number, not {self.noise_multiplier!r}.")
        if self.steps < 1:
            raise InvalidInput(f"steps must be at least 1, not {self.steps!r}.")

    @property
    def _step_loss(self) -> float:
        """About the standard deviation of one step's privacy loss."""
        inverse = 1.0 / self.noise_multiplier
        return min(inverse, self.sampling_rate * math.sqrt(math.expm1(min(inverse**2, 100.0))))


@dataclass(frozen=True, slots=True)
class DpGuarantee:
    """What trainings promise together about whether one unit is in the corpus."""

    epsilon: float
    delta: float
    mia_bound: float
    """Largest success of any membership inference at prior 1/2: (1 + δ(0))/2, δ(0) the total variation."""
    tpr_at_fpr_0_1_percent: float
    """Largest share of members that an attack recognizes while it accuses 0.1 % of the others."""
    tpr_at_fpr_1_percent: float


def default_delta(num_units: int) -> float:
    """n^−1.1: less than one unit in n."""
    if num_units < 2:
        raise InvalidInput(f"δ needs at least 2 units, not {num_units!r}. Bring more records.")
    return math.pow(num_units, -1.1)


def check_epsilon(epsilon: float) -> float:
    """Refuse an ε that noise cannot reach, or that promises nothing."""
    if not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
        raise InvalidInput(
            f"epsilon must lie between {LEAST_EPSILON:g} and {MOST_EPSILON:g}, not {epsilon!r}. Usual values are 1 "
            "to 8."
        )
    return epsilon


def check_delta(delta: float) -> float:
    """Refuse a δ that arithmetic cannot resolve, or that is no promise."""
    if not LEAST_DELTA <= delta <= MOST_DELTA:
        raise InvalidInput(
            f"delta must lie between {LEAST_DELTA:g} and {MOST_DELTA:g}, not {delta!r}. It should be below one over "
            "the number of units."
        )
    return delta


@cache
def calibrate_noise(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """The smallest σ, rounded up, with which one training is (ε, δ)-DP.

    Searched on a coarse grid first: both grids overstate ε, so that neither gives too little noise.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    start = DpMechanism(sampling_rate, max(1.0, sampling_rate * math.sqrt(steps)), steps)

    def suffices(sigma: float, coarseness: float) -> bool:
        tried = replace(start, noise_multiplier=sigma)
        return _epsilon(_compose((tried,), coarseness), delta) <= epsilon

    def search(low: float, high: float, coarseness: float, ratio: float) -> float:
        """`high` always suffices."""
        while high / low > ratio:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if suffices(middle, coarseness) else (middle, high)
        return high

    high = start.noise_multiplier
    while not suffices(high, 5):
        high *= 2
    low = high / 2
    while suffices(low, 5):
        low, high = low / 2, low
    high = search(low, high, 5, 1.01)
    low = high / 1.03
    while suffices(low, 1):
        low, high = low / 1.03, low
    sigma = _round_up(search(low, high, 1, 1.00005))
    if not suffices(sigma, 1):
        raise UnsoundState(f"Calibrated noise, σ = {sigma}, does not reach ε = {epsilon}. Nothing may be trained.")
    return sigma


def guarantee(mechanisms: Sequence[DpMechanism], delta: float) -> DpGuarantee:
    """What these trainings over the same units promise together, whatever order they ran in."""
    check_delta(delta)
    composed = _compose(tuple(mechanisms))
    fprs = (0.001, 0.01)
    low, high = (float(tpr) for tpr in _tpr(composed, np.array(fprs)))
    total_variation = min(1.0, float(composed.get_delta_for_epsilon(0.0)) + _SUM_ERROR)
    return DpGuarantee(_epsilon(composed, delta), delta, (1.0 + total_variation) / 2.0, low, high)


def tpr_bound(mechanisms: Sequence[DpMechanism], fpr: ArrayLike) -> FloatArray:
    """The trade-off curve: the largest true-positive rate of any attack at each false-positive rate.

    min over ε' ≥ 0 of e^ε'·α + δ(ε') and of 1 − e^−ε'·(1 − α − δ(ε')), δ the larger of adding and removing a unit.
    """
    rates = np.asarray(fpr, dtype=np.float64)
    if not ((rates >= 0) & (rates <= 1)).all():
        raise InvalidInput("A false-positive rate must lie between 0 and 1.")
    return _tpr(_compose(tuple(mechanisms)), rates)


def _tpr(composed: Any, fpr: FloatArray) -> FloatArray:
    farthest = composed.get_epsilon_for_delta(1e-9)
    epsilons = np.linspace(0.0, min(farthest, 700.0), _CURVE_POINTS)  # fewer points only loosen the bound
    deltas = composed.get_delta_for_epsilon(epsilons) + _SUM_ERROR  # (e,)
    alpha = fpr[..., None]  # (…, 1)
    tpr = np.minimum(np.exp(epsilons) * alpha + deltas, 1.0 - np.exp(-epsilons) * (1.0 - alpha - deltas))  # (…, e)
    bound: FloatArray = np.minimum(tpr.min(axis=-1), 1.0)
    return bound


def _epsilon(composed: Any, delta: float) -> float:
    return float(composed.get_epsilon_for_delta(delta - _FOURIER_ERROR))


@lru_cache(maxsize=8)
def _compose(mechanisms: tuple[DpMechanism, ...], coarseness: float = 1.0) -> Any:
    """The PLD of all mechanisms together, for adding and for removing a unit; a grid point's mass is rounded up."""
    try:
        from dp_accounting.pld import privacy_loss_distribution as pld
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "dp_accounting":
            raise
        raise MissingExtra("dp_accounting") from None
    if not mechanisms:
        raise InvalidInput("There is no DP training to account for.")
    losses = [mechanism._step_loss for mechanism in mechanisms]
    total = math.sqrt(sum(m.steps * loss**2 for m, loss in zip(mechanisms, losses, strict=True)))
    interval = coarseness * max(min(losses) / 50, total / 5000)  # ε within about 0.05 %, in about a second
    composed = pld.identity(value_discretization_interval=interval)
    for mechanism in mechanisms:
        step = pld.from_gaussian_mechanism(
            standard_deviation=mechanism.noise_multiplier,
            sampling_prob=mechanism.sampling_rate,
            pessimistic_estimate=True,
            value_discretization_interval=interval,
            neighboring_relation=pld.NeighborRel.ADD_OR_REMOVE_ONE,
        )
        composed = composed.compose(step.self_compose(mechanism.steps))
    return composed


def format_up(value: float) -> str:
    """ε or δ with four significant digits, rounded up."""
    return f"{_round_up(value):g}" if 0 < value < math.inf else f"{value:g}"


def _round_up(value: float) -> float:
    with localcontext(prec=_DIGITS, rounding=ROUND_CEILING):
        return float(+Decimal(repr(float(value))))
