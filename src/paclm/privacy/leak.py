"""Estimates of the leak: I(S; H_T) = log m − E[H(P_T)] (`prop:mi-identity`), and also log m + E[log P_T(S)].

Both estimate the same number if the belief is the exact posterior. Where they differ, the noise is not what the belief
assumes. They are estimates with sampling error, not a guarantee.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, check_beliefs


class Estimate(NamedTuple):
    """A mean over independent sessions and its standard error (NaN for a single session)."""

    mean: float
    stderr: float


def mean_and_stderr(samples: npt.ArrayLike) -> Estimate:
    """Mean and standard error of independent samples."""
    values: FloatArray = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise InvalidInput(f"A mean needs at least one sample in one dimension, not shape {values.shape}.")
    stderr = math.nan if values.size == 1 else float(values.std(ddof=1) / math.sqrt(values.size))
    return Estimate(float(values.mean()), stderr)


def leak_by_entropy(beliefs: npt.ArrayLike) -> Estimate:
    """log m − mean entropy, from the final beliefs of independent sessions, (sessions, m)."""
    return mean_and_stderr(leak_samples_by_entropy(beliefs))


def leak_by_truth(beliefs: npt.ArrayLike, secrets: npt.ArrayLike) -> Estimate:
    """log m + mean log belief in the realized world, from final beliefs (sessions, m) and secrets (sessions,)."""
    return mean_and_stderr(leak_samples_by_truth(beliefs, secrets))


def leak_samples_by_entropy(beliefs: npt.ArrayLike) -> FloatArray:
    """log m − H(P) of each belief (n, m), as a sum of small terms: leaks of 1e-12 nats keep their digits."""
    table = check_beliefs(beliefs)
    p = np.exp(table)
    leaks: FloatArray = np.vecdot(p, np.where(p > 0.0, table + math.log(table.shape[1]), 0.0))  # (n,)
    return leaks


def leak_samples_by_truth(beliefs: npt.ArrayLike, secrets: npt.ArrayLike) -> FloatArray:
    """log m + log P(S) of each belief (n, m) and its secret (n,)."""
    table: FloatArray = np.asarray(beliefs, dtype=np.float64)
    realized = np.asarray(secrets)
    if realized.shape != table.shape[:1]:
        raise InvalidInput(f"There must be one secret per belief, not {realized.shape} for {table.shape}.")
    leaks: FloatArray = math.log(table.shape[1]) + table[np.arange(len(table)), realized]  # (n,)
    return leaks
