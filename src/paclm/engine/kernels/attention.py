"""Decode attention that reads every key and value once; its plain twin is `StackedModel.decode`.

One program per sequence, world and key-value head. It turns the new query and key (rotary models), stores the new key
and value in the cache, attends over everything before and the new position, and, while the result is still in
registers, multiplies it with its columns of A: the inner product of the output layer's adapter, one part per head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.weights import Product, Weights


@triton.jit
def _attend(
    joined, keys, values, out, inner, A, cos, sin, positions, scale, num_sequences, num_worlds, capacity,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = program % KV
    slot = (program // KV) // num_worlds
    world = (program // KV) % num_worlds
    row = world * num_sequences + slot  # hidden states are world-major, the cache is slot-major
    position = tl.load(positions + slot)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, SIZE)
    heads: tl.constexpr = KV * GROUP
    source = joined + row * (heads + 2 * KV) * SIZE
    real = (g < GROUP)[:, None]
    q = tl.load(source + (head * GROUP + g)[:, None] * SIZE + d[None, :], mask=real, other=0.0).to(tl.float32)
    k_new = tl.load(source + (heads + head) * SIZE + d).to(tl.float32)
    v_new = tl.load(source + (heads + KV + head) * SIZE + d)
    if ROTARY:
        other = (d + SIZE // 2) % SIZE
        c = tl.load(cos + position * SIZE + d).to(tl.float32)
        s = tl.load(sin + position * SIZE + d).to(tl.float32)
        s = tl.where(d < SIZE // 2, -s, s)
        q_other = tl.load(source + (head * GROUP + g)[:, None] * SIZE + other[None, :], mask=real, other=0.0)
        q = q * c[None, :] + q_other.to(tl.float32) * s[None, :]
        k_new = k_new * c + tl.load(source + (heads + head) * SIZE + other).to(tl.float32) * s
    base = program * capacity * SIZE
    stored = k_new.to(keys.dtype.element_ty)
    tl.store(keys + base + position * SIZE + d, stored)
    tl.store(values + base + position * SIZE + d, v_new)

    # Online softmax, started from the new position, which need not be read back.
    q = q * scale
    top = tl.sum(q * stored.to(tl.float32)[None, :], 1)  # (GROUP_PAD,)
    total = tl.full((GROUP_PAD,), 1.0, tl.float32)
    acc = tl.zeros((GROUP_PAD, SIZE), tl.float32) + v_new.to(tl.float32)[None, :]
    for start in range(0, position, BLOCK):
        t = start + tl.arange(0, BLOCK)
        before = t < position
        place = base + t[:, None] * SIZE + d[None, :]
        k = tl.load(keys + place, mask=before[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + place, mask=before[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q[:, None, :] * k[None, :, :], 2)  # (GROUP_PAD, BLOCK)
        score = tl.where(before[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp(top - new_top)
        weight = tl.exp(score - new_top[:, None])
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], 1)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
    result = acc / total[:, None]
    columns = (head * GROUP + g)[:, None] * SIZE + d[None, :]
    tl.store(out + row * heads * SIZE + columns, result.to(out.dtype.element_ty), mask=real)
    for j in tl.static_range(RANK):
        a = tl.load(A + (world * RANK + j) * heads * SIZE + columns, mask=real, other=0.0).to(tl.float32)
        tl.store(inner + (row * RANK + j) * KV + head, tl.sum(tl.sum(a * result, 1), 0))


def attend(
    joined: Tensor, keys: Tensor, values: Tensor, positions: Tensor, weights: Weights, output: Product,
    out: Tensor, inner: Tensor | None, block: int = 32, num_warps: int = 2,
) -> None:  # fmt: skip
    """joined (W·n, q+k+v) → out (W·n, heads·size) and, where the output layer is adapted, inner (W·n, r, kv heads)."""
    w = weights
    group = w.num_heads // w.num_kv_heads
    cos, sin = w.rotary if w.rotary is not None else (joined, joined)
    _attend[(positions.shape[0] * w.num_worlds * w.num_kv_heads,)](
        joined, keys, values, out, inner if inner is not None else out, output.A if inner is not None else out,
        cos, sin, positions, w.head_size**-0.5, positions.shape[0], w.num_worlds, keys.shape[3],
        KV=w.num_kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), SIZE=w.head_size, BLOCK=block,
        ROTARY=w.rotary is not None, RANK=0 if inner is None or output.B is None else output.B.shape[1],
        num_warps=num_warps,
    )  # fmt: skip
