"""Normalisation with what surrounds it; its plain twin is `normalise` and the first half of `apply_product`.

One program per row. It adds the parts that a split product left behind to the residual stream, normalises, and
multiplies the result with the row's A: the inner products of the next layer's adapters.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.weights import Norm, Product


@triton.jit
def _normalise(
    stream, parts, weight, bias, out, A, inner, size, rows, rows_per_world, epsilon,
    SPLITS: tl.constexpr, RMS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    real = c < size
    x = tl.load(stream + row * size + c, mask=real, other=0.0).to(tl.float32)
    if SPLITS > 0:
        for split in tl.static_range(SPLITS):
            x += tl.load(parts + (split * rows + row) * size + c, mask=real, other=0.0)
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + row * size + c, x, mask=real)
        x = x.to(tl.float32)
    if RMS:
        scaled = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
        y = scaled.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    else:
        centred = tl.where(real, x - tl.sum(x, 0) / size, 0.0)
        scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / size + epsilon)
        y = scaled * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
        y += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    y = y.to(out.dtype.element_ty)
    tl.store(out + row * size + c, y, mask=real)
    y = y.to(tl.float32)
    world = row // rows_per_world
    for start in tl.static_range(0, RANKS, STEP):
        j = start + tl.arange(0, STEP)
        place = A + (world * RANKS + j)[:, None] * size + c[None, :]
        a = tl.load(place, mask=(j < RANKS)[:, None] & real[None, :], other=0.0).to(tl.float32)
        tl.store(inner + row * RANKS + j, tl.sum(a * y[None, :], 1), mask=j < RANKS)


def normalise_rows(
    stream: Tensor, norm: Norm, out: Tensor, rows_per_world: int,
    parts: Tensor | None = None, product: Product | None = None, inner: Tensor | None = None, num_warps: int = 4,
) -> None:  # fmt: skip
    """stream (rows, d) += parts (splits, rows, d); out = its norm; inner (rows, parts·r, 1) = A · out if asked for."""
    rows, size = stream.shape
    A = product.A if product is not None and inner is not None else None
    _normalise[(rows,)](
        stream, parts if parts is not None else stream,
        norm.weight, norm.bias if norm.bias is not None else norm.weight, out,
        A if A is not None else stream, inner if inner is not None else stream,
        size, rows, rows_per_world, norm.epsilon,
        SPLITS=0 if parts is None else parts.shape[0], RMS=norm.bias is None, RANKS=0 if A is None else A.shape[1],
        STEP=4, BLOCK=triton.next_power_of_2(size), num_warps=num_warps,
    )  # fmt: skip
