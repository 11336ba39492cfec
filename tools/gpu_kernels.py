"""Kernel by kernel: what each launch of a decode step takes, and other cuts of the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_timing import DEVICE, SUPPORT, TOKENS, Clock, attempt, graphed, milliseconds, small_gpt2, tidy, warm
from paclm.engine.fused import FusedModel, fit
from paclm.engine.kernels.attention import attend
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.products import Tile, multiply
from paclm.engine.kernels.rows import GELU_TANH, activate_rows, normalise_rows
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
    rows, blocks = w.num_worlds, w.blocks
    stream, normed, attended = (torch.randn(rows, 768, device=DEVICE, dtype=dtype) for _ in range(3))
    active = torch.randn(rows, 3072, device=DEVICE, dtype=dtype)
    joined, wide, narrow = (
        model._product(x, product)
        for x, product in ((normed, blocks[0].attention_in), (normed, blocks[0].mlp_in), (active, blocks[0].mlp_out))
    )
    positions = torch.full((1,), 95, device=DEVICE)
    inner, by_head = torch.randn(rows, 8, device=DEVICE), torch.randn(rows, 8, 12, device=DEVICE)

    def attention(i: int, lanes: int = 16, warps: int = 1, stages: int = 3) -> None:
        keys, values = model.cache.keys[i], model.cache.values[i]
        attend(joined, inner, keys, values, positions, w, blocks[i], attended, by_head, lanes, warps, stages)

    def first_norm(i: int, warps: int = 4) -> None:
        block = blocks[i]
        normalise_rows(
            stream, block.norm_attention, normed, 1, narrow, block.mlp_out, by_head, block.attention_in, inner, warps
        )

    def second_norm(i: int, warps: int = 4) -> None:
        normalise_rows(stream, blocks[i].norm_mlp, normed, 1, narrow, blocks[i].attention_out, by_head, num_warps=warps)

    def activation(i: int, chunk: int = 512, warps: int = 4) -> None:
        activate_rows(wide, blocks[i].mlp_in, active, 1, GELU_TANH, None, blocks[i].mlp_out, chunk, warps)

    def product(part: str, x: torch.Tensor, i: int) -> object:
        return model._product(x, getattr(blocks[i], part))

    def vendor(part: str, x: torch.Tensor, i: int) -> object:
        return torch.mm(x, getattr(blocks[i], part).weight)

    times = {"norm+A": attempt(per_layer_us, first_norm), "norm": attempt(per_layer_us, second_norm)}
    times |= {"attention": attempt(per_layer_us, attention), "activation": attempt(per_layer_us, activation)}
    for part, x in (("attention_in", stream), ("attention_out", stream), ("mlp_in", stream), ("mlp_out", active)):
        times[part] = attempt(per_layer_us, partial(product, part, x))
        if dtype == torch.float32:
            times[f"vendor {part}"] = attempt(per_layer_us, partial(vendor, part, x))
    for warps in (2, 8):
        times[f"norm+A, {warps} warps"] = attempt(per_layer_us, partial(first_norm, warps=warps))
        times[f"norm, {warps} warps"] = attempt(per_layer_us, partial(second_norm, warps=warps))
    for chunk, warps in ((256, 2), (1024, 4), (1024, 8)):
        times[f"activation, chunk {chunk}, {warps} warps"] = attempt(
            per_layer_us, partial(activation, chunk=chunk, warps=warps)
        )
    for lanes, warps, stages in ((16, 1, 1), (16, 1, 2), (16, 1, 4), (16, 1, 6), (32, 1, 2), (32, 2, 3), (16, 2, 3), (8, 1, 4)):  # fmt: skip  # noqa: E501
        times[f"attention, {lanes} lanes, {warps} warps, {stages} stages"] = attempt(
            per_layer_us, partial(attention, lanes=lanes, warps=warps, stages=stages)
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


def product_us(w: Weights, part: str, tile: Tile) -> float:
    """Microseconds of one of the four products, cut as `tile` says."""
    x = torch.randn(w.num_worlds, getattr(w.blocks[0], part).weight.shape[0], device=DEVICE, dtype=w.dtype)
    return per_layer_us(lambda i: multiply(x, getattr(w.blocks[i], part).weight, tile))


SPLITS = {"attention_in": (1, 2, 3), "attention_out": (2, 3, 4, 6), "mlp_in": (1, 2, 3), "mlp_out": (4, 6, 8, 12)}
CUTS = [
    (32, 64, 32),
    (16, 64, 64),
    (16, 128, 32),
    (32, 64, 64),
    (32, 128, 32),
    (64, 64, 32),
    (64, 32, 32),
    (16, 64, 32),
]


def best_tiles(clock: Clock) -> dict[str, list[str]]:
    """The best cuts of each float32 product for one sequence, and the first failures."""
    w = small_gpt2(torch.float32, 128, LAYERS)
    times: dict[str, dict[str, Any]] = {part: {} for part in SPLITS}
    for cut in CUTS:
        for warps, stages in ((4, 3), (4, 4)):
            for part, splits in SPLITS.items():
                for split in splits:
                    tile = Tile(*cut, splits=split, num_warps=warps, num_stages=stages)
                    label = f"{cut[0]}x{cut[1]}x{cut[2]}, {split} splits, {warps} warps, {stages} stages"
                    if not clock.is_out() and fit(tile, getattr(w.blocks[0], part).weight.shape[0]) == tile:
                        times[part][label] = attempt(product_us, w, part, tile)
    found = {}
    for part, measured in times.items():
        ranked = sorted((time, label) for label, time in measured.items() if isinstance(time, float))
        failed = [f"{label}: {time}" for label, time in measured.items() if not isinstance(time, float)]
        found[part] = [f"{time:.2f} µs {label}" for time, label in ranked[:6]] + failed[:2]
    tidy()
    return found
