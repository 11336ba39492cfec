"""Variants of the decode step: the cost of each choice, and the time of a step kernel by kernel."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu_timing import (
    DEVICE,
    DTYPES,
    SUPPORT,
    blocks_for,
    graphed,
    milliseconds,
    prompts_of,
    shaped,
    step_ms,
    step_of,
    warm,
)
from paclm.engine.decode_step import PlainStep
from paclm.engine.determinism import set_deterministic
from paclm.engine.fused import BFLOAT16, FLOAT32, Choices, FusedModel, fit
from paclm.engine.graphs import FusedStep
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.products import Tile, multiply
from paclm.engine.kernels.selection import support_of
from sections import Clock, attempt, tidy

_ONE_BF16 = {
    "default": BFLOAT16,
    "own deep products": replace(BFLOAT16, deep=Tile(64, 64, 64, 6, num_stages=4)),
    "attention lane by lane": replace(BFLOAT16, dots=False),
    "1024 columns together": replace(BFLOAT16, chunk=1024),
    "4 warps for rows": replace(BFLOAT16, row_warps=4),
}
_ONE_FP32 = {
    "default": FLOAT32,
    "vendor's products": replace(FLOAT32, wide=None, square=None, deep=None),
    "4 splits of deep products": replace(FLOAT32, deep=Tile(32, 128, 32, 4, num_stages=4)),
    "narrower tiles": replace(FLOAT32, wide=Tile(32, 64, 32, 2, num_stages=4)),
    "1024 columns together": replace(FLOAT32, chunk=1024),
    "attention by dots": replace(FLOAT32, dots=True),
    "4 warps for rows": replace(FLOAT32, row_warps=4),
}
_MANY = {
    "default": BFLOAT16,
    "32 positions together": replace(BFLOAT16, block=32),
    "inner products with the rows": replace(BFLOAT16, inner_from=10**6),
}
SETS: tuple[tuple[str, torch.dtype, int, dict[str, Choices]], ...] = (
    ("gpt2", torch.bfloat16, 1, _ONE_BF16),
    ("gpt2", torch.float32, 1, _ONE_FP32),
    ("gpt2", torch.bfloat16, 100, _MANY),
    ("llama", torch.bfloat16, 100, _MANY),
)

PROMPTS = {"llama": 2000, "gpt2": 1000}
"""Tokens of the longest prompt to read, by family."""
PARTS = ([16], [44], [64], [128], [256], [512], [47] * 6 + [46] * 5)
"""Lengths of the prompts that one pass reads."""
SIZES = ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 4), (torch.bfloat16, 16), (torch.bfloat16, 64), (torch.bfloat16, 100))  # fmt: skip  # noqa: E501
_CUTS = ((64, 64, 64), (64, 32, 64), (32, 64, 64), (128, 64, 64), (64, 32, 128), (32, 32, 64), (16, 64, 64), (64, 64, 32), (32, 64, 32), (64, 128, 32), (32, 128, 32))  # fmt: skip  # noqa: E501
_SPLITS = {"attention_in": (1, 2, 3), "attention_out": (2, 3, 4, 6), "mlp_in": (1, 2), "mlp_out": (3, 4, 6, 8)}


def tiles_of(dtype: torch.dtype, part: str, depth: int) -> list[Tile]:
    """Tile sizes to try for one of the four products of a layer."""
    cuts = [cut for cut in _CUTS if (dtype == torch.bfloat16) != (cut[2] == 32 or cut[0] == 16)]
    if dtype == torch.float32:
        cuts = [(rows, columns, min(deep, 32)) for rows, columns, deep in cuts] + [(32, 32, 64), (16, 64, 64)]
    tiles = [Tile(*cut, splits, 4, 4) for cut in cuts for splits in _SPLITS[part]]
    return [tile for tile in dict.fromkeys(tiles) if fit(tile, depth) == tile]


# --- compiling ahead, in many processes -------------------------------------------------------------------------------


def compile_ahead(sections: Sequence[str], workers: int = 14) -> None:
    """Compile everything to be measured, once on one layer, in separate processes, into Triton's cache."""
    jobs: list[tuple[Any, ...]] = []
    if "variants" in sections:
        jobs += [(family, dtype, n, choices) for family, dtype, n, ways in SETS for choices in ways.values()]
    if {"one", "streams", "costs"} & set(sections):
        jobs += [(family, dtype, n, None) for family in ("gpt2", "llama") for dtype, n in SIZES]
    if "prefill" in sections:
        jobs += [(family, lengths) for family in PROMPTS for lengths in PARTS]
    if "products" in sections:
        jobs += [(dtype, part, i) for dtype in DTYPES.values() for part in _SPLITS for i in range(3)]
    with multiprocessing.get_context("fork").Pool(workers, set_deterministic) as pool:
        pool.map(_compile, jobs, chunksize=1)


