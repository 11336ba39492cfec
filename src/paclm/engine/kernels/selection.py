"""The k largest of unique integer keys; its plain twin is `torch.topk`.

A tournament: blocks of keys are cut down to their best, those are laid side by side, and so on until one block is
left. Keys are unique, so the answer is the same however the rounds are arranged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _best_of_block(keys, best, width, kept, BLOCK: tl.constexpr, KEEP: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(keys + row * width + c, mask=c < width, other=-9223372036854775808)
    top = tl.topk(x, KEEP)  # descending
    place = best + (row * tl.num_programs(0) + block) * kept + tl.arange(0, KEEP)
    tl.store(place, top, mask=tl.arange(0, KEEP) < kept)


def largest(keys: Tensor, k: int, block: int = 2048, num_warps: int = 8) -> Tensor:
    """keys (n, V) int64, no two equal in a row → the k largest of each row, descending (n, k)."""
    keep = triton.next_power_of_2(k)
    block = max(block, 2 * keep)
    while True:
        n, width = keys.shape
        blocks = triton.cdiv(width, block)
        kept = k if blocks == 1 else keep
        best = torch.empty((n, blocks * kept), dtype=torch.int64, device=keys.device)
        _best_of_block[(blocks, n)](keys, best, width, kept, BLOCK=block, KEEP=keep, num_warps=num_warps)
        if blocks == 1:
            return best
        keys = best
