"""float32 products on tensor cores; the plain twin is `torch.mm`.

cuBLAS's float32 product of 129 rows leaves most of an H200 idle. Here every factor is split into two TF32 numbers
and three products are added (`tf32x3`): float32's accuracy to within its own rounding, on tensor cores. The inputs are
split too (`splits`), so that every multiprocessor has work; the next kernel adds the parts, in order: no
atomics, the same bits every time. Tiles are fixed by shape, never tuned at run time, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _multiply(
    x, weight, y, rows, K, depth, N, stride_k, stride_n,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = split * depth + tl.arange(0, BK)
    row_ok = m < rows
    col_ok = n < N
    m64 = m.to(tl.int64)
    n64 = n.to(tl.int64)
    x_place = x + m64[:, None] * K + k[None, :]
    w_place = weight + k.to(tl.int64)[:, None] * stride_k + n64[None, :] * stride_n
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, depth, BK):
        a = tl.load(x_place, mask=row_ok[:, None], other=0.0)
        b = tl.load(w_place, mask=col_ok[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        x_place += BK
        w_place += BK * stride_k
    place = y + (split * rows + m64)[:, None] * N + n64[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


def multiply(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """x (rows, in), weight (in, out) → parts (splits, rows, out) whose sum is the product."""
    rows, K = x.shape
    N = weight.shape[1]
    y = torch.empty(tile.splits, rows, N, device=x.device, dtype=torch.float32)
    _multiply[(triton.cdiv(rows, tile.rows), triton.cdiv(N, tile.columns), tile.splits)](
        x, weight, y, rows, K, K // tile.splits, N, weight.stride(0), weight.stride(1),
        PRECISION=precision_of(x.dtype), BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y


def precision_of(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies this type."""
    return "tf32x3" if dtype == torch.float32 else "ieee"