def _compile(job: tuple[Any, ...]) -> None:
    if len(job) == 3:
        dtype, part, third = job
        w = shaped("gpt2", dtype, 128, layers=1)
        weight = getattr(w.blocks[0], part).weight
        x = torch.randn(w.num_worlds, weight.shape[0], device=DEVICE, dtype=dtype)
        for tile in tiles_of(dtype, part, weight.shape[0])[third::3]:
            attempt(multiply, x, weight, tile)
        return
    if len(job) == 2:
        family, lengths = job
        context = PROMPTS[family]
        model = FusedModel(shaped(family, torch.bfloat16, 128, layers=1, context=context), blocks_for(1, context))
        attempt(model.prefill, prompts_of(lengths, context))
        return
    family, dtype, n, choices = job
    model = FusedModel(shaped(family, dtype, 128, layers=1), blocks_for(n, 96), choices=choices)
    attempt(step_ms, FusedStep(model, SUPPORT), n, 96, False, 1)


# --- measuring --------------------------------------------------------------------------------------------------------


def variants(clock: Clock) -> dict[str, Any]:
    """Milliseconds of a step for every set of choices, with a profile of the default one."""
    found: dict[str, Any] = {}
    for family, dtype, n, ways in SETS:
        key = f"{family} {str(dtype)[6:]} {n}"
        if clock.is_out(3):
            found[key] = "skipped: out of time"
            continue
        model = FusedModel(shaped(family, dtype, 128), blocks_for(n, 96))
        warm(model)
        step, row = FusedStep(model, SUPPORT), {}
        for label, choices in ways.items():
            model.choices = choices
            row[label] = "skipped: out of time" if clock.is_out(3) else attempt(step_ms, step, n, 96)
        model.choices = ways["default"]
        row["profile"] = attempt(profile, step_of(step, n, 96))
        found[key] = row
        del model, step
        tidy()
    return found


def profile(run: Callable[[], object]) -> dict[str, str]:
    """Microseconds of each kernel of one call, launched one by one."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    run()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]].append(event.device_time)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {name: f"{sum(each):.0f} us in {len(each)}" for name, each in ranked[:14]}


def products(clock: Clock) -> dict[str, Any]:
    """The best tiles of the four products of one sequence, and the vendor's time; microseconds a layer."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        w = shaped("gpt2", dtype, 128)
        for part in _SPLITS:
            weights = [getattr(block, part).weight for block in w.blocks]
            x = torch.randn(w.num_worlds, weights[0].shape[0], device=DEVICE, dtype=dtype)
            times = {"vendor": per_layer_us(partial(_vendor, x, weights), len(weights))}
            for tile in tiles_of(dtype, part, weights[0].shape[0]):
                if not clock.is_out(2):
                    label = f"{tile.rows}x{tile.columns}x{tile.depth}, {tile.splits} splits"
                    times[label] = attempt(per_layer_us, partial(_own, x, weights, tile), len(weights))
            ranked = sorted((time, label) for label, time in times.items() if isinstance(time, float))
            found[f"{str(dtype)[6:]} {part}"] = {label: time for time, label in ranked}
        del w
        tidy()
    return found


def _vendor(x: torch.Tensor, weights: Sequence[torch.Tensor], i: int) -> object:
    return torch.mm(x, weights[i])


def _own(x: torch.Tensor, weights: Sequence[torch.Tensor], tile: Tile, i: int) -> object:
    return multiply(x, weights[i], tile)


def per_layer_us(launch: Callable[[int], object], layers: int) -> float:
    """Microseconds per launch, one for each layer in turn, so that weights come from memory as they do in a step."""
    return 1e3 / layers * milliseconds(graphed(lambda: [launch(i) for i in range(layers)]), 20, 3)


def ballots(clock: Clock) -> dict[str, Any]:
    """Everything after the last layer, bfloat16 and float32, microseconds per step."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        w = shaped("gpt2", dtype, 128, layers=1)
        for n in (1, 100) if dtype == torch.bfloat16 else (1,):
            hidden = torch.randn(w.num_worlds, n, w.hidden_size, device=DEVICE, dtype=dtype)
            allowed = torch.full((n, -(-w.head.shape[0] // 32)), -1, dtype=torch.int32, device=DEVICE)
            keys, largest = public_keys(hidden[-1], w.head, allowed)
            support, numbers = support_of(keys, largest, SUPPORT), torch.randn(n, SUPPORT + 1, device=DEVICE)
            plain = PlainStep(FusedModel(w, 2), SUPPORT)
            runs: dict[str, Callable[[], object]] = {"vendor logits": partial(plain.public_logits, hidden[-1])}
            for columns, depth, warps in ((64, 64, 4), (128, 64, 4), (32, 128, 4), (64, 128, 8)):
                runs[f"keys {columns}x{depth}, {warps} warps"] = partial(
                    public_keys, hidden[-1], w.head, allowed, columns, depth, warps
                )
            runs["support"] = partial(support_of, keys, largest, SUPPORT)
            runs["topk of keys"] = partial(torch.topk, keys, SUPPORT)
            for worlds, depth, warps in ((16, 64, 8), (16, 64, 4), (32, 64, 8), (64, 64, 8), (16, 32, 4)):
                runs[f"votes {worlds}x{depth}, {warps} warps"] = partial(
                    cast_votes, hidden, w.head, support, numbers, worlds, depth, warps
                )
            found[f"{str(dtype)[6:]} {n}"] = {
                label: attempt(graph_us, run) for label, run in runs.items() if not clock.is_out(1)
            }
        tidy()
    return found


def graph_us(run: Callable[[], object]) -> float:
    return 1e3 * milliseconds(graphed(run), 20, 3)
