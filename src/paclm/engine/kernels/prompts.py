"""Attention of a prefill pass: many positions of several sequences at once; its plain twin is `StackedModel.prefill`.

Two launches per layer, so that every key and value of the pass is stored before any query attends: `place_rows`
finishes queries, keys and values (bias, adapter, rotation) and stores keys and values in the blocks of their sequences;
`attend_prompts` takes tiles of consecutive positions of one sequence over all its blocks so far.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.kernels.products import precision_of
from paclm.engine.kernels.rows import _finished
from paclm.engine.weights import Block, Weights

TILE = 64
"""Positions of one program of `attend_prompts`."""
_NEVER = tl.constexpr(-1.0e30)
_LOG2E = 1.4426950408889634


@triton.jit
def _place(
    parts, bias, inner_in, B, keys, values, queries, cos, sin, positions, sequences, table, next_row, next_page, scale,
    tokens, worlds, HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    ROTARY: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS  # rows of one world: ROWS divides the tokens
    column = tl.program_id(1)  # queries, then keys, then values
    world = first // tokens
    r = first + tl.arange(0, ROWS)
    i = r - world * tokens
    d = tl.arange(0, SIZE)
    everywhere = d >= 0
    ok = (r >= 0)[:, None] & everywhere[None, :]
    width: tl.constexpr = (HEADS + 2 * KV) * SIZE
    apart: tl.constexpr = RANKS // RANK if RANK > 0 else 1  # 3 where q, k and v have adapters of their own
    part = tl.where(column < HEADS, 0, tl.where(column < HEADS + KV, 1, 2)) if apart > 1 else 0
    rows = tokens.to(tl.int64) * worlds
    start = column * SIZE
    x = _finished(parts, bias, inner_in, B, r, start + d, ok, everywhere, world, rows, width, part, SPLITS, HAS_BIAS, RANK, RANKS, 1, 1)  # fmt: skip  # noqa: E501
    position = tl.load(positions + i)
    if ROTARY:  # noqa: SIM102 (known when compiling; the next is not)
        if column < HEADS + KV:
            other = start + (d + SIZE // 2) % SIZE
            turned = _finished(parts, bias, inner_in, B, r, other, ok, everywhere, world, rows, width, part, SPLITS, HAS_BIAS, RANK, RANKS, 1, 1)  # fmt: skip  # noqa: E501
            angle = position[:, None] * SIZE + d[None, :]
            c = tl.load(cos + angle).to(tl.float32)
            s = tl.where(d < SIZE // 2, -1.0, 1.0)[None, :] * tl.load(sin + angle).to(tl.float32)
            x = x * c + turned * s
    if column < HEADS:
        row = r[:, None] * (HEADS * SIZE)
        tl.store(queries + row + start + d[None, :], (x * scale).to(queries.dtype.element_ty))
    else:
        head = (column - HEADS) % KV
        block = tl.load(table + tl.load(sequences + i) * next_row + (position // PAGE) * next_page).to(tl.int64)
        place = ((block * worlds + world) * KV + head) * (PAGE * SIZE) + (position % PAGE) * SIZE
        if column < HEADS + KV:
            tl.store(keys + place[:, None] + d[None, :], x.to(keys.dtype.element_ty))
        else:
            tl.store(values + place[:, None] + d[None, :], x.to(values.dtype.element_ty))


@triton.jit
def _blocks(
    acc, top, total, q, keys, values, table, next_page, block_size, position, begin, end,
    SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One pass of the softmax over positions begin … end, BLOCK at a time."""
    t = tl.arange(0, BLOCK)
    d = tl.arange(0, SIZE)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        at = start + t
        block = tl.load(table + (at // PAGE) * next_page, mask=at < end, other=0).to(tl.int64)
        place = (block * block_size + (at % PAGE) * SIZE)[:, None] + d[None, :]
        k = tl.load(keys + place)
        v = tl.load(values + place)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            score = tl.where(seen, score, _NEVER)
            v = tl.where((at < end)[:, None], v, 0.0)  # what stands in a block that was not given may be anything
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _attend_prompts(
    queries, keys, values, out, tiles, table, next_row, next_page, num_tiles, tokens, worlds,
    HEADS: tl.constexpr, KV: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)  # the longest first
    world = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    sequence = tl.load(tiles + tile)
    first = tl.load(tiles + num_tiles + tile)  # in the tokens of the pass
    start = tl.load(tiles + 2 * num_tiles + tile)  # in the sequence
    count = tl.load(tiles + 3 * num_tiles + tile)
    if count > 0:
        i = tl.arange(0, ROWS)
        d = tl.arange(0, SIZE)
        ok = i < count
        place = (world * tokens + first + i)[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
        q = tl.load(queries + place, mask=ok[:, None], other=0.0)
        block_size = worlds * (KV * PAGE * SIZE)  # no .to(): one world is a constant
        here = (world * KV + head // (HEADS // KV)) * (PAGE * SIZE)
        table += sequence * next_row
        acc = tl.zeros((ROWS, SIZE), tl.float32)
        top = tl.full((ROWS,), _NEVER, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        whole = start // BLOCK * BLOCK  # every query of the tile sees these positions
        acc, top, total = _blocks(acc, top, total, q, keys + here, values + here, table, next_page, block_size, start + i, 0, whole, SIZE, PAGE, BLOCK, False, PRECISION, STAGES)  # fmt: skip  # noqa: E501
        acc, top, total = _blocks(acc, top, total, q, keys + here, values + here, table, next_page, block_size, start + i, whole, start + count, SIZE, PAGE, BLOCK, True, PRECISION, STAGES)  # fmt: skip  # noqa: E501
        result = acc * (1.0 / total)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=ok[:, None])


def place_rows(
    parts: Tensor, inner_in: Tensor | None, keys: Tensor, values: Tensor, queries: Tensor, positions: Tensor,
    sequences: Tensor, table: Tensor, weights: Weights, block: Block,
) -> None:  # fmt: skip
    """parts (splits, W·T, q+k+v) → queries (W·T, heads·size), scaled, and keys and values in their blocks.

    Token i of the pass is at positions[i] of the sequence in row sequences[i] of the table; T is a multiple of 16.
    """
    w, into, tokens, worlds = weights, block.attention_in, positions.shape[0], keys.shape[1]
    cos, sin = w.rotary if w.rotary is not None else (parts, parts)
    rows = 64 if tokens % 64 == 0 else 16
    adapted = inner_in is not None and into.B is not None
    _place[(worlds * tokens // rows, w.num_heads + 2 * w.num_kv_heads)](
        parts, into.bias if into.bias is not None else parts, inner_in if adapted else parts,
        into.B if adapted else parts, keys, values, queries, cos, sin, positions, sequences, table, table.stride(0),
        table.stride(1), w.head_size**-0.5 * _LOG2E, tokens, worlds,
        HEADS=w.num_heads, KV=w.num_kv_heads, SIZE=w.head_size, PAGE=keys.shape[3], ROWS=rows,
        ROTARY=w.rotary is not None, SPLITS=parts.shape[0], HAS_BIAS=into.bias is not None,
        RANK=into.B.shape[1] if adapted and into.B is not None else 0,
        RANKS=inner_in.shape[1] if adapted and inner_in is not None else 0, num_warps=4,
    )  # fmt: skip


def attend_prompts(
    queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, tiles: Tensor, table: Tensor, weights: Weights,
    tokens: int,
) -> None:  # fmt: skip
    """Causal attention of queries (W·T, heads·size) over the blocks of their sequences → out, the same shape.

    tiles (4, n): row of the table, first token of the pass, its position, number of tokens (at most TILE; 0: none).
    """
    w, worlds = weights, keys.shape[1]
    _attend_prompts[(tiles.shape[1], worlds * w.num_heads)](
        queries, keys, values, out, tiles, table, table.stride(0), table.stride(1), tiles.shape[1], tokens,
        worlds, HEADS=w.num_heads, KV=w.num_kv_heads, SIZE=w.head_size, PAGE=keys.shape[3], ROWS=TILE,
        BLOCK=64, PRECISION=precision_of(keys.dtype), STAGES=2, num_warps=4,
    )  # fmt: skip
