"""Rényi divergences of distributions given by their logarithms, in float64 and log-space. Knows no mechanism."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray


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
