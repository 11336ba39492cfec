"""Rényi divergences, and Rényi differential privacy: conversion to (ε, δ), Poisson sampling, composition of pure DP.

Distributions are given by their logarithms, in float64. Losses bound what one neighbour (one shard model more or less)
can change. Losses of small queries are sums of small terms, so a budget of 1e-9 per query keeps its digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, logsumexp

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.privacy.bounds import nats_for


def log_sum_exp(terms: FloatArray) -> FloatArray:
    """ln Σ exp along the last axis."""
    total: FloatArray = logsumexp(terms, axis=-1)
    return total


def renyi_divergence(log_p: npt.ArrayLike, log_q: npt.ArrayLike, order: float) -> FloatArray:
    """D_a(P‖Q) = ln(Σ P^a Q^(1−a)) / (a−1) along the last axis; order inf is the largest log ratio, order 1 is KL."""
    if not order >= 1.0:
        raise InvalidInput(f"A Rényi order is a number of at least 1, or inf, not {order!r}.")
    p, q = np.broadcast_arrays(np.asarray(log_p, dtype=np.float64), np.asarray(log_q, dtype=np.float64))
    has_mass = p > -math.inf
    with np.errstate(invalid="ignore"):
        if order == math.inf:
            found = np.max(np.where(has_mass, p - q, -math.inf), axis=-1)
        elif order == 1.0:
            found = np.sum(np.where(has_mass, np.exp(p) * (p - q), 0.0), axis=-1)
        else:
            found = log_sum_exp(np.where(has_mass, order * p + (1.0 - order) * q, -math.inf)) / (order - 1.0)
    divergence: FloatArray = np.maximum(found, 0.0)  # rounding can leave it slightly below zero
    return divergence


def symmetric_divergence(log_p: npt.ArrayLike, log_q: npt.ArrayLike, order: float) -> FloatArray:
    """D↔_a: the larger of the two directions."""
    return np.maximum(renyi_divergence(log_p, log_q, order), renyi_divergence(log_q, log_p, order))


def check_whole_order(order: float) -> int:
    """Return the order as an int of at least 2: amplification by sampling is stated for whole orders."""
    if isinstance(order, bool) or int(order) != order or order < 2:
        raise InvalidInput(f"This accountant takes whole Rényi orders of at least 2, not {order!r}.")
    return int(order)


def mix(log_p: npt.ArrayLike, log_public: npt.ArrayLike, weight: npt.ArrayLike) -> FloatArray:
    """ln(λp + (1−λ)p0); the weight λ broadcasts against all axes but the last."""
    lam = np.asarray(weight, dtype=np.float64)[..., None]
    with np.errstate(divide="ignore"):
        mixed: FloatArray = np.logaddexp(np.log(lam) + np.asarray(log_p), np.log1p(-lam) + np.asarray(log_public))
    return mixed


Reading = Literal["rigorous", "generous"]

# Where a bound holds at every order, the best of these is taken.
ORDERS: FloatArray = np.concatenate([np.arange(1.1, 11.0, 0.1), np.arange(11.0, 64.0), 2.0 ** np.arange(6, 13)])

_HALVINGS = 60
_WIDEST = 100.0  # e^-100 is smaller than any budget


def epsilon_of(rdp: npt.ArrayLike, order: npt.ArrayLike, delta: float) -> FloatArray:
    """The ε of (ε, δ)-DP that a Rényi loss at one order implies: rdp + ln((a−1)/a) − (ln δ + ln a)/(a−1)."""
    _check_delta(delta)
    loss, a = np.asarray(rdp, dtype=np.float64), np.asarray(order, dtype=np.float64)
    return np.maximum(0.0, loss + np.log1p(-1.0 / a) - (math.log(delta) + np.log(a)) / (a - 1.0))


def best_epsilon(rdp: npt.ArrayLike, orders: npt.ArrayLike, delta: float) -> float:
    """The smallest ε over the orders of a curve."""
    return float(epsilon_of(rdp, orders, delta).min())


def rdp_for(epsilon: float, delta: float, order: float, reading: Reading = "rigorous") -> float:
    """The Rényi loss at one order that may be spent under (ε, δ).

    `rigorous` inverts `epsilon_of`, and is negative where the order cannot reach ε. `generous` takes ε itself as the
    Rényi loss, which allows more than (ε, δ): a comparison, not a guarantee.
    """
    if not epsilon > 0.0:
        raise InvalidInput(f"ε must be a positive number, not {epsilon!r}.")
    _check_delta(delta)
    if reading == "generous":
        return float(epsilon)
    if reading != "rigorous":
        raise InvalidInput(f"There is no reading {reading!r}. Choose rigorous or generous.")
    return epsilon - math.log1p(-1.0 / order) + (math.log(delta) + math.log(order)) / (order - 1.0)


def log_expm1(x: FloatArray) -> FloatArray:
    """ln(e^x − 1) for x ≥ 0 without overflow; −inf at 0."""
    with np.errstate(divide="ignore"):
        return np.where(x > 1.0, x + np.log1p(-np.exp(-np.maximum(x, 1.0))), np.log(np.expm1(np.minimum(x, 1.0))))


def sampled_rdp(order: int, rate: float, log_excess: FloatArray) -> FloatArray:
    """Rényi loss at a whole order of a mechanism run on a Poisson sample of its members.

    log_excess: (…, order − 1) ln(e^((k−1)·ε(k)) − 1) for k = 2 … order, ε(k) the loss without sampling. The weights sum
    to one, so the usual sum is 1 + Σ_k C(a,k)(1−q)^(a−k)q^k·(e^((k−1)ε(k)) − 1). This form is for mechanisms whose odd
    Pearson–Vajda moments are not negative, as the authors of PMixED use it.
    """
    order = check_whole_order(order)
    if log_excess.shape[-1:] != (order - 1,):
        raise InvalidInput(f"Order {order} needs the losses at 2 … {order}, not an array of shape {log_excess.shape}.")
    _check_rate(rate)
    if rate == 1.0:
        terms = log_excess[..., -1:]
    else:
        k = np.arange(2, order + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        terms = choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + log_excess
    return np.logaddexp(0.0, log_sum_exp(terms)) / (order - 1)


def pure_rdp(epsilon: float, orders: FloatArray) -> FloatArray:
    """The Rényi loss of any ε-DP mechanism is at most that of randomised response, at every order above 1."""
    bound = np.minimum(epsilon, 0.5 * orders * epsilon * epsilon)
    if epsilon < 1e-3:  # slightly above the exact value, whose sum would cancel
        return bound
    terms = np.stack([orders * epsilon, -(orders - 1.0) * epsilon], axis=-1) - np.logaddexp(0.0, epsilon)
    return np.minimum(bound, log_sum_exp(terms) / (orders - 1.0))


def sampled_pure(epsilon: float, rate: float) -> float:
    """The ε of an ε-DP mechanism run on a Poisson sample: ln(1 + q(e^ε − 1))."""
    _check_rate(rate)
    return float(np.log1p(rate * np.expm1(epsilon)))


def composed_pure(epsilon: float, queries: int, delta: float) -> float:
    """The ε that this many ε-DP queries compose to at δ: the sum, or less through Rényi losses."""
    return min(queries * epsilon, best_epsilon(queries * pure_rdp(epsilon, ORDERS), ORDERS, delta))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The smallest ε at δ that ρ-zCDP implies through Rényi losses αρ, over all real orders α > 1.

    Every order gives a valid ε, so a search that stops early errs to the safe side. At most the usual
    ρ + 2√(ρ ln 1/δ), and less by about a tenth where ρ is near 1.
    """
    if not rho >= 0.0:
        raise InvalidInput(f"ρ must be a number of at least 0, not {rho!r}.")
    if rho == 0.0:
        _check_delta(delta)
        return 0.0

    def at(log_excess: npt.ArrayLike) -> FloatArray:
        order = 1.0 + np.exp(np.asarray(log_excess, dtype=np.float64))
        return epsilon_of(rho * order, order, delta)

    near = 0.5 * math.log(-math.log(delta) / rho)  # where the usual conversion has its best order
    grid = near + np.linspace(-8.0, 8.0, 161)
    best = grid[int(np.argmin(at(grid)))]
    found = minimize_scalar(lambda x: float(at(x)), bounds=(best - 0.2, best + 0.2), method="bounded")
    return min(float(found.fun), float(at(best)))


