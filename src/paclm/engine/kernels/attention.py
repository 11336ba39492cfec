"""Decode attention that reads every key and value once; its plain twin is `StackedModel.decode`.

One program per world, sequence and key-value head: neighbours share a world's adapters. It finishes its query, key and
value (bias, adapter, rotation), stores the new key and value in the last block of its sequence, attends over them and
over the blocks before, and, while the result is still in registers, multiplies it with its columns of A: the inner
product of the output layer's adapter, one sum per head. Two ways to do the middle part: by dots on tensor cores, the
queries of a group padded to 16 rows; or, where every head has keys of its own, lane by lane in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.kernels.products import precision_of
from paclm.engine.weights import Block, Weights

_NEVER = tl.constexpr(-1.0e30)


@triton.jit
def _columns(
    parts, bias, inner, B, row, world, num_rows, c, part,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Columns c of the finished product of one row: the sum of its splits, its bias, its adapter."""
    x = tl.load(parts + row * WIDTH + c).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(parts + (split * num_rows + row) * WIDTH + c).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + c).to(tl.float32)
    for j in tl.static_range(RANK):
        u = tl.load(inner + row * RANKS + part * RANK + j)
        x += u * tl.load(B + (world * RANK + j) * WIDTH + c).to(tl.float32)
    return x


