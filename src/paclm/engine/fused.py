"""The forward pass by Triton kernels between the products: each cached key and each adapter is read once.

    rows: add, norm, A ─► q,k,v product ─► attention: bias, B, rotation, cache, A ─► output product
    ─► rows: bias, B, add, norm ─► MLP product ─► rows: bias, activation, A ─► MLP output product ─► rows: …

`Choices` selects the implementation of each product. CUDA only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import PromptChunk, TableArray
from paclm.engine.kernels.attention import attend
from paclm.engine.kernels.products import Tile, multiply
from paclm.engine.kernels.prompts import TILE, attend_prompts, place_rows
from paclm.engine.kernels.rows import (
    GELU_TANH,
    SILU_GATED,
    activate_rows,
    embed_rows,
    inner_products,
    normalise_rows,
)
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import Block, Norm, Product, Weights

Attention = Callable[[int, Block, Tensor, Tensor | None, Tensor], Tensor | None]
"""(layer, its block, parts of its product, inner products of q, k and v, out) → inner products of the output layer."""

_ACTIVATIONS = {("gelu_new", False): GELU_TANH, ("gelu_pytorch_tanh", False): GELU_TANH, ("silu", True): SILU_GATED}


@dataclass(frozen=True, slots=True)
class Choices:
    """Tiles and launch settings; speed only."""

    wide: Tile | None
    """Products of a few rows with more columns than inputs; None: cuBLAS"""
    square: Tile | None
    """Products of a few rows with as many columns as inputs"""
    deep: Tile | None
    """Products of a few rows with fewer columns than inputs"""
    many: Tile | None
    """Products of many rows"""
    few_rows: int = 512
    dots: bool = True
    """Attention on tensor cores"""
    block: int = 16
    """Positions that attention takes at a time"""
    attention_stages: int = 2
    trunk_block: int = 64
    """The same in the trunk, where few programs have the whole GPU"""
    trunk_warps: int = 4
    row_warps: int = 8
    many_row_warps: int = 4
    chunk: int = 512
    inner_from: int = 8
    """From this many sequences on, the inner products of adapters are separate launches"""


FLOAT32 = Choices(
    wide=Tile(32, 128, 32, splits=2, num_stages=4),
    square=Tile(32, 128, 32, splits=4, num_stages=4),
    deep=Tile(32, 128, 32, splits=8, num_stages=4),
    many=Tile(128, 64, 32, num_warps=8),
    dots=False,
)
BFLOAT16 = Choices(wide=None, square=None, deep=None, many=None)
DEFAULTS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


def uncovered(weights: Weights) -> str | None:
    """Why the kernels do not cover this model; None if they do."""
    size = weights.head_size
    if size & (size - 1) or size < 16:
        return f"its head size {size} is not a power of two of at least 16"
    if weights.num_heads // weights.num_kv_heads > 16:
        return "more than 16 heads share their keys"
    if (weights.activation_name, weights.is_gated) not in _ACTIVATIONS:
        return f"the activation {weights.activation_name} is not among the kernels"
    if weights.blocks[0].norm_query is not None:
        return "queries and keys are normalised"
    return None


def fit(tile: Tile, depth: int) -> Tile | None:
    """The tile with at most its splits, so that they divide the inputs; None if its depth does not."""
    if depth % tile.depth:
        return None
    splits = tile.splits
    while depth % (splits * tile.depth):
        splits -= 1
    return replace(tile, splits=splits)


class FusedModel(StackedModel):
    """All worlds and the public model by kernels."""

    def __init__(self, weights: Weights, num_blocks: int, page: int = 16, choices: Choices | None = None) -> None:
        super().__init__(weights, num_blocks, page)
        self.choices = choices or DEFAULTS[weights.dtype]
        self._activation = _ACTIVATIONS[weights.activation_name, weights.is_gated]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor, reach: int) -> Tensor:
        """One token for each of n sequences; hidden states (W, n, d). Ignores `reach`."""
        w, o = self.weights, self.choices

        def attention(layer: int, block: Block, parts: Tensor, inner_in: Tensor | None, out: Tensor) -> Tensor | None:
            inner = _inner(out, block.attention_out, w.num_kv_heads)
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            together, warps = (o.trunk_block, o.trunk_warps) if layer < w.trunk else (o.block, 1)
            attend(
                parts, inner_in, keys, values, positions, table, w, block, out, inner, o.dots, together,
                o.attention_stages, warps,
            )  # fmt: skip
            return inner

        return self._forward(tokens, positions, attention)

    @torch.inference_mode()
    def read(self, tokens: Tensor, positions: Tensor, sequences: Tensor, tiles: Tensor, table: Tensor) -> Tensor:
        """T tokens of several sequences, their rows of the table in `sequences` (T,); hidden states (W, T, d).

        T is a multiple of 16; tiles as in `attend_prompts`.
        """
        w = self.weights
        queries = torch.empty(w.num_worlds * tokens.shape[0], w.num_heads * w.head_size, device=w.device, dtype=w.dtype)

        def attention(layer: int, block: Block, parts: Tensor, inner_in: Tensor | None, out: Tensor) -> Tensor | None:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            place_rows(parts, inner_in, keys, values, queries, positions, sequences, table, w, block)
            attend_prompts(queries, keys, values, out, tiles, table, w, tokens.shape[0])
            inner = _inner(out, block.attention_out, 1)
            if inner is not None:
                inner_products(out, block.attention_out, tokens.shape[0], inner)
            return inner

        return self._forward(tokens, positions, attention)

    def prefill(self, chunk: PromptChunk) -> Tensor:
        """Parts of several prompts; hidden states (W, T, d)."""
        size, pages = -(-max(len(chunk.tokens), 8 * len(chunk.starts)) // 16) * 16, chunk.table.shape[1]
        layout = torch.from_numpy(lay_out(chunk, size, pages)).to(self.weights.device)
        return self.read(*views_of(layout, size, pages))[:, : len(chunk.tokens)]

    def _forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """All layers for n rows of each world; hidden states (W, n, d)."""
        w, n = self.weights, tokens.shape[0]
        stream = embed_rows(w, tokens, positions)  # (rows, d)
        normed = torch.empty_like(stream)
        attended = stream.new_empty(stream.shape[0], w.num_heads * w.head_size)
        parts: Tensor | None = None
        inner: Tensor | None = None
        before: Product | None = None
        for layer, block in enumerate(w.blocks):
            if layer == w.trunk > 0:
                self._normalise(stream, block.norm_attention, normed, n, parts, before, None, None)
                stream, parts, before = stream.repeat(w.num_worlds, 1), None, None
                normed, attended = torch.empty_like(stream), attended.new_empty(stream.shape[0], attended.shape[1])
            inner_in = self._normalise(
                stream, block.norm_attention, normed, n, parts, before, inner, block.attention_in
            )
            inner = attention(layer, block, self._product(normed, block.attention_in), inner_in, attended)
            parts = self._product(attended, block.attention_out)
            inner_in = self._normalise(
                stream, block.norm_mlp, normed, n, parts, block.attention_out, inner, block.mlp_in
            )
            active, inner = self._activate(self._product(normed, block.mlp_in), block, n, inner_in)
            parts, before = self._product(active, block.mlp_out), block.mlp_out
        self._normalise(stream, w.norm, normed, n, parts, before, inner, None)
        return normed.view(w.num_worlds, n, -1)

    def _normalise(
        self, stream: Tensor, norm: Norm, out: Tensor, n: int,
        parts: Tensor | None, before: Product | None, inner: Tensor | None, after: Product | None,
    ) -> Tensor | None:  # fmt: skip
        """Add the product before, normalise into `out`; the inner products of the adapters of the product after."""
        o = self.choices
        inner_out = None if after is None else _inner(stream, after)
        if n < o.inner_from:
            normalise_rows(stream, norm, out, n, parts, before, inner, after, inner_out, o.row_warps)
            return inner_out
        normalise_rows(stream, norm, out, n, parts, before, inner, num_warps=o.many_row_warps)
        if after is not None and inner_out is not None:
            inner_products(out, after, n, inner_out)
        return inner_out

    def _activate(self, parts: Tensor, block: Block, n: int, inner_in: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The MLP between its two products, and the inner products of the second one's adapters."""
        o = self.choices
        active = torch.empty(
            parts.shape[1], block.mlp_out.weight.shape[0], device=parts.device, dtype=self.weights.dtype
        )
        if n < o.inner_from:
            inner = activate_rows(
                parts, block.mlp_in, active, n, self._activation, inner_in, block.mlp_out, o.chunk, o.row_warps
            )
            return active, inner
        activate_rows(parts, block.mlp_in, active, n, self._activation, inner_in, None, o.chunk, o.many_row_warps)
        inner = _inner(active, block.mlp_out, 1)
        if inner is not None:
            inner_products(active, block.mlp_out, n, inner)
        return active, inner

    def _product(self, x: Tensor, product: Product) -> Tensor:
        """The base product without its bias, as parts (splits, rows, out) that are still to be summed."""
        o, (depth, width) = self.choices, product.weight.shape
        few = o.wide if width > depth else o.square if width == depth else o.deep
        chosen = o.many if x.shape[0] > o.few_rows else few
        tile = fit(chosen, depth) if chosen is not None else None
        return torch.mm(x, product.weight).unsqueeze(0) if tile is None else multiply(x, product.weight, tile)