def zcdp_for(epsilon: float, delta: float) -> float:
    """The largest ρ for which ρ-zCDP implies (ε, δ)-DP, from below."""
    if not epsilon > 0.0:
        raise InvalidInput(f"ε must be a positive number, not {epsilon!r}.")
    return float(largest(lambda rho: np.array(zcdp_epsilon(float(rho), delta) <= epsilon)))


def largest(holds: Callable[[FloatArray], BoolArray], shape: tuple[int, ...] = ()) -> FloatArray:
    """The largest x in (0, e^10] for which a monotone claim holds, rounded to the side where it does; 0 if nowhere.

    `holds` takes and returns arrays of the given shape; the logarithm is bisected to the last digits.
    """
    low, high = np.full(shape, -_WIDEST), np.full(shape, 10.0)
    start_holds, end_holds = holds(np.exp(low)), holds(np.exp(high))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        is_true = holds(np.exp(middle))
        low, high = np.where(is_true, middle, low), np.where(is_true, high, middle)
    return np.where(end_holds, np.exp(10.0), np.where(start_holds, np.exp(low), 0.0))


def success_at_half(epsilon: float, delta: float = 0.0) -> float:
    """The largest success of any attack on one record's membership, from even odds, under (ε, δ)-DP.

    >>> round(success_at_half(1.0, 1e-5), 7)
    0.7310613
    """
    if not (epsilon >= 0.0 and 0.0 <= delta < 1.0):
        raise InvalidInput(f"ε must be at least 0 and δ in [0, 1), not {epsilon!r} and {delta!r}.")
    return 1.0 - (1.0 - delta) / (1.0 + math.exp(epsilon)) if epsilon < 700.0 else 1.0


def matched_nats(epsilon: float, delta: float) -> float:
    """The total budget in nats whose bound at even odds is that of (ε, δ)-DP, from below.

    Equal bounds are not equal strength: DP holds for every data set and all prior knowledge, the nats for the stated
    draw of the world.
    """
    return nats_for(success_at_half(epsilon, delta), 0.5)


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise InvalidInput(f"δ must lie strictly between 0 and 1, not {delta!r}.")


def _check_rate(rate: float) -> None:
    if not 0.0 < rate <= 1.0:
        raise InvalidInput(f"A sampling rate must be above 0 and at most 1, not {rate!r}.")
