"""Time the decode step of all worlds on one GPU: GPT-2-small shape, random weights, votes included.

    python3 tools/gpu/bench_gpu.py --out results [--sections correct,one,...] [--seconds 230] [--compile-ahead]

Needs torch with CUDA, triton, transformers, numpy and safetensors; no model files, no network. Sections are
independent: a failure is recorded and the next one runs; results.json is rewritten after each, and sections that do not
fit into the time limit are listed as skipped. `floor` is the larger of bytes ÷ bandwidth and flops ÷ peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_kernels
from gpu_timing import (
    CAPACITY,
    DEVICE,
    DTYPES,
    SUPPORT,
    TOKENS,
    Clock,
    attempt,
    floor_ms,
    shaped,
    step_ms,
    tidy,
    warm,
)
from paclm.engine.decode_step import DecodeStep, PlainStep
from paclm.engine.determinism import check_repeatable, set_deterministic
from paclm.engine.engine import Ballot, Engine
from paclm.engine.fused import DEFAULTS, FusedModel
from paclm.engine.graphs import FusedStep, GraphStep
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import Weights


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


# --- correctness ------------------------------------------------------------------------------------------------------


def section_correct(clock: Clock) -> dict[str, Any]:
    """Kernels and graphs against the plain path, on prompts of different lengths; each case in its own process."""
    cases = [(family, name) for family in ("gpt2", "llama") for name in DTYPES]
    with multiprocessing.get_context("spawn").Pool(len(cases), set_deterministic) as pool:
        return dict(pool.starmap(correct, cases))


def correct(family: str, name: str) -> tuple[str, Any]:
    return f"{family} {name}", attempt(compare, shaped(family, DTYPES[name], 16, layers=2))


def compare(weights: Weights) -> dict[str, Any]:
    plain, fused = StackedModel(weights, 16), FusedModel(weights, 16)
    lengths = [17, 60, 2, 90, 33, 16, 64, 1, 95, 48, 31, 80]
    text = torch.randint(0, TOKENS, (len(lengths), 128), device=DEVICE)
    found: dict[str, Any] = {}
    for n in (1, len(lengths)):
        hidden = [decode_some(model, text, lengths[:n]) for model in (plain, fused)]
        found[f"largest difference, {n}"] = (hidden[0] - hidden[1]).abs().max().item()
        found[f"largest value, {n}"] = hidden[0].abs().max().item()
    steps: dict[str, tuple[StackedModel, DecodeStep]] = {
        "plain": (plain, PlainStep(plain, SUPPORT)),
        "fused graph": (fused, graph_of(fused)),
    }
    ballots = {}
    for way, (model, step) in steps.items():
        engine = Engine(model, SUPPORT, 128, step)
        ballots[way] = attempt(vote_on, engine, text, lengths)
    found["repeatable"] = attempt(check_repeatable, Engine(fused, SUPPORT, 128, steps["fused graph"][1])) or True
    first, second = ballots.values()
    same = isinstance(first, Ballot) and isinstance(second, Ballot)
    found["equal votes"] = float((first.votes == second.votes).mean()) if same else [str(first), str(second)]
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


# --- speed -----------------------------------------------------------------------------------------------------------


def section_one(clock: Clock) -> dict[str, Any]:
    """One sequence, m = 128, context 96: device time, memory, and the plain path beside it."""
    return {name: attempt(one_sequence, dtype) for name, dtype in DTYPES.items()}


def one_sequence(dtype: torch.dtype) -> dict[str, Any]:
    tidy()
    before = torch.cuda.memory_allocated()
    w = shaped("gpt2", dtype, 128)
    tidy()
    torch.cuda.reset_peak_memory_stats()
    model = FusedModel(w, 1)
    warm(model)
    fused = step_ms(model, FusedStep(model, SUPPORT), 1, 96)
    memory = (torch.cuda.max_memory_allocated() - before) / 2**30
    plain = StackedModel(w, 1)
    plain.cache = model.cache
    floor = floor_ms(w, 1, 96)
    return {
        "ms": fused,
        "again": step_ms(model, FusedStep(model, SUPPORT), 1, 96),
        "floor ms": floor,
        "÷ floor": fused / floor,
        "memory GiB": memory,
        "plain graph": attempt(step_ms, plain, PlainStep(plain, SUPPORT), 1, 96),
        "plain eager": attempt(step_ms, plain, PlainStep(plain, SUPPORT), 1, 96, False),
        "with copies": attempt(wall_ms, model, 1),
    }


def section_streams(clock: Clock) -> dict[str, Any]:
    """Many sequences, bf16, m = 128, context 96, GPT-2-small's and SmolLM2-135M's shapes."""
    found: dict[str, Any] = {}
    for family, n in (("gpt2", 16), ("gpt2", 100), ("llama", 100), ("llama", 300), ("llama", 1), ("gpt2", 4), ("gpt2", 64), ("llama", 16), ("gpt2", 1)):  # fmt: skip  # noqa: E501
        found[f"{family} {n}"] = "skipped: out of time" if clock.is_out(4) else attempt(many_sequences, family, n)
        tidy()
    return found


def many_sequences(family: str, n: int) -> dict[str, Any]:
    w = shaped(family, torch.bfloat16, 128, context=96 if n > 100 else CAPACITY)
    model = FusedModel(w, n)
    if n <= 100:
        warm(model)
    ms, floor = step_ms(model, FusedStep(model, SUPPORT), n, 96), floor_ms(w, n, 96)
    row: dict[str, Any] = {"ms": ms, "tokens per second": n / ms * 1e3, "floor ms": floor, "÷ floor": ms / floor}
    row["cache GiB"] = 2 * len(w.blocks) * model.cache.keys[0].nbytes / 2**30
    if n in (16, 100):
        row["with copies"] = attempt(wall_ms, model, n)
    return row


def section_costs(clock: Clock) -> dict[str, Any]:
    """One sequence: cost against m and against context."""
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        for m, context in ((32, 96), (64, 96), (128, 256), (128, 512)):
            label = f"{name} m={m} context={context}"
            found[label] = "skipped: out of time" if clock.is_out(3) else attempt(cost, dtype, m, context)
    return found


def cost(dtype: torch.dtype, m: int, context: int) -> dict[str, float]:
    tidy()
    w = shaped("gpt2", dtype, m, context=max(CAPACITY, context))
    model = FusedModel(w, 1)
    warm(model)
    ms, floor = step_ms(model, FusedStep(model, SUPPORT), 1, context), floor_ms(w, 1, context)
    return {"ms": ms, "floor ms": floor, "÷ floor": ms / floor}


def section_prefill(clock: Clock) -> dict[str, Any]:
    """Teacher-forced votes and prefill, tokens per second, m = 128."""
    return {f"{family} bf16": attempt(reading, family, torch.bfloat16) for family in ("gpt2", "llama")}


def reading(family: str, dtype: torch.dtype) -> dict[str, float]:
    tidy()
    model = FusedModel(shaped(family, dtype, 128, context=512), 1)
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


SECTIONS = {
    "correct": section_correct,
    "one": section_one,
    "streams": section_streams,
    "costs": section_costs,
    "prefill": section_prefill,
    "variants": gpu_kernels.variants,
    "products": gpu_kernels.products,
    "ballots": gpu_kernels.ballots,
}


def rounded(found: Any) -> Any:
    """Round every number to four significant digits."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found


