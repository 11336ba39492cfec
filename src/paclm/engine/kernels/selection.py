"""The support from the public model's packed keys; its plain twin is `decode_step.top_tokens`.

Keys come with the largest of every small group. The k-th largest of those is a bound that at least k keys reach and few
others do. Keys that reach it are laid side by side, in whatever order, and each finds its place by counting how many
are larger: keys are unique, so the answer does not depend on that order. Keys of tokens that a mask forbids are passed
over; where fewer than k are left, the support ends with -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 32
"""Keys per group"""
FORBIDDEN = -(2**63)
"""The key of a token that the mask forbids; below the key of every logit."""


@triton.jit
def _bound(largest, bounds, counts, groups, k, BLOCK: tl.constexpr):
    """The largest number that k groups reach, found by halving; the smallest of all where there are fewer groups."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x = tl.load(largest + row * groups + c, mask=c < groups, other=-9223372036854775808) >> 32
    low = tl.full((), -2147483648, tl.int64)  # reached by k, or the smallest
    high = tl.full((), 2147483648, tl.int64)  # not reached by k
    for _ in range(32):
        middle = (low + high) >> 1
        enough = tl.sum((x >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    tl.store(bounds + row, low)
    tl.store(counts + row, 0)


@triton.jit
def _gather(keys, bounds, counts, chosen, width, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Lay the keys of one block that reach the bound behind those of the other blocks."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(keys + row * width + c, mask=c < width, other=LEAST)
    reaches = ((x >> 32) >= tl.load(bounds + row)) & (x != LEAST)
    before = tl.cumsum(reaches.to(tl.int32), 0)
    first = tl.atomic_add(counts + row, tl.sum(reaches.to(tl.int32), 0))
    tl.store(chosen + row * width + first + before - 1, x, mask=reaches)


@triton.jit
def _place(chosen, counts, support, width, k, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Each key's place is the number of larger ones; its token id goes there."""
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + row)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(chosen + row * width + c, mask=c < count, other=0)
        rank = tl.zeros((BLOCK,), tl.int32)
        for other in range(0, count, STEP):
            o = other + tl.arange(0, STEP)
            y = tl.load(chosen + row * width + o, mask=o < count, other=-9223372036854775808)
            rank += tl.sum((y[None, :] > x[:, None]).to(tl.int32), 1)
        tl.store(support + row * k + rank, 0x7FFFFFFF - (x & 0x7FFFFFFF), mask=(c < count) & (rank < k))


def support_of(keys: Tensor, largest: Tensor, k: int) -> Tensor:
    """keys (n, V) int64, no two equal in a row, and the largest of each group (n, V / GROUP) → token ids (n, k).

    In the order of their keys, largest first; -1 at the end where fewer than k are allowed.
    """
    n, width = keys.shape
    groups = largest.shape[1]
    bounds = torch.empty(n, dtype=torch.int64, device=keys.device)
    counts = torch.empty(n, dtype=torch.int32, device=keys.device)
    chosen, support = torch.empty_like(keys), keys.new_full((n, k), -1)
    _bound[(n,)](largest, bounds, counts, groups, k, BLOCK=triton.next_power_of_2(groups), num_warps=4)
    _gather[(triton.cdiv(width, 1024), n)](
        keys, bounds, counts, chosen, width, LEAST=FORBIDDEN, BLOCK=1024, num_warps=4
    )
    _place[(8, n)](chosen, counts, support, width, k, BLOCK=64, STEP=128, num_warps=4)
    return support
