"""A base product with the adapters of all worlds folded in; its plain twin is `apply_product` and what follows it.

    y = act(x W + b + Σ_j inner_j · B_w,j)                 tile by tile: B is read once, no second pass over y
    next_j = A_next,w,j · y                                the next adapter's inner product, one part per column tile

`inner` (rows, r, parts) holds sums still to be added up; whoever made it left one part per head or column tile. A
product with few columns is split along its inputs (`splits`) so that every multiprocessor has work; the parts are
added by the norm that follows, in a fixed order: no atomics, so every run gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.weights import Product

PLAIN, GELU_TANH, SILU_GATED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up; fixed by shape, never tuned at run time, so that results do not depend on timing."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _multiply(
    x, weight, bias, inner, B, y, A_next, inner_next, rows, K, N, stride_k, stride_n, rows_per_world, edge_1, edge_2,
    HAS_BIAS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    ACT: tl.constexpr, NEXT_RANK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    split = tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row_ok = m < rows
    col_ok = n < N
    ok = row_ok[:, None] & col_ok[None, :]
    m64 = m.to(tl.int64)
    n64 = n.to(tl.int64)
    depth = K // SPLITS
    x_place = x + m64[:, None] * K + (split * depth + k)[None, :]
    w_place = weight + (split * depth + k).to(tl.int64)[:, None] * stride_k + n64[None, :] * stride_n
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, depth, BK):
        a = tl.load(x_place, mask=row_ok[:, None], other=0.0)
        b = tl.load(w_place, mask=col_ok[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if ACT == 2:
            b2 = tl.load(w_place + N * stride_n, mask=col_ok[None, :], other=0.0)
            up = tl.dot(a, b2, up, input_precision=PRECISION)
        x_place += BK
        w_place += BK * stride_k
    world = m64 // rows_per_world
    if split == 0:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=col_ok, other=0.0).to(tl.float32)[None, :]
            if ACT == 2:
                up += tl.load(bias + N + n, mask=col_ok, other=0.0).to(tl.float32)[None, :]
        if RANK > 0:
            first = tile_n * BN  # edges are multiples of BN: one tile, one part
            part = (first >= edge_1).to(tl.int32) + (first >= edge_2).to(tl.int32)
            p = tl.arange(0, PARTS_PAD)
            there = row_ok[:, None] & (p < PARTS)[None, :]
            for j in range(RANK):
                sums = tl.load(
                    inner + (m64[:, None] * RANKS + part * RANK + j) * PARTS + p[None, :], mask=there, other=0.0
                )
                b = tl.load(B + (world[:, None] * RANK + j) * N + n64[None, :], mask=ok, other=0.0).to(tl.float32)
                acc += tl.sum(sums, 1)[:, None] * b
    if ACT == 1:
        acc = acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
    if ACT == 2:
        acc = acc * tl.sigmoid(acc) * up
    result = acc.to(y.dtype.element_ty)
    tl.store(y + (split * rows + m64)[:, None] * N + n64[None, :], result, mask=ok)
    if NEXT_RANK > 0:
        seen = tl.where(ok, result.to(tl.float32), 0.0)
        for j in range(NEXT_RANK):
            a = tl.load(A_next + (world[:, None] * NEXT_RANK + j) * N + n64[None, :], mask=ok, other=0.0).to(tl.float32)
            place = (m64 * NEXT_RANK + j) * tl.num_programs(1) + tile_n
            tl.store(inner_next + place, tl.sum(a * seen, 1), mask=row_ok)


def multiply(
    x: Tensor, product: Product, y: Tensor, rows_per_world: int, tile: Tile, precision: str,
    inner: Tensor | None = None, activation: int = PLAIN, following: Product | None = None,
    inner_next: Tensor | None = None,
) -> None:  # fmt: skip
    """x (rows, in) → y (rows, out), or (splits, rows, out) float32 parts when the tile splits.

    inner (rows, parts·r, sums); inner_next (rows, r, column tiles) for the adapter of `following`.
    """
    rows, K = x.shape
    N = y.shape[-1]
    edges = [sum(product.parts[: i + 1]) for i in range(len(product.parts) - 1)]
    edge_1, edge_2 = [*edges, 2**31 - 1, 2**31 - 1][:2]
    sums = 1 if inner is None else inner.shape[2]
    B = product.B if inner is not None and product.B is not None else x
    A_next = following.A if following is not None and inner_next is not None and following.A is not None else x
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(N, tile.columns), tile.splits)
    _multiply[grid](
        x, product.weight, product.bias if product.bias is not None else x, inner if inner is not None else x,
        B, y, A_next,
        inner_next if inner_next is not None else x, rows, K, N, product.weight.stride(0), product.weight.stride(1),
        rows_per_world, edge_1, edge_2,
        HAS_BIAS=product.bias is not None, RANK=0 if inner is None else B.shape[1],
        RANKS=1 if inner is None else inner.shape[1], PARTS=sums, PARTS_PAD=triton.next_power_of_2(sums),
        ACT=activation, NEXT_RANK=0 if inner_next is None else inner_next.shape[1], SPLITS=tile.splits,
        PRECISION=precision, BM=tile.rows, BN=tile.columns, BK=tile.depth,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def precision_of(dtype: torch.dtype) -> str:
    """float32 products by three TF32 ones: tensor cores, and float32's accuracy to within its own rounding."""
    return "tf32x3" if dtype == torch.float32 else "ieee"
