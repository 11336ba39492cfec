"""Errors of means whose samples come in clusters. Every generator is passed in; nothing here draws on its own."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy.arrays import FloatArray, IntArray
from paclm.privacy.leak import Estimate

RESAMPLES = 1000


def cluster_sums(values: npt.ArrayLike, clusters: IntArray) -> tuple[FloatArray, FloatArray]:
    """Sum and count of every cluster: the single source of truth for everything clustered."""
    samples: FloatArray = np.asarray(values, dtype=np.float64)
    if samples.shape != clusters.shape or samples.ndim != 1 or samples.size == 0:
        raise InvalidInput(f"There must be one cluster per sample, not {clusters.shape} for {samples.shape}.")
    _, index = np.unique(clusters, return_inverse=True)
    sums: FloatArray = np.bincount(index, weights=samples).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)


def cluster_bootstrap(
    values: npt.ArrayLike, clusters: IntArray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> FloatArray:
    """Means of resampled clusters, (resamples,): drawn whole, because samples inside are not independent."""
    sums, counts = cluster_sums(values, clusters)
    drawn = rng.integers(len(sums), size=(resamples, len(sums)))
    means: FloatArray = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return means


def clustered_mean(
    values: npt.ArrayLike, clusters: IntArray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """Mean and its standard error by the cluster bootstrap (NaN for a single cluster)."""
    sums, counts = cluster_sums(values, clusters)
    if len(sums) == 1:
        return Estimate(float(sums[0] / counts[0]), math.nan)
    spread = cluster_bootstrap(values, clusters, rng, resamples)
    return Estimate(float(sums.sum() / counts.sum()), float(spread.std(ddof=1)))
