"""The decode step by Triton kernels: seven launches a layer, each cached key and each adapter read once.

    norm + A ─► q,k,v product + B ─► attention + cache write + A ─► output product + B (split)
    ─► add + norm ─► MLP product + activation + A ─► MLP output product + B (split) ─► add + norm + A …

CUDA only. Prefill, and models the kernels do not cover, run the plain twin this class inherits from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paclm.engine.kernels.attention import attend
from paclm.engine.kernels.norms import normalise_rows
from paclm.engine.kernels.products import GELU_TANH, PLAIN, SILU_GATED, Tile, multiply, precision_of
from paclm.engine.stacked import StackedModel, apply_product, normalise
from paclm.engine.weights import Block, Product, Weights

_ACTIVATIONS = {("gelu_new", False): GELU_TANH, ("gelu_pytorch_tanh", False): GELU_TANH, ("silu", True): SILU_GATED}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How each product of a layer is cut."""

    attention_in: Tile
    attention_out: Tile
    mlp_in: Tile
    mlp_out: Tile


FEW_ROWS = Tiles(  # one sequence: as many programs as multiprocessors, products with few columns split along K
    attention_in=Tile(64, 64, 64),
    attention_out=Tile(64, 64, 64, splits=3),
    mlp_in=Tile(64, 64, 64),
    mlp_out=Tile(64, 64, 64, splits=4),
)
MANY_ROWS = Tiles(
    attention_in=Tile(128, 64, 64),
    attention_out=Tile(128, 64, 64),
    mlp_in=Tile(128, 64, 64),
    mlp_out=Tile(128, 64, 64),
)


@dataclass(frozen=True, slots=True)
class Choices:
    """What runs as a kernel of ours; speed only."""

    fused_rows: int = 1024
    """Up to this many rows products are fused with their adapters; beyond, the vendor's products are faster."""
    few: Tiles = FEW_ROWS
    many: Tiles = MANY_ROWS
    few_rows: int = 512
    attention_block: int = 32
    attention_warps: int = 2
    norm_warps: int = 4


def fit(tile: Tile, product: Product) -> Tile:
    """The tile with as many splits as the inputs divide into, and no column tile across two parts."""
    depth = product.weight.shape[0]
    splits, columns = tile.splits, tile.columns
    while splits > 1 and depth % (splits * tile.depth):
        splits -= 1
    while any(size % columns for size in product.parts[:-1]):
        columns //= 2
    return replace(tile, splits=splits, columns=columns)


def _fit_all(tiles: Tiles, block: Block) -> Tiles:
    return Tiles(
        fit(tiles.attention_in, block.attention_in),
        fit(tiles.attention_out, block.attention_out),
        fit(tiles.mlp_in, block.mlp_in),
        fit(tiles.mlp_out, block.mlp_out),
    )


def uncovered(weights: Weights) -> str | None:
    """Why the kernels cannot run this model; None when they can."""
    size = weights.head_size
    if size & (size - 1) or size < 16:
        return f"a head of {size} numbers is no power of two"
    if (weights.activation_name, weights.is_gated) not in _ACTIVATIONS:
        return f"the activation {weights.activation_name} is not among the kernels"
    block = weights.blocks[0]
    if block.norm_query is not None:
        return "queries and keys are normalised"
    if block.mlp_in.A is not None:
        return "the first MLP product is adapted"
    products = (block.attention_in, block.attention_out, block.mlp_in, block.mlp_out)
    if any(size % 64 for product in products for size in (product.weight.shape[0], *product.parts)):
        return "a layer's size is no multiple of 64"
    return None


