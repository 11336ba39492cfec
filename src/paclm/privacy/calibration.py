"""Noise calibration: `thm:noise` on the active subspace of the vote covariance (`lem:singular`).

The covariance of a one-hot vote with masses π is C = diag(π) − ππᵀ. Its null direction is the constant vector, so the
noise lives in the a − 1 other directions, spanned by a Helmert basis. Along eigenvector j of C, with eigenvalue λ_j,
the noise variance is

    Λ_j = √λ_j · Σ_i √λ_i / (2 b)

which spends exactly b nats under a Gaussian bound on the mutual information, with the least total variance. Knows no
secret, no tokens and no randomness.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from paclm.privacy.belief import FloatArray

FLOOR = 1e-14
"""Added to every eigenvalue (`rem:floor`). A solver's eigenvectors are off by about 1e-16, so an eigenvalue near zero
would put almost no noise along a direction in which worlds differ. Upward is the safe side."""

UPWARD = 1.0 + 2.0**-40
"""Factor on every variance: more than rounding in the masses (`tally`: at most 2^-43) can take away."""


class Calibration(NamedTuple):
    """Gaussian noise for one release: independent along each axis."""

    axes: FloatArray  # (a, a-1): row v is the vote v in the noise's own coordinates
    variances: FloatArray  # (a-1,), ascending

    @property
    def scale(self) -> float:
        """The largest standard deviation along any axis: the σ that the tables report."""
        return math.sqrt(float(self.variances[-1]))


@lru_cache(maxsize=512)
def helmert(size: int) -> FloatArray:
    """An orthonormal basis, (size, size−1), of the directions orthogonal to the constant vector."""
    columns = np.arange(1, size)  # (a-1,)
    rows = np.arange(size)[:, None]  # (a, 1)
    basis = np.where(rows < columns, 1.0, np.where(rows == columns, -columns, 0.0)) / np.sqrt(columns * (columns + 1.0))
    basis.setflags(write=False)
    return basis


Mass = TypeVar("Mass", float, FloatArray)


def pair_variance(mass_1: Mass, mass_2: Mass, per_token: float) -> Mass:
    """Noise variance for two distinct votes: one direction, (1, −1)/√2, with λ = 2 π₁ π₂ and Λ = λ / (2b)."""
    total = mass_1 + mass_2
    return (2.0 * (mass_1 / total) * (mass_2 / total) + FLOOR) * UPWARD / (2.0 * per_token)


def calibrate_noise(mass: FloatArray, per_token: float) -> Calibration:
    """Noise through which one vote, drawn from the masses (a ≥ 2), leaks at most `per_token` nats.

    Masses are renormalised: one that rounds to more than 1 would cancel the variance of the light ones.
    """
    basis = helmert(mass.size)
    if mass.size == 2:
        return Calibration(basis, np.array([pair_variance(float(mass[0]), float(mass[1]), per_token)]))
    if mass.size == 3:
        p, q, r = mass.tolist()
        total = p + q + r
        eigenvalues, eigenvectors = _spectrum_of_three(p / total, q / total, r / total)
    else:
        mass = mass / mass.sum()
        projected = mass @ basis  # (a-1,)
        covariance = (basis.T * mass) @ basis - projected[:, None] * projected  # (a-1, a-1), positive definite
        eigenvalues, eigenvectors = np.linalg.eigh(covariance)
    roots = np.sqrt(np.maximum(eigenvalues, 0.0) + FLOOR)
    return Calibration(basis @ eigenvectors, roots * (float(roots.sum()) * UPWARD / (2.0 * per_token)))


def information_bound(mass: FloatArray, calibration: Calibration) -> float:
    """The most nats that a vote drawn from these masses can leak through this noise: ½ log det(I + Σ⁻¹C).

    At most `per_token` if the noise was calibrated to the same masses; unbounded if not.
    """
    axes, variances = calibration  # (a, a-1), (a-1,)
    scaled = axes / np.sqrt(variances)
    mean = mass @ scaled  # (a-1,)
    covariance = (scaled.T * mass) @ scaled - mean[:, None] * mean
    return float(0.5 * np.log1p(np.maximum(np.linalg.eigvalsh(covariance), 0.0)).sum())


def _spectrum_of_three(p: float, q: float, r: float) -> tuple[FloatArray, FloatArray]:
    """Eigenvalues, ascending, and eigenvectors of the 2 × 2 covariance of three masses, by one Jacobi rotation.

    Nine dissenting tokens in ten have two or three distinct votes; a general solver would dominate their cost.
    """
    # The mean in the Helmert directions (1, −1, 0)/√2 and (1, 1, −2)/√6, unscaled.
    along, across = p - q, p + q - 2.0 * r
    first = (p + q - along * along) / 2.0
    mixed = along * (1.0 - across) / math.sqrt(12.0)
    second = (p + q + 4.0 * r - across * across) / 6.0
    tangent = 0.0
    if mixed != 0.0:
        slope = (second - first) / (2.0 * mixed)
        tangent = math.copysign(1.0, slope) / (abs(slope) + math.hypot(1.0, slope))
    cosine = 1.0 / math.hypot(1.0, tangent)
    sine = tangent * cosine
    low, high = first - tangent * mixed, second + tangent * mixed
    if low <= high:
        return np.array([low, high]), np.array([[cosine, sine], [-sine, cosine]])
    return np.array([high, low]), np.array([[sine, cosine], [cosine, -sine]])
