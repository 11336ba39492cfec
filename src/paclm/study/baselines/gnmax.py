"""PATE's GNMax: every shard model votes for a token, Gaussian noise is added to the counts, the argmax is released.

One record moves one vote, so two counts change by one each: Rényi loss a/σ² per query for any votes. Where the votes
are nearly unanimous a data-dependent bound is far smaller (Theorem 6 of the 2018 PATE paper), but it is itself computed
from private votes.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.study.baselines.accountants import ORDERS, best_epsilon, rdp_for

GUARANTEE = "(ε, δ)-differential privacy, worst case (Gaussian noise on the counts)"
GUARANTEE_DEPENDENT = "data-dependent ε: computed from private votes, so not publishable as it is"


def independent_rdp(noise: float, orders: FloatArray) -> FloatArray:
    """a/σ², for any votes."""
    return orders / noise**2


def noise_for(epsilon: float, delta: float, queries: int) -> float:
    """The smallest σ with which this many queries stay within (ε, δ) for any votes, rounded up."""
    allowed = np.array([rdp_for(epsilon, delta, float(order)) for order in ORDERS])
    possible = allowed > 0.0
    if not possible.any():
        raise InvalidInput(f"No Rényi order reaches ε = {epsilon:g} at δ = {delta:g}. Raise either.")
    return float(np.sqrt((queries * ORDERS[possible] / allowed[possible]).min())) * (1.0 + 1e-12)


def log_miss_bound(counts: FloatArray, noise: float) -> FloatArray:
    """ln q ≥ ln P(the argmax is not released), by a union over the others: counts (…, candidates)."""
    best = counts.argmax(-1)
    gaps = np.take_along_axis(counts, best[..., None], -1) - counts  # (…, candidates)
    terms = log_ndtr(-gaps / (math.sqrt(2.0) * noise))
    np.put_along_axis(terms, best[..., None], -math.inf, -1)
    bound: FloatArray = np.minimum(np.logaddexp.reduce(terms, -1), math.log1p(-1.0 / counts.shape[-1]))
    return bound


def dependent_rdp(log_miss: float, noise: float, orders: FloatArray) -> FloatArray:
    """The Rényi loss when the argmax is missed with probability at most e^log_miss; never above a/σ²."""
    general = independent_rdp(noise, orders)
    second = noise * math.sqrt(-log_miss)  # μ2, and μ1 = μ2 + 1
    first = second + 1.0
    if second <= 1.0:
        return general
    loss_first, loss_second = first / noise**2, second / noise**2
    log_hit = math.log1p(-math.exp(log_miss))
    ratio = math.log(first / (first - 1.0) * second / (second - 1.0))
    is_valid = log_miss <= (second - 1.0) * loss_second - second * ratio
    shrunk = (log_miss + loss_second) * (1.0 - 1.0 / second)
    if not is_valid or shrunk >= 0.0:
        return general
    log_a = (orders - 1.0) * (log_hit - math.log1p(-math.exp(shrunk)))
    log_b = (orders - 1.0) * (loss_first - log_miss / (first - 1.0))
    bound = np.logaddexp(log_hit + log_a, log_miss + log_b) / (orders - 1.0)
    return np.where(first >= orders, np.minimum(np.maximum(bound, 0.0), general), general)


def dependent_epsilon(counts: FloatArray, noise: float, delta: float) -> float:
    """The data-dependent ε of releasing on these counts (queries, candidates)."""
    losses = np.zeros(ORDERS.shape)
    values, repeats = np.unique(log_miss_bound(counts, noise), return_counts=True)
    for log_miss, times in zip(values, repeats, strict=True):
        losses += times * dependent_rdp(float(log_miss), noise, ORDERS)
    return best_epsilon(losses, ORDERS, delta)


def release(counts: FloatArray, noise: float, rng: np.random.Generator) -> IntArray:
    """The candidate with the largest noisy count, per row."""
    if not (math.isfinite(noise) and noise > 0.0):
        raise InvalidInput(f"σ must be a positive number, not {noise!r}.")
    chosen: IntArray = (counts + rng.normal(0.0, noise, counts.shape)).argmax(-1)
    return chosen
