"""What happens to a row between two products; plain twins: `normalise`, the activation, and both halves of an adapter.

`normalise_rows` finishes the product before it (splits, bias, adapter), adds it to the residual stream, normalises,
and multiplies with A: the inner products of the next product's adapters. `activate_rows` finishes the first MLP
product, applies the activation, and does the same for the second. A program takes one row with its part of A, or a few
rows of one world without it. With many rows per world tensor cores do the part with A better: `inner_products`, a
launch of its own. `embed_rows` starts the stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.kernels.products import precision_of
from paclm.engine.weights import Norm, Product, Weights

GELU_TANH, SILU_GATED = 1, 2


@triton.jit
def _finished(
    parts, bias, inner, B, r, c, ok, in_row, world, rows, width, part,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SUMS: tl.constexpr, SUMS_PAD: tl.constexpr,
):  # fmt: skip
    """Columns c of rows r of a product: the sum of its splits, its bias, its adapter."""
    x = tl.load(parts + r[:, None] * width + c[None, :], mask=ok, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(parts + (split * rows + r)[:, None] * width + c[None, :], mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    s = tl.arange(0, SUMS_PAD)
    for j in tl.static_range(RANK):
        b = tl.load(B + (world * RANK + j) * width + c, mask=in_row, other=0.0).to(tl.float32)
        place = (r * RANKS + part * RANK + j)[:, None] * SUMS + s[None, :]
        u = tl.sum(tl.load(inner + place, mask=(s < SUMS)[None, :], other=0.0), 1)
        x += u[:, None] * b[None, :]
    return x


@triton.jit
def _normalise(
    stream, parts, bias, inner_in, B, weight, shift, out, A, inner, size, rows, rows_per_world, epsilon,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK_IN: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr,
    RMS: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    world = first // rows_per_world
    r = first + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    in_row = c < size
    ok = (r < rows)[:, None] & in_row[None, :]
    place = r[:, None] * size + c[None, :]
    x = tl.load(stream + place, mask=ok, other=0.0).to(tl.float32)
    if SPLITS > 0:
        x += _finished(
            parts, bias, inner_in, B, r, c, ok, in_row, world, rows, size, 0,
            SPLITS, HAS_BIAS, RANK_IN, RANK_IN, SUMS, SUMS_PAD,
        )  # fmt: skip
        x = x.to(stream.dtype.element_ty)
        tl.store(stream + place, x, mask=ok)
        x = x.to(tl.float32)
    scale = tl.load(weight + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if RMS:
        unit = x * tl.rsqrt(tl.sum(x * x, 1) / size + epsilon)[:, None]
        y = unit.to(out.dtype.element_ty).to(tl.float32) * scale
    else:
        centred = tl.where(ok, x - (tl.sum(x, 1) / size)[:, None], 0.0)
        unit = centred * tl.rsqrt(tl.sum(centred * centred, 1) / size + epsilon)[:, None]
        y = unit * scale + tl.load(shift + c, mask=in_row, other=0.0).to(tl.float32)[None, :]
    y = y.to(out.dtype.element_ty)
    tl.store(out + place, y, mask=ok)
    if RANKS > 0:  # one row: all its sums at once
        j = tl.arange(0, RANKS_PAD)
        place = (world * RANKS + j)[:, None] * size + c[None, :]
        a = tl.load(A + place, mask=(j < RANKS)[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        tl.store(inner + first * RANKS + j, tl.sum(a * y.to(tl.float32), 1), mask=j < RANKS)


@triton.jit
def _activate(
    parts, bias, inner_in, B, out, A, inner, size, rows, rows_per_world,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK_IN: tl.constexpr, RANKS_IN: tl.constexpr, GATED: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    chunk = tl.program_id(1)
    world = first // rows_per_world
    r = first + tl.arange(0, ROWS)
    c = chunk * BLOCK + tl.arange(0, BLOCK)
    in_row = c < size
    ok = (r < rows)[:, None] & in_row[None, :]
    if GATED:
        gate = _finished(
            parts, bias, inner_in, B, r, c, ok, in_row, world, rows, 2 * size, 0,
            SPLITS, HAS_BIAS, RANK_IN, RANKS_IN, 1, 1,
        )  # fmt: skip
        up = _finished(
            parts, bias, inner_in, B, r, size + c, ok, in_row, world, rows, 2 * size, 1,
            SPLITS, HAS_BIAS, RANK_IN, RANKS_IN, 1, 1,
        )  # fmt: skip
        h = gate * tl.sigmoid(gate) * up
    else:
        x = _finished(
            parts, bias, inner_in, B, r, c, ok, in_row, world, rows, size, 0,
            SPLITS, HAS_BIAS, RANK_IN, RANKS_IN, 1, 1,
        )  # fmt: skip
        h = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # GELU's tanh form, 2 √(2/π) inside
    h = h.to(out.dtype.element_ty)
    tl.store(out + r[:, None] * size + c[None, :], h, mask=ok)
    h = tl.where(ok, h.to(tl.float32), 0.0)
    if RANK > 0:  # one row: all its sums at once
        j = tl.arange(0, RANK_PAD)
        place = (world * RANK + j)[:, None] * size + c[None, :]
        a = tl.load(A + place, mask=(j < RANK)[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        tl.store(inner + (first * RANK + j) * tl.num_programs(1) + chunk, tl.sum(a * h, 1), mask=j < RANK)


@triton.jit
def _inner_products(
    x, A, inner, size, rows_per_world, PRECISION: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    world = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANKS_PAD)
    row = world * rows_per_world + r
    acc = tl.zeros((ROWS, RANKS_PAD), tl.float32)
    for start in range(0, size, BLOCK):
        c = start + tl.arange(0, BLOCK)
        y = tl.load(x + row[:, None] * size + c[None, :], mask=(r < rows_per_world)[:, None] & (c < size)[None, :], other=0.0)  # fmt: skip  # noqa: E501
        a = tl.load(A + (world * RANKS + j)[None, :] * size + c[:, None], mask=(j < RANKS)[None, :] & (c < size)[:, None], other=0.0)  # fmt: skip  # noqa: E501
        acc = tl.dot(y, a, acc, input_precision=PRECISION)
    ok = (r < rows_per_world)[:, None] & (j < RANKS)[None, :]
    tl.store(inner + row[:, None] * RANKS + j[None, :], acc, mask=ok)


@triton.jit
def _embed(
    tokens, positions, embed, place, stream, size, sequences, HAS_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    in_row = c < size
    token = tl.load(tokens + row % sequences)
    x = tl.load(embed + token * size + c, mask=in_row, other=0.0).to(tl.float32)
    if HAS_PLACE:
        x += tl.load(place + tl.load(positions + row % sequences) * size + c, mask=in_row, other=0.0).to(tl.float32)
    tl.store(stream + row * size + c, x.to(stream.dtype.element_ty), mask=in_row)


def rows_together(rows_per_world: int, most: int = 4) -> int:
    """The largest power of two, at most `most`, that divides the rows of a world."""
    together = most
    while rows_per_world % together:
        together //= 2
    return together


def normalise_rows(
    stream: Tensor, norm: Norm, out: Tensor, rows_per_world: int,
    parts: Tensor | None = None, before: Product | None = None, inner_in: Tensor | None = None,
    after: Product | None = None, inner: Tensor | None = None, num_warps: int = 4,
) -> None:  # fmt: skip
    """stream (rows, d) += the finished product `before`; out = its norm; inner (rows, parts·r) = A of `after` · out.

    parts (splits, rows, d) and inner_in (rows, r, sums) belong to `before`.
    """
    rows, size = stream.shape
    bias = before.bias if before is not None else None
    adapted = before is not None and before.B is not None and inner_in is not None
    sums = inner_in.shape[2] if adapted and inner_in is not None else 1
    together = rows_together(rows_per_world) if inner is None else 1
    _normalise[(triton.cdiv(rows, together),)](
        stream, parts if parts is not None else stream, bias if bias is not None else stream,
        inner_in if adapted else stream, before.B if adapted and before is not None else stream,
        norm.weight, norm.bias if norm.bias is not None else norm.weight, out,
        after.A if after is not None and inner is not None else stream, inner if inner is not None else stream,
        size, rows, rows_per_world, norm.epsilon,
        SPLITS=0 if parts is None else parts.shape[0], HAS_BIAS=bias is not None,
        RANK_IN=inner_in.shape[1] if adapted and inner_in is not None else 0,
        SUMS=sums, SUMS_PAD=triton.next_power_of_2(sums), RMS=norm.bias is None,
        RANKS=0 if inner is None else inner.shape[1],
        RANKS_PAD=1 if inner is None else triton.next_power_of_2(inner.shape[1]), ROWS=together,
        BLOCK=triton.next_power_of_2(size),
        num_warps=num_warps,
    )  # fmt: skip


def activate_rows(
    parts: Tensor, product: Product, out: Tensor, rows_per_world: int, activation: int,
    inner_in: Tensor | None = None, after: Product | None = None, chunk: int = 512, num_warps: int = 4,
) -> Tensor | None:  # fmt: skip
    """out (rows, size) = the activation of the finished product; returns A of `after` · out, (rows, r, sums)."""
    rows, size = out.shape
    chunks = triton.cdiv(size, chunk)
    inner: Tensor | None = None
    if after is not None and after.A is not None:
        inner = torch.empty(rows, after.A.shape[1], chunks, device=out.device)
    adapted = product.B is not None and inner_in is not None
    together = rows_together(rows_per_world) if inner is None else 1
    _activate[(triton.cdiv(rows, together), chunks)](
        parts, product.bias if product.bias is not None else parts, inner_in if adapted else parts,
        product.B if adapted else parts, out, after.A if after is not None and inner is not None else parts,
        inner if inner is not None else parts, size, rows, rows_per_world,
        SPLITS=parts.shape[0], HAS_BIAS=product.bias is not None,
        RANK_IN=product.B.shape[1] if adapted and product.B is not None else 0,
        RANKS_IN=inner_in.shape[1] if adapted and inner_in is not None else 0, GATED=activation == SILU_GATED,
        RANK=0 if inner is None else inner.shape[1],
        RANK_PAD=1 if inner is None else triton.next_power_of_2(inner.shape[1]), ROWS=together, BLOCK=chunk,
        num_warps=num_warps,
    )  # fmt: skip
    return inner


def inner_products(x: Tensor, product: Product, rows_per_world: int, inner: Tensor) -> None:
    """inner (rows, parts·r), or with one sum (rows, r, 1) = A of `product` · x (rows, in)."""
    if product.A is None:
        return
    worlds, ranks, size = product.A.shape
    padded = max(8, triton.next_power_of_2(ranks))
    _inner_products[(triton.cdiv(rows_per_world, 16), worlds)](
        x, product.A, inner, size, rows_per_world, PRECISION=precision_of(x.dtype), RANKS=ranks,
        RANKS_PAD=padded, ROWS=16, BLOCK=128 if padded <= 16 and x.dtype != torch.float32 else 64, num_warps=1,
        num_stages=4,
    )  # fmt: skip


def embed_rows(weights: Weights, tokens: Tensor, positions: Tensor) -> Tensor:
    """tokens and positions (n,) → the stream (W·n, d), or (n, d) where it begins with a trunk."""
    w = weights
    worlds = 1 if w.trunk else w.num_worlds
    stream = torch.empty(worlds * tokens.shape[0], w.hidden_size, device=w.device, dtype=w.dtype)
    _embed[(stream.shape[0],)](
        tokens, positions, w.embed, w.position if w.position is not None else w.embed, stream, w.hidden_size,
        tokens.shape[0], HAS_PLACE=w.position is not None, BLOCK=triton.next_power_of_2(w.hidden_size), num_warps=4,
    )  # fmt: skip
    return stream
