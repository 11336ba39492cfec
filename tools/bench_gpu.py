"""Time the decode step of all worlds on one GPU: GPT-2-small shape, random weights, votes included.

    python3 tools/bench_gpu.py --out results [--sections correct,one,...] [--seconds 230]

Needs torch with CUDA, triton, transformers, numpy and safetensors; no model files, no network. Every section stands
alone: a failure is written down and the next one runs; results.json is rewritten after each, and what does not fit
into the time limit is listed as skipped. `floor` is the larger of bytes ÷ bandwidth and flops ÷ peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_kernels import best_tiles, layer_parts
from gpu_timing import (
    CAPACITY,
    DEVICE,
    DTYPES,
    SUPPORT,
    TOKENS,
    Clock,
    attempt,
    floor_ms,
    graphed,
    milliseconds,
    small_gpt2,
    small_llama,
    tidy,
    warm,
)
from paclm.engine.determinism import check_repeatable, set_deterministic
from paclm.engine.engine import Ballot, Engine
from paclm.engine.fused import Choices, FusedModel, uncovered
from paclm.engine.graphs import FusedStep, GraphStep
from paclm.engine.stacked import StackedModel
from paclm.engine.steps import PlainStep, Step
from paclm.engine.weights import Weights

VENDOR = Choices(own_products=False)


def step_ms(model: StackedModel, step: PlainStep, sequences: int, context: int, use_graph: bool = True) -> float:
    """Device time of one step, votes included, every sequence at the last position of `context`."""
    tokens = torch.randint(0, TOKENS, (sequences,), device=DEVICE)
    positions = torch.full((sequences,), context - 1, device=DEVICE)
    coins = torch.randn(sequences, SUPPORT, device=DEVICE)
    tau = torch.ones(sequences, device=DEVICE)

    @torch.inference_mode()
    def run() -> object:
        return step.run(tokens, positions, coins, tau, context)

    return milliseconds(graphed(run) if use_graph else run, 20 if sequences > 8 else 50)


def wall_ms(model: StackedModel, sequences: int) -> float:
    """Host time of a whole step of a generate loop: copies, replay, copy back, append."""
    engine = Engine(model, SUPPORT, 128, graph_of(model))
    generator = np.random.default_rng(0)
    handles = [engine.add(generator.integers(0, TOKENS, 64).tolist()) for _ in range(sequences)]
    coins = generator.gumbel(size=(sequences, SUPPORT))
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        ballot = engine.step(handles, coins)
        for handle, token in zip(handles, ballot.public, strict=True):
            engine.append(handle, int(token))
        times.append(time.perf_counter() - begun)
    return 1e3 * float(np.median(times[5:]))


def graph_of(model: StackedModel) -> GraphStep:
    is_plain = not isinstance(model, FusedModel)
    return GraphStep(FusedStep(model, SUPPORT), model, SUPPORT, reads_whole_reach=is_plain)


# --- is it right? -----------------------------------------------------------------------------------------------------


def section_correct(clock: Clock) -> dict[str, Any]:
    """Kernels and graphs against the plain path, on prompts of different lengths."""
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        found[f"gpt2 {name}"] = attempt(compare, small_gpt2(dtype, 16, 2))
        found[f"llama {name}"] = attempt(compare, small_llama(dtype, 16))
        tidy()
    return found


def compare(weights: Weights) -> dict[str, Any]:
    refusal = uncovered(weights)
    if refusal:
        return {"not covered": refusal}
    models = {
        "plain": StackedModel(weights, 4),
        "fused": FusedModel(weights, 4),
        "vendor": FusedModel(weights, 4, VENDOR),
    }
    text = torch.randint(0, TOKENS, (4, 128), device=DEVICE)
    lengths = [17, 60, 2, 90]
    found: dict[str, Any] = {}
    for n in (1, 4):
        hidden = {label: decode_some(model, text, lengths[:n]) for label, model in models.items()}
        for label in ("fused", "vendor"):
            found[f"largest difference, {label}, {n}"] = (hidden[label] - hidden["plain"]).abs().max().item()
    steps: dict[str, Step] = {"plain": PlainStep(models["plain"], SUPPORT)}
    steps |= {f"{label} graph": graph_of(model) for label, model in models.items()}
    ballots = {}
    for way, step in steps.items():
        engine = Engine(models[way.split()[0]], SUPPORT, 32, step)
        ballots[way] = attempt(vote_on, engine, text, lengths)
        found[f"repeatable, {way}"] = attempt(check_repeatable, engine) or True
    for way, ballot in ballots.items():
        found[f"equal votes, {way}"] = (
            float((ballot.votes == ballots["plain"].votes).mean()) if isinstance(ballot, Ballot) else ballot
        )
    return found


def decode_some(model: StackedModel, text: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    for slot, length in enumerate(lengths):
        model.prefill(text[slot, :length], 0, slot)
    positions = torch.tensor(lengths, device=DEVICE)
    tokens = text[: len(lengths), 100].contiguous()
    model.decode(tokens, positions, CAPACITY)
    return model.decode(tokens, positions + 1, CAPACITY).float()


def vote_on(engine: Engine, text: torch.Tensor, lengths: list[int]) -> Ballot:
    handles = [engine.add(text[i, :length].tolist()) for i, length in enumerate(lengths)]
    ballot = engine.step(handles, np.random.default_rng(0).gumbel(size=(len(lengths), SUPPORT)))
    for handle in handles:
        engine.remove(handle)
    return ballot


# --- how fast is it? --------------------------------------------------------------------------------------------------


def section_one(clock: Clock) -> dict[str, Any]:
    """One sequence, m = 128, context 96: every way there is, device time and memory."""
    return {name: attempt(one_sequence, dtype) for name, dtype in DTYPES.items()}


def one_sequence(dtype: torch.dtype) -> dict[str, Any]:
    tidy()
    before = torch.cuda.memory_allocated()
    w = small_gpt2(dtype, 128)
    tidy()
    torch.cuda.reset_peak_memory_stats()
    model = FusedModel(w, 1)
    warm(model)
    fused = attempt(step_ms, model, FusedStep(model, SUPPORT), 1, 96)
    memory = (torch.cuda.max_memory_allocated() - before) / 2**30
    vendor, plain = FusedModel(w, 1, VENDOR), StackedModel(w, 1)
    lanes32 = FusedModel(w, 1, Choices(lanes=32, attention_stages=2))
    warps8 = FusedModel(w, 1, Choices(row_warps=8))
    lanes32.cache = warps8.cache = vendor.cache = plain.cache = model.cache
    floor = floor_ms(w, 1, 96)
    return {
        "floor ms": floor,
        "fused graph": fused,
        "÷ floor": fused / floor if isinstance(fused, float) else None,
        "memory GiB": memory,
        "vendor products, graph": attempt(step_ms, vendor, FusedStep(vendor, SUPPORT), 1, 96),
        "plain graph": attempt(step_ms, plain, PlainStep(plain, SUPPORT), 1, 96),
        "plain graph, our ballot": attempt(step_ms, plain, FusedStep(plain, SUPPORT), 1, 96),
        "plain eager": attempt(step_ms, plain, PlainStep(plain, SUPPORT), 1, 96, False),
        "32 lanes": attempt(step_ms, lanes32, FusedStep(lanes32, SUPPORT), 1, 96),
        "8 warps for rows": attempt(step_ms, warps8, FusedStep(warps8, SUPPORT), 1, 96),
        "fused eager": attempt(step_ms, model, FusedStep(model, SUPPORT), 1, 96, False),
        "wall ms, fused graph with copies": attempt(wall_ms, model, 1),
    }


def section_parts(clock: Clock) -> dict[str, Any]:
    """Microseconds of each launch."""
    found = {}
    for name, dtype in DTYPES.items():
        found[name] = attempt(layer_parts, dtype)
        tidy()
    return found


def section_tiles(clock: Clock) -> dict[str, Any]:
    """Other cuts of the four float32 products."""
    return best_tiles(clock)


def section_streams(clock: Clock) -> dict[str, Any]:
    """Many sequences at once, bf16, m = 128, context 96."""
    w = small_gpt2(torch.bfloat16, 128)
    found: dict[str, Any] = {}
    for n in (1, 4, 16, 100, 64, 32, 8):
        found[str(n)] = "skipped: out of time" if clock.is_out() else attempt(many_sequences, w, n)
        tidy()
    return found


def many_sequences(w: Weights, n: int) -> dict[str, Any]:
    model = FusedModel(w, n)
    warm(model)
    ways = {
        "default": Choices(),
        "adapters of q, k, v added before attention": Choices(fold_rows=0),
        "adapters of q, k, v added by attention": Choices(fold_rows=2**30),
        "attention without stages": Choices(attention_stages=1),
        "attention with 5 stages": Choices(attention_stages=5),
        "attention with 32 lanes": Choices(lanes=32, attention_stages=2),
        "8 warps for rows": Choices(row_warps=8),
    }
    row: dict[str, Any] = {}
    for label, choices in ways.items():
        model.choices = choices
        row[label] = attempt(step_ms, model, FusedStep(model, SUPPORT), n, 96)
    best = min((time for time in row.values() if isinstance(time, float)), default=float("nan"))
    floor = floor_ms(w, n, 96)
    row |= {"tokens per second": n / best * 1e3, "floor ms": floor, "÷ floor": best / floor}
    if n == 16:
        row["plain graph"] = attempt(plain_ms, w, n)
        row["wall ms with copies"] = attempt(wall_ms, model, n)
    return row


def plain_ms(w: Weights, n: int) -> float:
    plain = StackedModel(w, n)
    warm(plain)
    return step_ms(plain, PlainStep(plain, SUPPORT), n, 96)


def section_costs(clock: Clock) -> dict[str, Any]:
    """One sequence, fused: cost against m and against context."""
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for m in (16, 32, 64, 128, 256):
            found[f"{name} m={m}"] = attempt(fused_ms, dtype, m, 96)
        for context in (32, 256, 512, 1000):
            found[f"{name} context={context}"] = attempt(fused_ms, dtype, 128, context)
    return found


def fused_ms(dtype: torch.dtype, m: int, context: int) -> dict[str, float]:
    tidy()
    w = small_gpt2(dtype, m, context=max(CAPACITY, context))
    model = FusedModel(w, 1)
    warm(model)
    return {"ms": step_ms(model, FusedStep(model, SUPPORT), 1, context), "floor ms": floor_ms(w, 1, context)}


def section_prefill(clock: Clock) -> dict[str, Any]:
    """Teacher-forced votes and prefill, tokens per second, m = 128."""
    return {name: attempt(reading, dtype) for name, dtype in DTYPES.items()}


def reading(dtype: torch.dtype) -> dict[str, float]:
    tidy()
    model = FusedModel(small_gpt2(dtype, 128, context=512), 1)
    engine = Engine(model, SUPPORT, 128, FusedStep(model, SUPPORT))
    text = np.random.default_rng(0).integers(0, TOKENS, 512).tolist()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        for _ in engine.teacher_forced(text, 512):
            pass
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine.remove(engine.add(text))
    torch.cuda.synchronize()
    return {"teacher-forced": 511 / min(times), "prefill": 511 / (time.perf_counter() - begun)}


def section_compile(clock: Clock) -> dict[str, Any]:
    """torch.compile of the plain forward pass, for comparison."""
    return {
        name: "skipped: out of time" if clock.is_out(60) else attempt(compiled_ms, dtype)
        for name, dtype in DTYPES.items()
    }


def compiled_ms(dtype: torch.dtype) -> dict[str, float]:
    tidy()
    model = StackedModel(small_gpt2(dtype, 128), 1)
    warm(model)
    begun = time.perf_counter()
    model.decode = torch.compile(model.decode, dynamic=False)  # type: ignore[method-assign]
    milliseconds_per_step = step_ms(model, FusedStep(model, SUPPORT), 1, 96)
    return {"ms": milliseconds_per_step, "seconds to compile": time.perf_counter() - begun}


SECTIONS = {
    "correct": section_correct,
    "one": section_one,
    "parts": section_parts,
    "streams": section_streams,
    "tiles": section_tiles,
    "costs": section_costs,
    "prefill": section_prefill,
    "compile": section_compile,
}


def main() -> None:
    """Run the sections asked for, in order, until the time is up."""
    parser = argparse.ArgumentParser(description="Time the decode step of all worlds on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated, in this order")
    parser.add_argument("--seconds", type=float, default=230.0, help="stop starting things after this long")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    set_deterministic()
    torch.manual_seed(0)
    clock = Clock(time.monotonic() + arguments.seconds)
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    results["choices"] = dataclasses.asdict(Choices())
    for name in arguments.sections.split(","):
        begun = time.monotonic()
        try:
            results[name] = "skipped: out of time" if clock.is_out() else SECTIONS[name](clock)
        except Exception:  # the next section must run, and the reader must see why this one did not
            results[name] = traceback.format_exc()
        results[f"{name}, seconds"] = round(time.monotonic() - begun, 1)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1, default=str, ensure_ascii=False))
        print(f"== {name} ({results[f'{name}, seconds']} s)", flush=True)
        print(json.dumps(results[name], indent=1, default=str, ensure_ascii=False), flush=True)
        tidy()


if __name__ == "__main__":
    main()
