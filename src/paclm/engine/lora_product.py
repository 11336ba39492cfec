"""A frozen product with one trained adapter per world, and its gradient written out by hand.

    y = x W + b,   y[w] += (x[w] A_wᵀ) B_wᵀ         x (places, in), world by world; B already scaled by α / r

The base weight gets no gradient, so a backward pass is one base product and four thin ones, done in place. Layers
that read the same input (q, k, v) are one product: A one below the other, B block-diagonal.

         │ A_q │              ┌ B_q       ┐
    A =  │ A_k │        B  =  │    B_k    │        more zeros to multiply, fewer and wider passes over memory
         │ A_v │              └       B_v ┘

`prepare_adapters` casts and joins the adapters of all decoder blocks together: block by block, launches from the host
would leave a GPU idle. With dropout, an adapter reads x with some entries set to zero and the others scaled up; the
base product reads all of x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ProductAdapter:
    """The adapters of one product, ready to be multiplied."""

    A: Tensor  # (G, parts · r, in)
    B: Tensor  # (G, width, parts · r), scaled
    first: int  # the adapted outputs are first … first + width


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which entries of an adapter's input are left out; one mask for all layers of a product."""

    probability: float
    generator: torch.Generator

    def keep(self, x: Tensor) -> Tensor:
        """A mask of the shape of x."""
        return torch.rand(x.shape, generator=self.generator, device=x.device) >= self.probability


@dataclass(frozen=True, slots=True)
class FrozenProduct:
    """Base layers with the same input as one product."""

    names: tuple[str, ...]
    weight: Tensor  # (in, out)
    bias: Tensor | None  # (out,)
    widths: tuple[int, ...]  # output size of each layer, in order

    def __call__(self, x: Tensor, adapter: ProductAdapter | None, dropout: Dropout | None = None) -> Tensor:
        """x (places, in) → (places, out)."""
        if adapter is None:
            return _base_product(x, self.weight, self.bias)
        result: Tensor = _AdaptedProduct.apply(  # type: ignore[no-untyped-call]
            x,
            self.weight,
            self.bias,
            adapter.A,
            adapter.B,
            adapter.first,
            None if dropout is None else dropout.keep(x),
            1.0 if dropout is None else 1.0 / (1.0 - dropout.probability),
        )
        return result


def prepare_adapters(
    products: Sequence[FrozenProduct], A: Mapping[str, Tensor], B: Mapping[str, Tensor], scale: float
) -> list[ProductAdapter | None]:
    """The adapters of the same product in every block, in the type of its weight; None where a block has none.

    A (G, r, in) and B (G, out, r) are by layer. Blocks of one shape, of which the same parts are adapted, are prepared
    together.
    """
    ready: list[ProductAdapter | None] = [None] * len(products)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for block, product in enumerate(products):
        parts = tuple(part for part, name in enumerate(product.names) if name in A)
        if parts:
            alike.setdefault((parts, product.widths), []).append(block)
    for (parts, widths), blocks in alike.items():
        dtype = products[blocks[0]].weight.dtype
        names = [[products[block].names[part] for block in blocks] for part in parts]
        down = [torch.stack([A[name] for name in same]) for same in names]  # (blocks, G, r, in) each
        up = [torch.stack([B[name] for name in same]) for same in names]  # (blocks, G, out, r) each
        columns = [(sum(widths[:part]), sum(widths[: part + 1])) for part in parts]
        joined_A = down[0] if len(parts) == 1 else torch.cat(down, 2)
        joined_B = up[0] if len(parts) == 1 else block_diagonal(columns, up)
        each_A = joined_A.to(dtype).unbind()
        each_B = (scale * joined_B).to(dtype).unbind()
        for block, own_A, own_B in zip(blocks, each_A, each_B, strict=True):
            ready[block] = ProductAdapter(own_A, own_B, columns[0][0])
    return ready


def block_diagonal(columns: Sequence[tuple[int, int]], up: Sequence[Tensor]) -> Tensor:
    """B (…, out, r) of parts that yield these columns, as one (…, from the first column to the last, parts · r)."""
    rank = up[0].shape[-1]
    placed = []
    reached = columns[0][0]
    for part, ((first, last), B) in enumerate(zip(columns, up, strict=True)):
        placed.append(functional.pad(B, (part * rank, (len(up) - 1 - part) * rank, first - reached, 0)))
        reached = last
    return torch.cat(placed, -2)


def _base_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        A: Tensor,
        B: Tensor,
        first: int,
        keep: Tensor | None,
        gain: float,
    ) -> Tensor:
        y = _base_product(x, weight, bias)  # (places, out)
        inner = torch.bmm(_by_world(_dropped(x, keep, gain), A), A.mT)  # (G, rows, parts · r)
        _by_world(y, A).narrow(2, first, B.shape[1]).baddbmm_(inner, B.mT)
        ctx.save_for_backward(x, weight, A, B, inner, keep)
        ctx.first, ctx.gain = first, gain
        return y

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, A, B, inner, keep = ctx.saved_tensors
        slope = outer[0].contiguous()  # (places, out)
        adapted = _by_world(slope, A).narrow(2, ctx.first, B.shape[1])  # (G, rows, width)
        inner_slope = torch.bmm(adapted, B)  # (G, rows, parts · r)
        A_slope = None
        if ctx.needs_input_grad[3]:
            A_slope = torch.bmm(inner_slope.mT, _by_world(_dropped(x, keep, ctx.gain), A))  # (G, parts · r, in)
        B_slope = torch.bmm(inner.mT, adapted).mT  # (G, width, parts · r)
        x_slope = None
        if ctx.needs_input_grad[0]:
            x_slope = torch.mm(slope, weight.T)  # (places, in)
            if keep is None:
                _by_world(x_slope, A).baddbmm_(inner_slope, A)
            else:
                x_slope += _dropped(torch.bmm(inner_slope, A).view_as(x_slope), keep, ctx.gain)
        return x_slope, None, None, A_slope, B_slope, None, None, None


def _dropped(x: Tensor, keep: Tensor | None, gain: float) -> Tensor:
    return x if keep is None else (x * gain).masked_fill_(~keep, 0.0)


def _by_world(x: Tensor, A: Tensor) -> Tensor:
    """x (places, n), world by world → (G, rows, n)."""
    return x.view(A.shape[0], -1, x.shape[1])