class FusedModel(StackedModel):
    """All worlds and the public model; `decode` by kernels."""

    def __init__(self, weights: Weights, num_slots: int, choices: Choices | None = None) -> None:
        super().__init__(weights, num_slots)
        self.choices = choices or Choices()
        self._precision = precision_of(weights.dtype)
        self._activation = _ACTIVATIONS[weights.activation_name, weights.is_gated]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots; hidden states (W, n, d). Reads what is there, whatever `reach`."""
        w, n = self.weights, tokens.shape[0]
        stream = self._embed(tokens, positions).view(w.num_worlds * n, -1)  # (rows, d)
        if stream.shape[0] > self.choices.fused_rows:
            return self._with_plain_products(stream, positions)
        tiles = self.choices.few if stream.shape[0] <= self.choices.few_rows else self.choices.many
        tiles = _fit_all(tiles, w.blocks[0])
        parts: Tensor | None = None
        for layer, block in enumerate(w.blocks):
            attended, inner = self._attention(stream, parts, layer, block, positions, tiles)
            parts = self._product(attended, block.attention_out, tiles.attention_out, n, inner)
            normed = torch.empty_like(stream)
            normalise_rows(stream, block.norm_mlp, normed, n, parts, num_warps=self.choices.norm_warps)
            parts = self._mlp(normed, block, tiles, n)
        out = torch.empty_like(stream)
        normalise_rows(stream, w.norm, out, n, parts, num_warps=self.choices.norm_warps)
        return out.view(w.num_worlds, n, -1)

    def _attention(
        self, stream: Tensor, parts: Tensor | None, layer: int, block: Block, positions: Tensor, tiles: Tiles
    ) -> tuple[Tensor, Tensor | None]:
        n, product = positions.shape[0], block.attention_in
        normed = torch.empty_like(stream)
        inner = _inner(stream, product, 1)
        normalise_rows(stream, block.norm_attention, normed, n, parts, product, inner, self.choices.norm_warps)
        joined = stream.new_empty(stream.shape[0], product.weight.shape[1])
        multiply(normed, product, joined, n, tiles.attention_in, self._precision, inner)
        return self._attend(joined, layer, block, positions)

    def _attend(self, joined: Tensor, layer: int, block: Block, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        w, choices = self.weights, self.choices
        out = joined.new_empty(joined.shape[0], w.num_heads * w.head_size)
        inner = _inner(joined, block.attention_out, w.num_kv_heads)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        attend(
            joined, keys, values, positions, w, block.attention_out, out, inner,
            choices.attention_block, choices.attention_warps,
        )  # fmt: skip
        return out, inner

    def _product(self, x: Tensor, product: Product, tile: Tile, n: int, inner: Tensor | None) -> Tensor:
        """Parts (splits, rows, out) in float32, for the next norm to add."""
        parts = torch.empty(tile.splits, x.shape[0], product.weight.shape[1], device=x.device)
        multiply(x, product, parts, n, tile, self._precision, inner, PLAIN)
        return parts

    def _mlp(self, normed: Tensor, block: Block, tiles: Tiles, n: int) -> Tensor:
        width = block.mlp_out.weight.shape[0]
        wide = normed.new_empty(normed.shape[0], width)
        inner = _inner(normed, block.mlp_out, -(-width // tiles.mlp_in.columns))
        multiply(
            normed, block.mlp_in, wide, n, tiles.mlp_in, self._precision,
            activation=self._activation, following=block.mlp_out, inner_next=inner,
        )  # fmt: skip
        return self._product(wide, block.mlp_out, tiles.mlp_out, n, inner)

    def _with_plain_products(self, stream: Tensor, positions: Tensor) -> Tensor:
        """Many rows: the vendor's products and batched adapters, our attention."""
        w = self.weights
        x = stream.view(w.num_worlds, -1, stream.shape[1])
        for layer, block in enumerate(w.blocks):
            joined = apply_product(normalise(x, block.norm_attention), block.attention_in)
            out, _ = self._attend(joined.flatten(0, 1), layer, block, positions)
            x = self._finish(x, out.view(w.num_worlds, x.shape[1], -1), block)
        return normalise(x, w.norm)


def _inner(like: Tensor, product: Product, sums: int) -> Tensor | None:
    """Room for the inner products of a product's adapters: (rows, parts·r, sums)."""
    if product.A is None:
        return None
    return torch.empty(like.shape[0], product.A.shape[1], sums, device=like.device)
