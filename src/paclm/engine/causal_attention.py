"""Causal attention of whole rows, as training needs it: torch's own, or by plain products where that is faster.

torch's kernel for bfloat16 on a CPU takes four times as long as these products for rows of a hundred tokens, most of it
in the backward pass. Scores and softmax are float32 in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LONGEST = 512  # the scores of longer rows leave a CPU's cache


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
    """q, k, v (n, length, size)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, size = q.shape[1:]
        future = torch.full((length, length), float("-inf")).triu_(1)
        scores = torch.baddbmm(future, q.float(), k.float().mT, alpha=size**-0.5)  # (n, length, length)
        shares = torch.softmax(scores, -1).to(q.dtype)
        ctx.save_for_backward(q, k, v, shares)
        return torch.bmm(shares, v)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        q, k, v, shares = ctx.saved_tensors
        (slope,) = outer
        of_shares = torch.bmm(slope, v.mT)
        of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype).mul_(q.shape[2] ** -0.5)
        return torch.bmm(of_scores, k), torch.bmm(of_scores.mT, q), torch.bmm(shares.mT, slope)
