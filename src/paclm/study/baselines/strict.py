"""PMixED without the gaps of its accountant: a ball in the largest log ratio, one radius for every query.

With |ln m_i/p0| ≤ c for every mollified model, two averages that differ in one of n members differ by a factor of at
most (n−1)/n + e^(2c)/n, and the lone member from the public model by at most e^c. Both are at most (1 + e^(2c))/2, so
one bound serves every sample, and amplification and composition are those of pure differential privacy: no moment
condition, no order, and nothing that depends on how many were sampled. Neighbours differ by one shard model; q, T, N
and c are public.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paclm.privacy.belief import BoolArray, FloatArray
from paclm.study.baselines.accountants import composed_pure, largest, sampled_pure

_SAFETY = 1e-12


def query_epsilon(log_ratio: float, rate: float, num_shards: int) -> float:
    """The pure ε of one query when every mollified model stays within the log ratio c of the public one.

    Without sampling all N take part and N−1 without the neighbour, so the factor is (N−1)/N + e^(2c)/N.
    """
    members = num_shards if rate == 1.0 else 2
    one_more = float(np.log1p(math.expm1(2.0 * log_ratio) / members))
    return sampled_pure(one_more, rate)


def log_ratio_for(epsilon: float, delta: float, queries: int, rate: float, num_shards: int) -> float:
    """The largest c for which so many queries compose to at most (ε, δ), from below."""
    goal = epsilon * (1.0 - _SAFETY)

    def holds(c: FloatArray) -> BoolArray:
        # Past c = 300 the factor e^(2c) leaves float64; no budget comes near it.
        each = float(c)
        fits = each < 300.0 and composed_pure(query_epsilon(each, rate, num_shards), queries, delta) <= goal
        return np.array(fits)

    return float(largest(holds))


def mixing_weight(log_p: npt.ArrayLike, log_public: npt.ArrayLike, log_ratio: npt.ArrayLike) -> FloatArray:
    """λ for distributions (…, V): the largest with |ln(λp + (1−λ)p0) − ln p0| ≤ c for every token, in closed form."""
    difference = np.asarray(log_p, dtype=np.float64) - np.asarray(log_public, dtype=np.float64)
    return weight_within(difference.max(axis=-1), difference.min(axis=-1), log_ratio)


def weight_within(largest_ratio: FloatArray, smallest_ratio: FloatArray, log_ratio: npt.ArrayLike) -> FloatArray:
    """The same from the largest and smallest ln p/p0 of each row: 1 + λ(r−1) is monotone in r."""
    c = np.asarray(log_ratio, dtype=np.float64) * (1.0 - _SAFETY)
    with np.errstate(divide="ignore", over="ignore"):
        upper = np.expm1(c) / np.expm1(np.maximum(largest_ratio, 0.0))
        lower = np.expm1(-c) / np.expm1(np.minimum(smallest_ratio, 0.0))
    weight: FloatArray = np.clip(np.nan_to_num(np.fmin(upper, lower), nan=1.0, posinf=1.0), 0.0, 1.0)
    return weight
