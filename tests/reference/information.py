"""The exact leak of a release: by numerical integration, exact arithmetic, or brute force over a table."""

from fractions import Fraction

import numpy as np


def gaussian_information(mass, axes, variances):
    """I(vote; axes[vote] + N(0, diag(variances))) by quadrature, for one or two noise dimensions."""
    dimensions = len(variances)
    grid = np.linspace(-9.0, 9.0, 4001 if dimensions == 1 else 361)
    points = np.stack(np.meshgrid(*[grid] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    weights = np.exp(-0.5 * (points**2).sum(axis=1))
    weights /= weights.sum()
    scaled = axes / np.sqrt(variances)  # (a, d): votes in units of the noise
    total = 0.0
    for v, p in enumerate(mass):
        shift = scaled[v] - scaled  # (a, d)
        log_ratio = -0.5 * (shift**2).sum(axis=1) - points @ shift.T  # (points, a): log N(r; w) − log N(r; v)
        total -= p * float(weights @ np.log1p(np.expm1(log_ratio) @ mass))
    return total


def gaussian_bound(mass, axes, variances):
    """An upper bound on the same, ½ Σ_j Var(axes[vote]_j) / Λ_j, in exact rational arithmetic.

    It holds for the numbers as they are, whatever a solver's rounding did to the axes: noise independent along the
    axes leaks at most ½ log det(1 + Λ^{-1/2} Cov Λ^{-1/2}), and log det(1 + A) ≤ tr A.
    """
    exact = [Fraction(float(p)) for p in mass]
    norm = sum(exact)
    total = Fraction(0)
    for column, variance in zip(np.asarray(axes).T, variances, strict=True):
        values = [Fraction(float(x)) for x in column]
        mean = sum(p * x for p, x in zip(exact, values, strict=True)) / norm
        spread = sum(p * (x - mean) ** 2 for p, x in zip(exact, values, strict=True)) / norm
        total += spread / (2 * Fraction(float(variance)))
    return total


def table_information(mass, table):
    """I(V; Y) of a table P(y|v), rows v, in extended precision."""
    import mpmath

    with mpmath.workdps(40):
        p = [mpmath.mpf(float(x)) for x in mass]
        p = [x / mpmath.fsum(p) for x in p]  # a sum off by 1e-17 would swamp an information of 1e-12
        rows = [[mpmath.mpf(float(x)) for x in row] for row in table]
        rows = [[x / mpmath.fsum(row) for x in row] for row in rows]
        marginal = [mpmath.fsum(p[v] * rows[v][y] for v in range(len(p))) for y in range(len(rows[0]))]
        return float(
            mpmath.fsum(
                p[v] * x * mpmath.log(x / marginal[y]) for v, row in enumerate(rows) for y, x in enumerate(row) if x > 0
            )
        )
