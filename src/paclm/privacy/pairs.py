"""The Gaussian release for many independent sessions at once, where each has exactly two distinct votes.

This is `gaussian.release` bit for bit, three disputed tokens in four, with the work of all sessions in one array
operation: the same calibration, the same draws, the same sums in the same order. For studies; serving has one secret.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paclm.privacy.belief import SAFE_MASS, BoolArray, FloatArray, IntArray, normalise
from paclm.privacy.calibration import helmert, pair_variance


class PairSteps(NamedTuple):
    """The result of one release per session."""

    tokens: IntArray  # (n,)
    beliefs: FloatArray  # (n, m)
    noise_scales: FloatArray  # (n,)


def has_two_votes(votes: IntArray) -> BoolArray:
    """Which rows of (n, m) votes hold exactly two distinct values."""
    is_extreme = (votes == votes.min(axis=1, keepdims=True)) | (votes == votes.max(axis=1, keepdims=True))
    two: BoolArray = is_extreme.all(axis=1) & (votes != votes[:, :1]).any(axis=1)
    return two


def release_pairs(
    votes: IntArray, beliefs: FloatArray, secrets: IntArray, per_token: float, normals: FloatArray
) -> PairSteps:
    """Release one token per session: votes and beliefs (n, m), secrets (n,), one N(0, 1) draw each (n,)."""
    n = len(votes)
    rows = np.arange(n)
    low, high = votes.min(axis=1), votes.max(axis=1)  # (n,)
    choice = (votes == high[:, None]).astype(np.int64)  # (n, m)
    bins = (choice + 2 * rows[:, None]).ravel()
    mass: FloatArray = np.bincount(bins, np.exp(beliefs).ravel(), 2 * n).astype(np.float64, copy=False).reshape(n, 2)
    variance = pair_variance(mass[:, 0], mass[:, 1], per_token)  # (n,)
    axis = helmert(2)[:, 0]  # (2,)
    R = axis[choice[rows, secrets]] + np.sqrt(variance) * normals  # (n,)
    tokens = np.where(R >= 0.0, low, high)  # argmax of (R, −R)/√2, ties to the smaller token
    log_likelihood = (R[:, None] - axis) ** 2 * (-0.5 / variance)[:, None]  # (n, 2)
    top = log_likelihood.max(axis=1, keepdims=True)
    # Python's exp and log, as in `update_belief`: numpy's differ in the last bit.
    weights = np.array([math.exp(x) for x in (log_likelihood - top).ravel().tolist()]).reshape(n, 2)
    evidence = (mass * weights).sum(axis=1)  # (n,)
    is_safe = evidence > SAFE_MASS
    log_evidence = np.array([math.log(x) for x in np.where(is_safe, evidence, 1.0).tolist()])
    after = beliefs + np.take_along_axis(log_likelihood - (top + log_evidence[:, None]), choice, axis=1)
    for row in np.flatnonzero(~is_safe):
        after[row] = normalise(beliefs[row] + log_likelihood[row][choice[row]])
    return PairSteps(tokens, after, np.sqrt(variance))
