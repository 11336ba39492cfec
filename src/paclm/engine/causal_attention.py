"""Causal attention of whole rows, as training needs it: torch's own, or by plain products where that is faster.

torch's kernel for bfloat16 on a CPU takes three times as long as these products for rows of 128 tokens, and twice as
long for 512, most of it in the backward pass. Scores and softmax are float32 in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LONGEST = 512  # the scores of longer rows take memory, a square of their length
_QUERIES = 128  # at a time


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (rows, heads, length, size), k and v with as many heads or fewer → (rows, heads, length, size)."""
    rows, heads, length, size = q.shape
    shared = heads // k.shape[1]  # queries of one key
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or length > _LONGEST:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1)
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    flat = (each.reshape(rows * heads, length, size) for each in (q, k, v))
    mixed: Tensor = _ByProducts.apply(*flat)  # type: ignore[no-untyped-call]
    return mixed.view(rows, heads, length, size)


class _ByProducts(torch.autograd.Function):
    """q, k, v (n, length, size), some queries at a time: half of the products, and scores that stay in the cache."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, size = q.shape[1:]
        mixed, kept = torch.empty_like(q), []
        scaled, keys = q.float() * size**-0.5, k.float()
        for start, end in _spans(length):
            future = torch.full((end - start, end), float("-inf")).triu_(start + 1)
            scores = torch.baddbmm(future, scaled[:, start:end], keys[:, :end].mT)  # (n, queries, end)
            shares = torch.softmax(scores, -1).to(q.dtype)
            mixed[:, start:end] = torch.bmm(shares, v[:, :end])
            kept.append(shares)
        ctx.save_for_backward(q, k, v, *kept)
        return mixed

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *kept = ctx.saved_tensors
        length, size = q.shape[1:]
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros(k.shape), torch.zeros(v.shape)  # sums in float32
        for (start, end), shares in zip(_spans(length), kept, strict=True):
            slope = outer[0][:, start:end]
            of_shares = torch.bmm(slope, v[:, :end].mT)
            of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype).mul_(size**-0.5)
            of_q[:, start:end] = torch.bmm(of_scores, k[:, :end])
            of_k[:, :end] += torch.bmm(of_scores.mT, q[:, start:end])
            of_v[:, :end] += torch.bmm(shares.mT, slope)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _spans(length: int) -> list[tuple[int, int]]:
    """First and last query of each part."""
    return [(start, min(start + _QUERIES, length)) for start in range(0, length, _QUERIES)]
