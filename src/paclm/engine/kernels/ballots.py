"""The two ends of a ballot; plain twins: `top_tokens` (its keys) and `support_logits` with `coupled_votes`.

`public_keys`: the public model's logits over the whole vocabulary, packed with the token id into one sortable integer.
`cast_votes`: every world's logits inside the support, the shared coins added, the best token of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.kernels.products import precision_of


@triton.jit
def _keys(
    hidden, head, keys, sequences, size, vocabulary,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    row_ok = m < sequences
    col_ok = n < vocabulary
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, size, BK):
        k = start + tl.arange(0, BK)
        deep = k < size
        h = tl.load(hidden + m[:, None] * size + k[None, :], mask=row_ok[:, None] & deep[None, :], other=0.0)
        place = head + n.to(tl.int64)[None, :] * size + k[:, None]
        e = tl.load(place, mask=col_ok[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(h, e, acc, input_precision=PRECISION)
    bits = (acc + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = (ordered << 32) | (0x7FFFFFFF - n).to(tl.int64)[None, :]
    place = keys + m.to(tl.int64)[:, None] * vocabulary + n[None, :]
    tl.store(place, packed, mask=row_ok[:, None] & col_ok[None, :])


@triton.jit
def _vote(
    hidden, head, support, coins, temperature, votes, logits, sequences, worlds, size, support_size,
    PRECISION: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.arange(0, BS)
    world_ok = w < worlds
    in_support = c < support_size
    ids = tl.load(support + i * support_size + c, mask=in_support, other=0)
    acc = tl.zeros((BW, BS), tl.float32)
    for start in range(0, size, BK):
        k = start + tl.arange(0, BK)
        deep = k < size
        row = (w * sequences + i).to(tl.int64)
        h = tl.load(hidden + row[:, None] * size + k[None, :], mask=world_ok[:, None] & deep[None, :], other=0.0)
        e = tl.load(head + ids[None, :] * size + k[:, None], mask=in_support[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(h, e, acc, input_precision=PRECISION)
    place = (i * worlds + w).to(tl.int64)
    ok = world_ok[:, None] & in_support[None, :]
    tl.store(logits + place[:, None] * support_size + c[None, :], acc, mask=ok)
    u = tl.load(coins + i * support_size + c, mask=in_support, other=0.0)
    score = tl.where(in_support[None, :], acc + tl.load(temperature + i) * u[None, :], -float("inf"))
    tied = (score == tl.max(score, 1)[:, None]) & in_support[None, :]
    choice = tl.min(tl.where(tied, ids[None, :], 0x7FFFFFFF), 1)
    tl.store(votes + place, choice, mask=world_ok)


def public_keys(hidden: Tensor, head: Tensor, columns: int = 64, depth: int = 64, num_warps: int = 4) -> Tensor:
    """hidden (n, d), head (V, d) → keys (n, V) int64, largest for the best token, unique."""
    (n, size), vocabulary = hidden.shape, head.shape[0]
    keys = hidden.new_empty((n, vocabulary), dtype=torch.int64)
    rows = 16 if n <= 16 else 64
    _keys[(triton.cdiv(vocabulary, columns), triton.cdiv(n, rows))](
        hidden, head, keys, n, size, vocabulary,
        PRECISION=precision_of(head.dtype), BM=rows, BN=columns, BK=depth, num_warps=num_warps,
    )  # fmt: skip
    return keys


def cast_votes(
    hidden: Tensor, head: Tensor, support: Tensor, coins: Tensor, temperature: Tensor,
    worlds_per_program: int = 16, depth: int = 32, num_warps: int = 4,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """hidden (W, n, d), support (n, k), coins (n, k), temperature (n,) → votes (n, W) int64, logits (n, W, k)."""
    worlds, n, size = hidden.shape
    k = support.shape[1]
    votes = support.new_empty((n, worlds))
    logits = coins.new_empty((n, worlds, k))
    _vote[(n, triton.cdiv(worlds, worlds_per_program))](
        hidden, head, support, coins, temperature, votes, logits, n, worlds, size, k,
        PRECISION=precision_of(head.dtype), BW=worlds_per_program, BS=max(16, triton.next_power_of_2(k)), BK=depth,
        num_warps=num_warps,
    )  # fmt: skip
    return votes, logits