@triton.jit
def _attend(
    parts, bias, inner_in, B, keys, values, out, inner, A, cos, sin, positions, table, next_row, next_page, scale,
    sequences, worlds, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, ROTARY: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, RANK_IN: tl.constexpr, RANKS_IN: tl.constexpr, RANK: tl.constexpr,
    RANK_PAD: tl.constexpr, DOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % KV
    row = program // KV  # hidden states are world-major, the cache is block-major
    world = row // sequences
    sequence = row % sequences
    rows = worlds * sequences
    position = tl.load(positions + sequence)
    table += sequence * next_row
    block_size = worlds * KV * PAGE * SIZE
    here = (world * KV + head) * PAGE * SIZE  # inside a block
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, SIZE)
    t = tl.arange(0, BLOCK)
    heads: tl.constexpr = KV * GROUP
    width: tl.constexpr = (heads + 2 * KV) * SIZE
    apart: tl.constexpr = RANKS_IN // RANK_IN if RANK_IN > 0 else 1  # 3 where q, k and v have adapters of their own
    k_part: tl.constexpr = 1 if apart > 1 else 0
    v_part: tl.constexpr = 2 if apart > 1 else 0
    query = tl.minimum(head * GROUP + g, heads - 1)[:, None] * SIZE
    key = (heads + head) * SIZE
    own = (
        tl.load(table + (position // PAGE) * next_page).to(tl.int64) * block_size + here + (position % PAGE) * SIZE + d
    )

    q = _columns(parts, bias, inner_in, B, row, world, rows, query + d[None, :], 0, width, SPLITS, HAS_BIAS, RANK_IN, RANKS_IN)  # fmt: skip  # noqa: E501
    k_new = _columns(parts, bias, inner_in, B, row, world, rows, key + d, k_part, width, SPLITS, HAS_BIAS, RANK_IN, RANKS_IN)  # fmt: skip  # noqa: E501
    v_new = _columns(parts, bias, inner_in, B, row, world, rows, key + KV * SIZE + d, v_part, width, SPLITS, HAS_BIAS, RANK_IN, RANKS_IN)  # fmt: skip  # noqa: E501
    if ROTARY:
        other = (d + SIZE // 2) % SIZE
        c = tl.load(cos + position * SIZE + d).to(tl.float32)
        s = tl.where(d < SIZE // 2, -1.0, 1.0) * tl.load(sin + position * SIZE + d).to(tl.float32)
        turned = _columns(parts, bias, inner_in, B, row, world, rows, query + other[None, :], 0, width, SPLITS, HAS_BIAS, RANK_IN, RANKS_IN)  # fmt: skip  # noqa: E501
        q = q * c[None, :] + turned * s[None, :]
        turned = _columns(parts, bias, inner_in, B, row, world, rows, key + other, k_part, width, SPLITS, HAS_BIAS, RANK_IN, RANKS_IN)  # fmt: skip  # noqa: E501
        k_new = k_new * c + turned * s
    q = q * scale
    k_new = k_new.to(keys.dtype.element_ty)
    v_new = v_new.to(values.dtype.element_ty)
    tl.store(keys + own, k_new)
    tl.store(values + own, v_new)
    k_new = k_new.to(tl.float32)
    v_new = v_new.to(tl.float32)

    if DOTS:
        _attend_by_dots(
            q, k_new, v_new, keys + here, values + here, table, next_page, block_size, position, t, out, inner, A, row,
            world, head, heads, KV, GROUP, GROUP_PAD, SIZE, PAGE, BLOCK, STAGES, RANK, RANK_PAD, PRECISION,
        )  # fmt: skip
    else:
        _attend_by_lanes(
            q, k_new, v_new, keys + here, values + here, table, next_page, block_size, position, t, out, inner, A, row,
            world, head, KV, SIZE, PAGE, BLOCK, STAGES, RANK, RANK_PAD,
        )  # fmt: skip


@triton.jit
def _attend_by_lanes(
    q, k_new, v_new, keys, values, table, next_page, block_size, position, t, out, inner, A, row, world, head,
    KV: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr,
):  # fmt: skip
    """One query per key: each of the BLOCK lanes keeps a softmax of its own; they are merged once, at the end."""
    d = tl.arange(0, SIZE)
    q = tl.reshape(q, (SIZE,))
    top = tl.full((BLOCK,), _NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, SIZE), tl.float32)
    for start in tl.range(0, position, BLOCK, num_stages=STAGES):
        before = start + t < position
        block = tl.load(table + (start // PAGE) * next_page).to(tl.int64)
        place = block * block_size + (start % PAGE + t)[:, None] * SIZE + d[None, :]
        k = tl.load(keys + place, mask=before[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + place, mask=before[:, None], other=0.0).to(tl.float32)
        score = tl.where(before, tl.sum(q[None, :] * k, 1), _NEVER)  # (BLOCK,)
        new_top = tl.maximum(top, score)
        shrink = tl.exp(top - new_top)
        weight = tl.where(before, tl.exp(score - new_top), 0.0)
        acc = acc * shrink[:, None] + weight[:, None] * v
        total = total * shrink + weight
        top = new_top
    own = tl.sum(q * k_new, 0)
    highest = tl.maximum(own, tl.max(top, 0))
    share = tl.exp(top - highest)
    own = tl.exp(own - highest)
    result = tl.sum(acc * share[:, None], 0) + own * v_new
    result = result * (1.0 / (tl.sum(total * share, 0) + own))
    tl.store(out + row * KV * SIZE + head * SIZE + d, result.to(out.dtype.element_ty))
    if RANK > 0:
        j = tl.arange(0, RANK_PAD)
        place = (world * RANK + j)[:, None] * KV * SIZE + head * SIZE + d[None, :]
        a = tl.load(A + place, mask=(j < RANK)[:, None], other=0.0).to(tl.float32)  # (RANK_PAD, SIZE)
        tl.store(inner + (row * RANK + j) * KV + head, tl.sum(a * result[None, :], 1), mask=j < RANK)


@triton.jit
def _attend_by_dots(
    q, k_new, v_new, keys, values, table, next_page, block_size, position, t, out, inner, A, row, world, head,
    heads: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries of a group, repeated to the 16 rows a tensor core multiplies; every product in the cache's type."""
    copies: tl.constexpr = 16 // GROUP_PAD
    d = tl.arange(0, SIZE)
    many = tl.reshape(tl.broadcast_to(q[None, :, :], (copies, GROUP_PAD, SIZE)), (16, SIZE))
    narrow = many.to(keys.dtype.element_ty)
    top = tl.sum(narrow.to(tl.float32) * k_new[None, :], 1)  # (16,): the new position comes first
    total = tl.full((16,), 1.0, tl.float32)
    acc = tl.broadcast_to(v_new[None, :], (16, SIZE))
    for start in tl.range(0, position, BLOCK, num_stages=STAGES):
        before = start + t < position
        if BLOCK > PAGE:  # of several blocks at a time
            block = tl.load(table + ((start + t) // PAGE) * next_page, mask=before, other=0).to(tl.int64)[:, None]
            place = block * block_size + ((start + t) % PAGE)[:, None] * SIZE + d[None, :]
        else:
            block = tl.load(table + (start // PAGE) * next_page).to(tl.int64)
            place = block * block_size + (start % PAGE + t)[:, None] * SIZE + d[None, :]
        k = tl.load(keys + place, mask=before[:, None], other=0.0)
        v = tl.load(values + place, mask=before[:, None], other=0.0)
        score = tl.where(before[None, :], tl.dot(narrow, tl.trans(k), input_precision=PRECISION), _NEVER)  # (16, BLOCK)
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp(top - new_top)
        weight = tl.exp(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    i = tl.arange(0, 16)
    column = (head * GROUP + i)[:, None] * SIZE + d[None, :]
    tl.store(out + row * heads * SIZE + column, result, mask=(i < GROUP)[:, None])
    if RANK > 0:
        j = tl.arange(0, RANK_PAD)
        sums = tl.zeros((16, RANK_PAD), tl.float32)
        for member in tl.static_range(GROUP):
            place = (world * RANK + j)[None, :] * heads * SIZE + (head * GROUP + member) * SIZE + d[:, None]
            a = tl.load(A + place, mask=(j < RANK)[None, :], other=0.0)  # (SIZE, RANK_PAD)
            products = tl.dot(result, a.to(result.dtype), input_precision=PRECISION)
            sums += tl.where((i == member)[:, None], products, 0.0)
        tl.store(inner + (row * RANK + j) * KV + head, tl.sum(sums, 0), mask=j < RANK)


def attend(
    parts: Tensor, inner_in: Tensor | None, keys: Tensor, values: Tensor, positions: Tensor, table: Tensor,
    weights: Weights, block: Block, out: Tensor, inner: Tensor | None,
    dots: bool = True, positions_together: int = 16, num_stages: int = 2, num_warps: int = 1,
) -> None:  # fmt: skip
    """parts (splits, W·n, q+k+v) → out (W·n, heads·size) and inner (W·n, r, kv heads) for the output layer's adapter.

    inner_in (W·n, parts·r): the inner products of the adapters of q, k and v; None where they are added already.
    keys, values (blocks, W, kv heads, page, size); table (n, pages): the blocks of each sequence. `positions_together`
    divides a page, or is a multiple of it (taken lane by lane: a page).
    """
    w, into, output = weights, block.attention_in, block.attention_out
    group, worlds, page = w.num_heads // w.num_kv_heads, keys.shape[1], keys.shape[3]  # one world in the trunk
    by_dots = dots or group > 1
    together = positions_together if by_dots else min(positions_together, page)
    cos, sin = w.rotary if w.rotary is not None else (parts, parts)
    adapted = inner_in is not None and into.B is not None
    rank = 0 if inner is None or output.B is None else output.B.shape[1]
    _attend[(positions.shape[0] * worlds * w.num_kv_heads,)](
        parts, into.bias if into.bias is not None else parts, inner_in if adapted else parts,
        into.B if adapted else parts, keys, values, out, inner if inner is not None else out,
        output.A if inner is not None else out, cos, sin, positions, table, table.stride(0), table.stride(1),
        w.head_size**-0.5, positions.shape[0], worlds,
        KV=w.num_kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), SIZE=w.head_size,
        PAGE=page, BLOCK=together, STAGES=num_stages, ROTARY=w.rotary is not None,
        SPLITS=parts.shape[0], HAS_BIAS=into.bias is not None,
        RANK_IN=into.B.shape[1] if adapted and into.B is not None else 0,
        RANKS_IN=inner_in.shape[1] if adapted and inner_in is not None else 0,
        RANK=rank, RANK_PAD=max(8, triton.next_power_of_2(rank)), DOTS=by_dots,
        PRECISION=precision_of(keys.dtype), num_warps=num_warps,
    )  # fmt: skip
