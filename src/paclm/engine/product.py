"""A frozen product with one trained adapter per world, and its gradient written out by hand.

    y = x W + b,   y[w] += scale · (x[w] A_wᵀ) B_w         x (places, in), world by world

The base weight gets no gradient, so a backward pass is one base product and four thin ones, done in place. Layers
that read the same input (q, k, v) are parts of one product: their inputs are read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class FrozenProduct:
    """Base layers side by side, with the name of each."""

    names: tuple[str, ...]
    weight: Tensor
    """(in, out)"""
    bias: Tensor | None
    """(out,)"""
    widths: tuple[int, ...]
    """Output size of each layer, in order."""

    def __call__(self, x: Tensor, A: Mapping[str, Tensor], B: Mapping[str, Tensor], scale: float) -> Tensor:
        """x (places, in) → (places, out), with the adapters A (G, r, in), B (G, out, r) of the layers that have one."""
        columns, down, up = [], [], []
        first = 0
        for name, width in zip(self.names, self.widths, strict=True):
            if name in A:
                columns.append((first, first + width))
                down.append(A[name].to(x.dtype))
                up.append(B[name].to(x.dtype).transpose(1, 2))  # (G, r, width)
            first += width
        if not columns:
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        stacked = down[0] if len(down) == 1 else torch.cat(down, 1)  # (G, parts · r, in)
        if x.is_cuda and len(up) > 1:
            columns, up = _joined(columns, up)
        result: Tensor = _AdaptedProduct.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, stacked, scale, tuple(columns), *up
        )
        return result


def _joined(columns: list[tuple[int, int]], up: list[Tensor]) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The parts as one block-diagonal part: more zeros to multiply, fewer and wider passes over memory."""
    begin, end = columns[0][0], columns[-1][1]
    placed = [
        functional.pad(B, (first - begin, end - last)) for (first, last), B in zip(columns, up, strict=True)
    ]  # (G, r, end - begin) each
    return [(begin, end)], [torch.cat(placed, 1)]


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        scale: float,
        columns: tuple[tuple[int, int], ...],
        *up: Tensor,
    ) -> Tensor:
        worlds, rank = A.shape[0], up[0].shape[1]
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)  # (places, out)
        grouped, wide = x.view(worlds, -1, x.shape[1]), y.view(worlds, -1, y.shape[1])
        inner = torch.bmm(grouped, A.transpose(1, 2))  # (G, rows, parts · r)
        for part, ((first, last), B) in enumerate(zip(columns, up, strict=True)):
            own = inner[..., part * rank : (part + 1) * rank]
            wide[..., first:last].baddbmm_(own, B, alpha=scale)
        ctx.save_for_backward(x, weight, A, inner, *up)
        ctx.scale, ctx.columns = scale, columns
        return y

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, A, inner, *up = ctx.saved_tensors
        worlds, rank = A.shape[0], up[0].shape[1]
        slope = outer[0].contiguous()  # (places, out)
        grouped, wide = x.view(worlds, -1, x.shape[1]), slope.view(worlds, -1, slope.shape[1])
        inner_slope = torch.empty_like(inner)  # (G, rows, parts · r)
        up_slopes = []
        for part, ((first, last), B) in enumerate(zip(ctx.columns, up, strict=True)):
            place = slice(part * rank, (part + 1) * rank)
            own = wide[..., first:last]
            inner_slope[..., place].baddbmm_(own, B.transpose(1, 2), beta=0, alpha=ctx.scale)
            up_slopes.append(torch.bmm(inner[..., place].transpose(1, 2), own).mul_(ctx.scale))  # (G, r, part)
        A_slope = torch.bmm(inner_slope.transpose(1, 2), grouped)  # (G, parts · r, in)
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope = torch.mm(slope, weight.T)  # (places, in)
            x_slope.view(worlds, -1, x.shape[1]).baddbmm_(inner_slope, A)
        return x_slope, None, None, A_slope, None, None, *up_slopes
