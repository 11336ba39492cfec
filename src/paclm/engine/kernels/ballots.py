"""The two ends of a ballot; plain twins: `top_tokens` (its keys) and `support_logits` with `coupled_votes`.

`public_keys`: the public model's logits over the whole vocabulary, packed with the token id into one sortable integer;
those of tokens that the mask forbids are below all others.
`cast_votes`: every world's logits inside the support, the shared coins added, the best token of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paclm.engine.kernels.products import precision_of
from paclm.engine.kernels.selection import FORBIDDEN, GROUP


@triton.jit
def _keys(
    hidden, head, allowed, keys, largest, sequences, size, vocabulary, words, LEAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SMALL: tl.constexpr,
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
    place = allowed + m.to(tl.int64)[:, None] * words + (n // 32)[None, :]
    word = tl.load(place, mask=row_ok[:, None] & col_ok[None, :], other=0)
    packed = tl.where(((word >> (n % 32)[None, :]) & 1) != 0, packed, LEAST)
    place = keys + m.to(tl.int64)[:, None] * vocabulary + n[None, :]
    tl.store(place, packed, mask=row_ok[:, None] & col_ok[None, :])
    best = tl.max(tl.reshape(packed, (BM, BN // SMALL, SMALL)), 2)
    groups = tl.cdiv(vocabulary, SMALL)
    group = tl.program_id(0) * (BN // SMALL) + tl.arange(0, BN // SMALL)
    place = largest + m.to(tl.int64)[:, None] * groups + group[None, :]
    tl.store(place, best, mask=row_ok[:, None] & (group < groups)[None, :])


@triton.jit
def _vote(
    hidden, head, support, numbers, outcome, logits, sequences, worlds, size, support_size,
    PRECISION: tl.constexpr, BW: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.arange(0, BS)
    world_ok = w < worlds
    written_ids = tl.load(support + i * support_size + c, mask=c < support_size, other=-1)
    in_support = written_ids >= 0  # -1: the mask allows fewer tokens
    ids = tl.where(in_support, written_ids, 0)
    acc = tl.zeros((BW, BS), tl.float32)
    for start in range(0, size, BK):
        k = start + tl.arange(0, BK)
        deep = k < size
        row = (w * sequences + i).to(tl.int64)
        h = tl.load(hidden + row[:, None] * size + k[None, :], mask=world_ok[:, None] & deep[None, :], other=0.0)
        e = tl.load(head + ids[None, :] * size + k[:, None], mask=in_support[None, :] & deep[:, None], other=0.0)
        acc = tl.dot(h, e, acc, input_precision=PRECISION)
    place = (i * worlds + w).to(tl.int64)
    ok = world_ok[:, None] & (c < support_size)[None, :]
    acc = tl.where(in_support[None, :], acc, -float("inf"))
    tl.store(logits + place[:, None] * support_size + c[None, :], acc, mask=ok)
    u = tl.load(numbers + i * (support_size + 1) + c, mask=in_support, other=0.0)
    tau = tl.load(numbers + i * (support_size + 1) + support_size)
    score = tl.where(in_support[None, :], acc + tau * u[None, :], -float("inf"))
    tied = (score == tl.max(score, 1)[:, None]) & in_support[None, :]
    choice = tl.min(tl.where(tied, ids[None, :], 0x7FFFFFFF), 1)  # no token id if the support is empty
    written = outcome + i * (support_size + worlds)
    tl.store(written + support_size + w, choice.to(tl.int32), mask=world_ok)
    is_first = c + tl.program_id(1) * support_size < support_size  # one program writes the support
    tl.store(written + c, written_ids.to(tl.int32), mask=is_first)


def public_keys(
    hidden: Tensor, head: Tensor, allowed: Tensor, columns: int = 64, depth: int = 64, num_warps: int = 4
) -> tuple[Tensor, Tensor]:
    """hidden (n, d), head (V, d) → keys (n, V) int64, unique, largest for the best token; the largest of each group.

    allowed: (n, ⌈V / 32⌉) int32, a bit for each token; the keys of others are `FORBIDDEN`.
    """
    (n, size), vocabulary = hidden.shape, head.shape[0]
    keys = hidden.new_empty((n, vocabulary), dtype=torch.int64)
    largest = hidden.new_empty((n, triton.cdiv(vocabulary, GROUP)), dtype=torch.int64)
    rows = 16 if n <= 16 else 64
    _keys[(triton.cdiv(vocabulary, columns), triton.cdiv(n, rows))](
        hidden, head, allowed, keys, largest, n, size, vocabulary, allowed.shape[1], LEAST=FORBIDDEN,
        PRECISION=precision_of(head.dtype), BM=rows, BN=columns, BK=depth, SMALL=GROUP, num_warps=num_warps,
    )  # fmt: skip
    return keys, largest


def cast_votes(
    hidden: Tensor, head: Tensor, support: Tensor, numbers: Tensor,
    worlds_per_program: int = 16, depth: int = 64, num_warps: int = 8,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """hidden (W, n, d), support (n, k), numbers (n, k + 1): coins and temperature → outcome, logits (n, W, k).

    The outcome (n, k + W), int32, holds the support and after it the votes.
    """
    worlds, n, size = hidden.shape
    k = support.shape[1]
    outcome = support.new_empty((n, k + worlds), dtype=torch.int32)
    logits = numbers.new_empty((n, worlds, k))
    _vote[(n, triton.cdiv(worlds, worlds_per_program))](
        hidden, head, support, numbers, outcome, logits, n, worlds, size, k,
        PRECISION=precision_of(head.dtype), BW=worlds_per_program, BS=max(16, triton.next_power_of_2(k)), BK=depth,
        num_warps=num_warps,
    )  # fmt: skip
    return outcome, logits
