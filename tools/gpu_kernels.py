"""Kernel by kernel: what each launch of a decode step takes, and other cuts of the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_timing import DEVICE, DTYPES, SUPPORT, TOKENS, Clock, attempt, graphed, milliseconds, small_gpt2, tidy, warm
from paclm.engine.fused import FusedModel
from paclm.engine.kernels.attention import attend
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.norms import normalise_rows
from paclm.engine.kernels.products import GELU_TANH, Tile, multiply, precision_of
from paclm.engine.kernels.selection import largest
from paclm.engine.steps import PlainStep
from paclm.engine.weights import Weights

LAYERS = 12


def per_layer_us(launch: Callable[[int], object]) -> float:
    """Microseconds per launch, one for each layer in turn, so that weights come from memory as they do in a step."""
    return 1e3 / LAYERS * milliseconds(graphed(lambda: [launch(i) for i in range(LAYERS)]))


def layer_parts(dtype: torch.dtype) -> dict[str, Any]:
    """Every launch of one layer, one sequence, m = 128, context 96."""
    w = small_gpt2(dtype, 128)
    model = FusedModel(w, 1)
    warm(model)
    rows, precision, tiles, blocks = w.num_worlds, precision_of(dtype), model.choices.few, w.blocks
    stream, out = (torch.randn(rows, 768, device=DEVICE, dtype=dtype) for _ in range(2))
    joined, wide = (torch.randn(rows, size, device=DEVICE, dtype=dtype) for size in (2304, 3072))
    positions = torch.full((1,), 95, device=DEVICE)
    inner, by_head, by_tile = (
        torch.randn(rows, 8, sums, device=DEVICE) for sums in (1, 12, 3072 // tiles.mlp_in.columns)
    )
    after_attention, after_mlp = (
        torch.zeros(tile.splits, rows, 768, device=DEVICE) for tile in (tiles.attention_out, tiles.mlp_out)
    )

    def attention(i: int, block: int = 32, warps: int = 2) -> None:
        keys, values = model.cache.keys[i], model.cache.values[i]
        attend(joined, keys, values, positions, w, blocks[i].attention_out, out, by_head, block, warps)

    def first_norm(i: int) -> None:
        normalise_rows(stream, blocks[i].norm_attention, out, 1, after_mlp, blocks[i].attention_in, inner)

    def mlp_in(i: int) -> None:
        multiply(
            stream, blocks[i].mlp_in, wide, 1, tiles.mlp_in, precision, None, GELU_TANH, blocks[i].mlp_out, by_tile
        )  # fmt: skip

    def vendor(part: str, x: torch.Tensor, i: int) -> torch.Tensor:
        product = getattr(blocks[i], part)
        return torch.addmm(product.bias, x, product.weight)

    times = {
        "norm+add+A": attempt(per_layer_us, first_norm),
        "qkv": attempt(
            per_layer_us,
            lambda i: multiply(stream, blocks[i].attention_in, joined, 1, tiles.attention_in, precision, inner),
        ),
        "attention": attempt(per_layer_us, attention),
        "attention_out": attempt(
            per_layer_us,
            lambda i: multiply(
                stream, blocks[i].attention_out, after_attention, 1, tiles.attention_out, precision, by_head
            ),
        ),
        "norm+add": attempt(
            per_layer_us, lambda i: normalise_rows(stream, blocks[i].norm_mlp, out, 1, after_attention)
        ),
        "mlp_in": attempt(per_layer_us, mlp_in),
        "mlp_out": attempt(
            per_layer_us, lambda i: multiply(wide, blocks[i].mlp_out, after_mlp, 1, tiles.mlp_out, precision, by_tile)
        ),
    }
    for part, x in (("attention_in", stream), ("attention_out", stream), ("mlp_in", stream), ("mlp_out", wide)):
        times[f"vendor {part}, 129 rows"] = attempt(per_layer_us, partial(vendor, part, x))
        times[f"vendor {part}, 128 rows"] = attempt(per_layer_us, partial(vendor, part, x[:128]))
    for block, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)):
        times[f"attention block {block} warps {warps}"] = attempt(
            per_layer_us, partial(attention, block=block, warps=warps)
        )
    return times | ballot_parts(w, model)


def ballot_parts(w: Weights, model: FusedModel) -> dict[str, Any]:
    """Everything after the last layer, microseconds per step."""
    hidden = torch.randn(w.num_worlds, 1, 768, device=DEVICE, dtype=w.dtype)
    public = hidden[-1]
    logits = torch.randn(1, w.head.shape[0], device=DEVICE)
    keys = public_keys(public, w.head)
    support = torch.randperm(TOKENS, device=DEVICE)[:SUPPORT].unsqueeze(0)
    coins, tau = torch.randn(1, SUPPORT, device=DEVICE), torch.ones(1, device=DEVICE)
    plain = PlainStep(model, SUPPORT)
    token, position = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.full((1,), 95, device=DEVICE)
    runs: dict[str, Callable[[], object]] = {
        "embed": lambda: model._embed(token, position),
        "public keys 64x64": lambda: public_keys(public, w.head),
        "public keys 128x64": lambda: public_keys(public, w.head, 128, 64, 4),
        "public keys 32x128": lambda: public_keys(public, w.head, 32, 128, 4),
        "public keys 64x128": lambda: public_keys(public, w.head, 64, 128, 4),
        "public keys 64x256": lambda: public_keys(public, w.head, 64, 256, 8),
        "vendor public logits": lambda: plain.public_logits(public),
        "topk of int64 keys": lambda: torch.topk(keys, SUPPORT, dim=-1),
        "topk of float32": lambda: torch.topk(logits, SUPPORT, dim=-1),
        "largest 1024, 4 warps": lambda: largest(keys, SUPPORT, 1024, 4),
        "largest 1024, 8 warps": lambda: largest(keys, SUPPORT, 1024, 8),
        "largest 2048, 8 warps": lambda: largest(keys, SUPPORT, 2048, 8),
        "largest 4096, 16 warps": lambda: largest(keys, SUPPORT, 4096, 16),
        "sort of int64 keys": lambda: torch.sort(keys, dim=-1, descending=True),
        "votes 16x32": lambda: cast_votes(hidden, w.head, support, coins, tau),
        "votes 16x64, 8 warps": lambda: cast_votes(hidden, w.head, support, coins, tau, 16, 64, 8),
        "votes 32x32, 8 warps": lambda: cast_votes(hidden, w.head, support, coins, tau, 32, 32, 8),
    }
    return {label: attempt(lambda f: 1e3 * milliseconds(graphed(f)), run) for label, run in runs.items()}


def product_us(w: Weights, part: str, tile: Tile, rows: int) -> float:
    """Microseconds of one of the four products, cut as `tile` says."""
    products = [getattr(block, part) for block in w.blocks]
    size, width = products[0].weight.shape
    x = torch.randn(rows, size, device=DEVICE, dtype=w.dtype)
    sums = {"attention_in": 1, "attention_out": 12, "mlp_out": 48}.get(part)
    inner = torch.randn(rows, 8, sums, device=DEVICE) if sums else None
    is_first = part == "mlp_in"
    inner_next = torch.empty(rows, 8, -(-width // tile.columns), device=DEVICE) if is_first else None
    y = torch.empty(tile.splits, rows, width, device=DEVICE) if part.endswith("out") else x.new_empty(rows, width)

    def launch(i: int) -> None:
        block = w.blocks[i % len(w.blocks)]
        multiply(
            x, getattr(block, part), y, rows // w.num_worlds, tile, precision_of(w.dtype), inner,
            GELU_TANH if is_first else 0, block.mlp_out if is_first else None, inner_next,
        )  # fmt: skip

    return per_layer_us(launch)


SPLITS = {"attention_in": (1,), "mlp_in": (1,), "attention_out": (1, 2, 3, 4), "mlp_out": (2, 4, 6, 8)}
CUTS = {
    "bf16": [(64, 64, 64), (64, 32, 64), (32, 64, 64), (64, 32, 128), (128, 32, 64), (128, 64, 64), (32, 32, 64)],
    "fp32": [(64, 64, 32), (64, 32, 32), (32, 64, 32), (128, 32, 32), (64, 64, 64), (64, 32, 64)],
}


def best_tiles(name: str, clock: Clock) -> dict[str, list[str]]:
    """The best cuts of each product for one sequence, and the first failures."""
    w = small_gpt2(DTYPES[name], 128, LAYERS)
    found = {}
    for part, splits in SPLITS.items():
        times: dict[str, Any] = {}
        for cut in CUTS[name]:
            for split in splits:
                for warps, stages in ((4, 3), (4, 5), (8, 3)) if split == splits[-1] else ((4, 3),):
                    if clock.is_out():
                        break
                    tile = Tile(*cut, splits=split, num_warps=warps, num_stages=stages)
                    label = f"{cut[0]}x{cut[1]}x{cut[2]} splits {split} warps {warps} stages {stages}"
                    times[label] = attempt(product_us, w, part, tile, w.num_worlds)
        ranked = sorted((time, label) for label, time in times.items() if isinstance(time, float))
        failed = [f"{label}: {time}" for label, time in times.items() if not isinstance(time, float)]
        found[f"{name} {part}"] = [f"{time:.2f} µs {label}" for time, label in ranked[:6]] + failed[:2]
    tidy()
    return found
