"""The decode step by Triton kernels between the products: each cached key and each adapter is read once.

    rows: add, norm, A ─► q,k,v product ─► attention: bias, B, rotation, cache, A ─► output product
    ─► rows: bias, B, add, norm ─► MLP product ─► rows: bias, activation, A ─► MLP output product ─► rows: …

The products themselves are the vendor's in bfloat16 and ours in float32. CUDA only. Prefill, and models the kernels do
not cover, run the plain twin this class inherits from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paclm.engine.kernels.attention import attend
from paclm.engine.kernels.products import Tile, multiply
from paclm.engine.kernels.rows import GELU_TANH, SILU_GATED, activate_rows, normalise_rows
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import Product, Weights

_ACTIVATIONS = {("gelu_new", False): GELU_TANH, ("gelu_pytorch_tanh", False): GELU_TANH, ("silu", True): SILU_GATED}


NARROW = Tile(32, 64, 32, splits=4)
WIDE = Tile(32, 64, 32, splits=2)
MANY = Tile(128, 64, 32, num_warps=8)


@dataclass(frozen=True, slots=True)
class Choices:
    """How the step is cut up; speed only."""

    narrow: Tile = NARROW
    """float32 products of a few rows with fewer columns than inputs, or as many"""
    wide: Tile = WIDE
    """float32 products of a few rows with more columns than inputs"""
    many: Tile = MANY
    """float32 products of many rows"""
    few_rows: int = 512
    own_products: bool = True
    """Our float32 products; False: the vendor's"""
    fold_rows: int = 1024
    """Up to this many rows attention adds the adapters of q, k and v itself"""
    lanes: int = 16
    attention_warps: int = 1
    attention_stages: int = 3
    row_warps: int = 4
    chunk: int = 512


def uncovered(weights: Weights) -> str | None:
    """Why the kernels cannot run this model; None when they can."""
    size = weights.head_size
    if size & (size - 1) or size < 16:
        return f"a head of {size} numbers is no power of two"
    if (weights.activation_name, weights.is_gated) not in _ACTIVATIONS:
        return f"the activation {weights.activation_name} is not among the kernels"
    if weights.blocks[0].norm_query is not None:
        return "queries and keys are normalised"
    return None


def fit(tile: Tile, depth: int) -> Tile | None:
    """The tile with as many splits as the inputs divide into; None where they do not even divide into its depth."""
    if depth % tile.depth:
        return None
    splits = tile.splits
    while depth % (splits * tile.depth):
        splits -= 1
    return replace(tile, splits=splits)


class FusedModel(StackedModel):
    """All worlds and the public model; `decode` by kernels."""

    def __init__(self, weights: Weights, num_slots: int, choices: Choices | None = None) -> None:
        super().__init__(weights, num_slots)
        self.choices = choices or Choices()
        self._activation = _ACTIVATIONS[weights.activation_name, weights.is_gated]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots; hidden states (W, n, d). Reads what is there, whatever `reach`."""
        w, o, n = self.weights, self.choices, tokens.shape[0]
        stream = self._embed(tokens, positions).view(w.num_worlds * n, -1)  # (rows, d)
        normed = torch.empty_like(stream)
        attended = stream.new_empty(stream.shape[0], w.num_heads * w.head_size)
        parts: Tensor | None = None
        inner: Tensor | None = None
        before: Product | None = None
        for layer, block in enumerate(w.blocks):
            inner_in = _inner(stream, block.attention_in)
            normalise_rows(
                stream, block.norm_attention, normed, n, parts, before, inner, block.attention_in, inner_in, o.row_warps
            )
            parts = self._product(normed, block.attention_in)
            if inner_in is not None and stream.shape[0] > o.fold_rows:
                _add_adapters(parts, block.attention_in, inner_in)
                inner_in = None
            inner = _inner(stream, block.attention_out, w.num_kv_heads)
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            attend(
                parts, inner_in, keys, values, positions, w, block, attended, inner,
                o.lanes, o.attention_warps, o.attention_stages,
            )  # fmt: skip
            parts = self._product(attended, block.attention_out)
            inner_in = _inner(stream, block.mlp_in)
            normalise_rows(
                stream,
                block.norm_mlp,
                normed,
                n,
                parts,
                block.attention_out,
                inner,
                block.mlp_in,
                inner_in,
                o.row_warps,
            )
            parts = self._product(normed, block.mlp_in)
            active = stream.new_empty(stream.shape[0], block.mlp_out.weight.shape[0])
            inner = activate_rows(
                parts, block.mlp_in, active, n, self._activation, inner_in, block.mlp_out, o.chunk, o.row_warps
            )
            parts, before = self._product(active, block.mlp_out), block.mlp_out
        normalise_rows(stream, w.norm, normed, n, parts, before, inner, num_warps=o.row_warps)
        return normed.view(w.num_worlds, n, -1)

    def _product(self, x: Tensor, product: Product) -> Tensor:
        """The base product without its bias, as parts (splits, rows, out) still to be added up."""
        o, (depth, width) = self.choices, product.weight.shape
        tile = fit(o.many if x.shape[0] > o.few_rows else o.wide if width > depth else o.narrow, depth)
        if x.dtype != torch.float32 or not o.own_products or tile is None:
            return torch.mm(x, product.weight).unsqueeze(0)
        return multiply(x, product.weight, tile)


def _inner(stream: Tensor, product: Product, *sums: int) -> Tensor | None:
    """Room for the inner products of a product's adapters: (rows, parts·r), or (rows, r, sums)."""
    if product.A is None:
        return None
    return torch.empty(stream.shape[0], product.A.shape[1], *sums, device=stream.device)


def _add_adapters(parts: Tensor, product: Product, inner: Tensor) -> None:
    """Add B · inner to the first of the parts, world by world."""
    if product.B is None:
        return
    worlds, rank, width = product.B.shape
    y = parts[0].view(worlds, -1, width)
    u = inner.to(y.dtype).view(worlds, -1, inner.shape[1])
    start = 0
    for part, size in enumerate(product.parts):
        columns = slice(start, start + size)
        y[:, :, columns].baddbmm_(u[:, :, part * rank : (part + 1) * rank], product.B[:, :, columns])
        start += size
