"""Errors of means whose samples come in clusters. Every random generator is passed in."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import Estimate, mean_and_stderr

RESAMPLES = 1000


def cluster_sums(values: npt.ArrayLike, clusters: IntArray) -> tuple[FloatArray, FloatArray]:
    """Sum and count of every cluster: the one definition that all clustered statistics use."""
    samples: FloatArray = np.asarray(values, dtype=np.float64)
    if samples.shape != clusters.shape or samples.ndim != 1 or samples.size == 0:
        raise InvalidInput(f"There must be one cluster per sample, not {clusters.shape} for {samples.shape}.")
    _, index = np.unique(clusters, return_inverse=True)
    sums: FloatArray = np.bincount(index, weights=samples).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)


def cluster_bootstrap(
    values: npt.ArrayLike, clusters: IntArray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> FloatArray:
    """Means of resampled clusters, (resamples,). Clusters are drawn whole: samples inside are not independent."""
    sums, counts = cluster_sums(values, clusters)
    drawn = rng.integers(len(sums), size=(resamples, len(sums)))
    means: FloatArray = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return means


def clustered_mean(
    values: npt.ArrayLike, clusters: IntArray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """Mean and its standard error by the cluster bootstrap (NaN for a single cluster).

    A few clusters may agree by chance, so the spread is corrected for their number and never below the error of
    independent samples.
    """
    sums, _ = cluster_sums(values, clusters)
    mean, independent = mean_and_stderr(values)
    if len(sums) == 1:
        return Estimate(mean, math.nan)
    spread = cluster_bootstrap(values, clusters, rng, resamples).std(ddof=1)
    return Estimate(mean, max(float(spread) * math.sqrt(len(sums) / (len(sums) - 1)), independent))


def retained_gain(
    private: npt.ArrayLike, public: npt.ArrayLike, full: npt.ArrayLike, clusters: IntArray, rng: np.random.Generator
) -> Estimate | None:
    """(private − public) ÷ (full − public), each a mean of hits, with the error of a ratio over clusters.

    None where full is not better than public: a share of a loss has no meaning.
    """
    start = np.asarray(public, dtype=np.float64)
    kept, gain = np.asarray(private) - start, np.asarray(full) - start
    whole = float(gain.mean())
    if not whole > 0.0:
        return None
    ratio = float(kept.mean()) / whole
    return Estimate(ratio, clustered_mean(kept - ratio * gain, clusters, rng).stderr / whole)


def accuracy_row(
    truth: FloatArray,
    public: FloatArray,
    ceiling: FloatArray,
    passage: IntArray,
    rng: np.random.Generator,
    headroom_rng: np.random.Generator,
) -> dict[str, float | None]:
    """Mean probability of the true token (n,), and the share of the gain up to the ceiling; errors over passages."""
    row: dict[str, float | None] = {}
    row["accuracy"], row["stderr"] = clustered_mean(truth, passage, rng)
    row |= {"accuracy_public": float(public.mean()), "accuracy_ceiling": float(ceiling.mean())}
    headroom = retained_gain(truth, public, ceiling, passage, headroom_rng)
    row["headroom"], row["headroom_stderr"] = headroom or (None, None)
    return row