def main() -> None:
    """Run the sections asked for, in order, until the time is up."""
    parser = argparse.ArgumentParser(description="Time the decode step of all worlds on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--sections", default="correct,one,streams,costs,prefill", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=230.0, help="stop starting things after this long")
    parser.add_argument("--compile-ahead", action="store_true", help="compile all variants in many processes first")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(time.monotonic() + arguments.seconds)
    if arguments.compile_ahead:
        gpu_kernels.compile_ahead(arguments.sections.split(","))
        print(f"compiled ahead, {clock.deadline - time.monotonic():.0f} s left", flush=True)
    set_deterministic()
    torch.manual_seed(0)
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    results["choices"] = {str(dtype): dataclasses.asdict(choices) for dtype, choices in DEFAULTS.items()}
    for name in arguments.sections.split(","):
        begun = time.monotonic()
        try:
            results[name] = "skipped: out of time" if clock.is_out() else SECTIONS[name](clock)
        except Exception:  # the next section must run; the failure is in the results
            results[name] = traceback.format_exc()
        results[f"{name}, seconds"] = round(time.monotonic() - begun, 1)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1, default=str, ensure_ascii=False))
        print(f"== {name} ({results[f'{name}, seconds']} s)", flush=True)
        print(json.dumps(rounded(results[name]), indent=1, default=str, ensure_ascii=False), flush=True)
        tidy()


if __name__ == "__main__":
    main()
