"""λ for any radius by table lookup: the divergence of every shard model from the public one, tabulated over λ once.

Both directions of D↔_a(λp + (1−λ)p0, p0) depend on p only through the distribution of the ratio r = p/p0 under p0:

    S(λ) = Σ_v p0(v)·(1 + λ(r(v) − 1))^s      s = a forward, s = 1 − a backward; D = ln S / (a−1)

(1 + λ(r−1))^s is convex in r, so moving the mass of each interval of r to its two ends, with its mean kept, can only
raise S. The ends are the same for every row: a vocabulary of 50,000 becomes a few hundred weights, and the table for
an order is one matrix product. S^(1/a) is convex in λ (a norm of an affine function forward, log-convex backward), so
a chord between grid points lies above it. Both roundings err upward, so that λ errs downward: always the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray
from paclm.study.baselines.accountants import check_whole_order

_LARGEST_LOG_RATIO = 64.0
_SMALLEST_LOG_PUBLIC = -180.0
_CAP = 1e300  # larger powers are clipped: with p0 ≥ e^-180 they still exceed every target (see _LARGEST_TARGET)
_LARGEST_TARGET = 400.0  # of (a−1)·aβ, so that S stays far below the cap; a larger one is lowered: the safe side
_LARGEST_ROOT = 80.0  # of (a−1)β, for the same reason: so that S^(1/a) stays inside float32
_ROUNDING = 4e-15
_ROWS_AT_ONCE = {"cpu": 2**12, "cuda": 2**17}  # rows whose λ are computed together for many radii

# Ends of the intervals of ln r: fine near 0, where models agree; at most 0.05 apart up to 12.
_HALF = [np.geomspace(2.0**-14, 0.5, 96), np.arange(0.55, 11.99, 0.05), np.geomspace(12.0, _LARGEST_LOG_RATIO, 40)]
_POSITIVE = np.concatenate(_HALF)
LOG_RATIOS: FloatArray = np.concatenate([-_POSITIVE[::-1], [0.0], _POSITIVE])
# λ from 0 to 1: geometric toward 0, where the divergence is quadratic, and toward 1, where it may be steep.
WEIGHTS: FloatArray = np.concatenate([[0.0], np.geomspace(1e-4, 0.5, 64), 1.0 - np.geomspace(0.44, 1e-3, 32), [1.0]])


class Ratios(NamedTuple):
    """The ratios p/p0 of every shard model, without their tokens."""

    weights: Tensor  # (n, N, E) their distribution under p0, on the common ends
    smallest: Tensor  # (n, N) of ln p/p0
    largest: Tensor  # (n, N)


@torch.inference_mode()
def compress(log_shards: Tensor, log_public: Tensor) -> Ratios:
    """(n, N, V), (n, V) float64 → the ratios, float64."""
    n, shards, vocabulary = log_shards.shape
    ratio = log_shards - log_public.unsqueeze(1)
    smallest, largest = torch.aminmax(ratio, dim=-1)
    is_near = (smallest >= -_LARGEST_LOG_RATIO) & (largest <= _LARGEST_LOG_RATIO)
    if not (bool(is_near.all()) and bool((log_public >= _SMALLEST_LOG_PUBLIC).all())):
        raise InvalidInput(
            "A shard model and the public model differ by more than a factor of e^64 on some token, or the public "
            "model gives it less than e^-180. A table cannot hold that; check the adapters."
        )
    ends = torch.from_numpy(LOG_RATIOS).to(ratio.device)
    interval = torch.bucketize(ratio, ends[1:-1], right=True)  # (n, N, V)
    del ratio  # as large as all shard models
    mass, moved = (torch.zeros((n, shards, len(ends) - 1), dtype=torch.float64, device=ends.device) for _ in range(2))
    mass.scatter_add_(-1, interval, log_public.exp().unsqueeze(1).expand(n, shards, vocabulary))
    moved.scatter_add_(-1, interval, log_shards.exp())
    low, high = ends[:-1].exp(), ends[1:].exp()
    upper = ((moved - mass * low) / (high - low)).clamp_min(0.0)  # keeps mass and mean of every interval
    lower = ((mass * high - moved) / (high - low)).clamp_min(0.0)
    weights = torch.zeros((n, shards, len(ends)), dtype=torch.float64, device=ends.device)
    weights[..., 1:] += upper
    weights[..., :-1] += lower
    return Ratios(weights, smallest, largest)


@lru_cache(maxsize=64)
def _powers(order: int, backward: bool) -> FloatArray:
    """(1 + λx)^s − 1 − s·λx at every end and grid point (E, J): what is left when the mean of x is zero."""
    step = np.expm1(LOG_RATIOS)[:, None] * WEIGHTS[None, :]
    base = np.exp(LOG_RATIOS)[:, None] * WEIGHTS[None, :] + (1.0 - WEIGHTS[None, :])
    log_base = np.where(step < -0.5, np.log(base), np.log1p(np.maximum(step, -0.5)))  # each where it keeps its digits
    exponent = 1.0 - order if backward else float(order)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        exact = np.exp(exponent * log_base) - 1.0 - exponent * step
        series = 0.5 * exponent * (exponent - 1.0) * step**2 * (1.0 + (exponent - 2.0) / 3.0 * step)
    # Near zero the difference cancels; two terms of its series are exact to 1e-8 of it.
    return np.where(np.abs(step) * order < 1e-4, series * (1.0 + 1e-7), np.minimum(exact, _CAP))


@lru_cache(maxsize=64)
def _powers_on(device: torch.device, order: int) -> tuple[Tensor, Tensor]:
    forward, backward = (torch.from_numpy(_powers(order, is_backward)).to(device) for is_backward in (False, True))
    return forward, backward


@dataclass(frozen=True, slots=True)
class DivergenceTable:
    """S^(1/a) − 1 on the grid of λ, for every row (position and shard model) and one order; never too small."""

    order: int
    values: Tensor  # (..., J) float32, not decreasing in λ; rounded up

    def weight(self, radius: float | Tensor, rows: Any = None) -> Tensor:
        """λ of every row for D↔_a ≤ aβ, at most the exact one; `rows` picks along the first axes.

        The radius may differ by row.
        """
        values = self.values if rows is None else self.values[rows]
        radii = torch.as_tensor(radius, dtype=torch.float64, device=values.device)
        return self._weights(values, radii.expand(values.shape[:-1]).unsqueeze(-1))[..., 0]

    def gains(self, radii: FloatArray, each: Tensor) -> Tensor:
        """The mean over shard models of λ(β)·gain at every position, for many radii: rows and gains (n, N) → (n, R)."""
        n, shards = each.shape
        at_once = max(1, _ROWS_AT_ONCE[self.values.device.type] // shards)
        given = torch.from_numpy(radii).to(self.values.device)
        found = torch.empty((n, len(radii)), dtype=torch.float64, device=self.values.device)
        for start in range(0, n, at_once):
            some = slice(start, start + at_once)
            found[some] = torch.einsum("cn,cnr->cr", each[some], self._weights(self.values[some], given))
        return found / shards

    def _weights(self, values: Tensor, radii: Tensor) -> Tensor:
        """Rows (..., J) and radii (R,) or (..., R) → λ (..., R) float64."""
        largest = min(_LARGEST_TARGET / self.order, _LARGEST_ROOT)
        target = torch.expm1(((self.order - 1) * radii).clamp_max(largest)) * (1.0 - 1e-12)
        target = target.expand(*values.shape[:-1], -1).reshape(-1, radii.shape[-1])  # (r, R)
        grid, steps = (torch.from_numpy(array).to(values.device) for array in (WEIGHTS, np.diff(WEIGHTS)))
        flat = values.reshape(-1, len(WEIGHTS)).contiguous()  # (r, J)
        # The target may round up to float32, but values are an ulp too large: a value below the rounded target is
        # still below the exact one.
        goals = target.float().contiguous()
        place = torch.searchsorted(flat, goals, right=True).sub_(1).clamp_(0, len(WEIGHTS) - 2)  # (r, R)
        left, right = flat.gather(1, place).double(), flat.gather(1, place + 1).double()
        part = ((target - left) / (right - left)).clamp_(0.0, 1.0)
        part = torch.where(right > left, part, 1.0)
        weight = grid[place] + part * steps[place]
        return weight.reshape(*values.shape[:-1], radii.shape[-1])


@torch.inference_mode()
def tabulate(weights: Tensor, orders: Sequence[int]) -> list[DivergenceTable]:
    """One table per order from compressed distributions (n, N, E); the values are (n, N, J)."""
    tables = []
    grid = torch.from_numpy(WEIGHTS).to(weights.device)
    for order in map(check_whole_order, orders):
        forward, backward = (weights @ powers for powers in _powers_on(weights.device, order))
        excess = torch.maximum(forward, backward).clamp_min(0.0)  # S − 1
        root = torch.expm1(torch.log1p(excess * (1.0 + _ROUNDING) + _ROUNDING * grid) / order)
        rising = root.cummax(-1).values.clamp_max(torch.finfo(torch.float32).max).float()
        tables.append(DivergenceTable(order, torch.nextafter(rising, torch.full_like(rising, math.inf))))
    return tables