def _inner(stream: Tensor, product: Product, *sums: int) -> Tensor | None:
    """An empty tensor for the inner products of a product's adapters: (rows, parts·r), or (rows, r, sums)."""
    if product.A is None:
        return None
    return torch.empty(stream.shape[0], product.A.shape[1], *sums, device=stream.device)


def most_parts(tokens: int) -> int:
    """Parts of prompts that a pass of so many tokens has room for; each needs a tile of attention of its own."""
    return tokens // 8


def _shapes(tokens: int, pages: int) -> list[tuple[int, ...]]:
    """Of tokens, positions, sequences, tiles and table."""
    parts = most_parts(tokens)
    return [(tokens,), (tokens,), (tokens,), (4, parts + tokens // TILE), (parts + 1, pages)]


def views_of(layout: Tensor, tokens: int, pages: int) -> list[Tensor]:
    """The arguments of `FusedModel.read` in one tensor of `lay_out`."""
    shapes = _shapes(tokens, pages)
    parts = torch.split(layout, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def lay_out(chunk: PromptChunk, tokens: int, pages: int) -> TableArray:
    """A chunk as one array for a pass of `tokens` tokens; what is padded goes to the scratch block."""
    sizes = [math.prod(shape) for shape in _shapes(tokens, pages)]
    layout = np.zeros(sum(sizes), dtype=np.int32)
    ids, positions, sequences, tiles, table = np.split(layout, np.cumsum(sizes)[:-1])
    parts, used = len(chunk.starts), len(chunk.tokens)
    ends = np.cumsum(chunk.lengths)
    ids[:used] = chunk.tokens
    positions[:used] = np.arange(used) + np.repeat(chunk.starts - (ends - chunk.lengths), chunk.lengths)
    sequences[:used] = np.repeat(np.arange(parts), chunk.lengths)
    sequences[used:] = most_parts(tokens)  # the last row of the table stays empty
    rows = [
        (part, end - length + at, start + at, min(TILE, length - at))
        for part, (start, length, end) in enumerate(
            zip(chunk.starts.tolist(), chunk.lengths.tolist(), ends.tolist(), strict=True)
        )
        for at in range(0, length, TILE)
    ]
    tiles.reshape(4, -1)[:, : len(rows)] = np.array(rows, dtype=np.int32).reshape(-1, 4).T
    table.reshape(-1, pages)[:parts, : chunk.table.shape[1]] = chunk.table
    return layout
