"""Time the trunk on one GPU: adapters in all layers against the last ones only, in the same run, in turns.

    python3 tools/gpu/bench_trunk.py --out results [--sections streams,parts,large] [--seconds 240] [--compile-ahead]

Random weights in SmolLM2-135M's shape (30 layers) and in Llama-3-8B's (32 layers), 128 worlds, rank 8, bfloat16. Needs
what bench_gpu.py needs, whose section `correct` compares votes with and without a shared trunk. Results as there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_gpu import CHUNK, graph_of, read_prompt, text_speed
from gpu_kernels import profile
from gpu_timing import (
    CAPACITY,
    PAGE,
    SUPPORT,
    TOKENS,
    blocks_for,
    cache_bytes,
    cut,
    floor_ms,
    graphed,
    in_processes,
    inputs_of,
    milliseconds,
    shaped,
    step_ms,
    step_of,
    warm,
)
from paclm.engine.determinism import set_deterministic
from paclm.engine.engine import Engine
from paclm.engine.fused import FusedModel
from paclm.engine.graphs import FusedStep
from paclm.engine.weights import Weights
from sections import Clock, attempt, run_sections, tidy

WORLDS, CONTEXT = 128, 2048
TOPS = {"all": None, "top:15": 15, "top:8": 8}
STREAMS = (1, 16, 100)
LARGE_STREAMS, LARGE_TOP = 8, 8
RESERVE = 3 * 2**30  # bytes beside weights and cache: activations, graphs, the libraries' workspaces


@dataclass(frozen=True)
class Case:
    """One choice of layers, ready to run."""

    model: FusedModel
    engine: Engine


def case_of(weights: Weights, num_blocks: int) -> Case:
    model = FusedModel(weights, num_blocks)
    warm(model)
    return Case(model, Engine(model, SUPPORT, CHUNK, graph_of(model)))


def in_turns(runs: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, float]:
    """The median of what each returns, over rounds in which they take turns; the first one warms up."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            found = run()
            seen[name] += found if number else []
    return {name: float(np.median(values)) for name, values in seen.items()}


def some_steps(engine: Engine, handles: list[int], coins: Any, steps: int) -> list[float]:
    """Milliseconds of each step as a caller runs it: launch, collect, append."""
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        ballot = engine.step(handles, coins)
        for handle, token in zip(handles, ballot.public, strict=True):
            engine.append(handle, int(token))
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def start(engine: Engine, sequences: int, length: int, more: int) -> list[int]:
    """Prompts of so many tokens that may grow by so many more."""
    generator = np.random.default_rng(0)
    return [engine.add(generator.integers(0, TOKENS, length).tolist(), more) for _ in range(sequences)]


# --- SmolLM2's shape --------------------------------------------------------------------------------------------------


def small_cases() -> dict[str, Case]:
    whole = shaped("llama", torch.bfloat16, WORLDS, context=CONTEXT)
    weights = {name: whole if top is None else cut(whole, top) for name, top in TOPS.items()}
    return {name: case_of(w, blocks_for(max(STREAMS), CAPACITY)) for name, w in weights.items()}


def section_streams(clock: Clock) -> dict[str, Any]:
    """Tokens per second at a context of about 96, prompts per second, and bytes of the cache."""
    cases = small_cases()
    sizes = {name: cache_bytes(case.model) / (case.model.num_blocks * PAGE) for name, case in cases.items()}
    found: dict[str, Any] = {"cache, bytes a token": with_ratios(sizes)}
    for n in STREAMS:
        found[f"{n} streams"] = "skipped: out of time" if clock.is_out(6) else attempt(stream_speed, cases, n)
    found["prompts of 45 tokens"] = attempt(short_prompts, cases)
    found["prompts of 2,000 tokens"] = "skipped: out of time" if clock.is_out(6) else attempt(long_prompts, cases)
    return found


def with_ratios(figures: dict[str, float]) -> dict[str, float]:
    return figures | {f"{name} ÷ all": figure / figures["all"] for name, figure in figures.items() if name != "all"}


def stream_speed(cases: dict[str, Case], n: int) -> dict[str, Any]:
    """A generate loop of n streams, and the device time of its graph."""
    rounds, steps = 6, 7
    length = 96 - (rounds + 1) * steps // 2
    coins = np.random.default_rng(1).gumbel(size=(n, SUPPORT))
    loops, graphs = {}, {}
    for name, case in cases.items():
        handles = start(case.engine, n, length, (rounds + 1) * steps)
        loops[name] = partial(some_steps, case.engine, handles, coins, steps)
        replay = graphed(step_of(FusedStep(case.model, SUPPORT), n, 96))
        graphs[name] = partial(one_time, replay, 40 if n == 1 else 20 if n <= 16 else 8)
    loop, device = in_turns(loops, rounds), in_turns(graphs, 5)
    for case in cases.values():
        case.engine.clear()
    return {
        "tokens/s": with_ratios({name: 1e3 * n / ms for name, ms in loop.items()}),
        "step of the loop, ms": loop,
        "device, ms": with_ratios(device),
        "device ÷ floor": {name: device[name] / floor_ms(case.model.weights, n, 96) for name, case in cases.items()},
    }


def one_time(run: Callable[[], object], repeats: int) -> list[float]:
    return [milliseconds(run, repeats, 1)]


def short_prompts(cases: dict[str, Case], count: int = 100, length: int = 45) -> dict[str, Any]:
    def read(engine: Engine) -> list[float]:
        handles = start(engine, count, length, 1)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        while not all(map(engine.is_ready, handles)):
            engine.prefill()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        engine.clear()
        return [count / seconds]

    speeds = in_turns({name: partial(read, case.engine) for name, case in cases.items()}, 3)
    rows = {f"{name}, world-tokens/s": (WORLDS + 1) * (length - 1) * speed for name, speed in speeds.items()}
    return {"prompts/s": with_ratios(speeds)} | rows


def long_prompts(cases: dict[str, Case], length: int = 2000) -> dict[str, Any]:
    text = np.random.default_rng(0).integers(0, TOKENS, length).tolist()

    def read(engine: Engine) -> list[float]:
        return [text_speed(read_prompt, engine, text)["world-tokens/s"]]

    speeds = in_turns({name: partial(read, case.engine) for name, case in cases.items()}, 2)
    return {"world-tokens/s": with_ratios(speeds)}


def section_parts(clock: Clock) -> dict[str, Any]:
    """A step of 100 streams with half of the layers adapted: the trunk, what is above it, and votes."""
    cases = small_cases()
    return {name: attempt(breakdown, cases[name].model, max(STREAMS), 96) for name in ("top:15", "all")}


def breakdown(model: FusedModel, n: int, context: int) -> dict[str, Any]:
    """Device time of a step by parts and by kernels."""
    integers, trunk = inputs_of(n, context), model.weights.trunk
    found: dict[str, Any] = {"step, ms": step_ms(FusedStep(model, SUPPORT), n, context)}
    parts = {"layers": model}
    if trunk:
        parts |= {"trunk alone": part(model, slice(trunk), 1)}
        parts |= {"above alone": part(model, slice(trunk, None), model.num_worlds)}
    for name, some in parts.items():
        run = partial(some.decode, integers[0], integers[1], integers[2:].T, context)
        found[f"{name}, ms"] = milliseconds(graphed(run), 8, 3)
        found[f"{name}, kernels"] = profile(run)
    return found


def part(model: FusedModel, layers: slice, num_worlds: int) -> FusedModel:
    """Some of its layers as a model of their own, over the same cache."""
    w = model.weights
    some = FusedModel(replace(w, blocks=w.blocks[layers], num_worlds=num_worlds, trunk=0), 2)
    some.cache.keys, some.cache.values = model.cache.keys[layers], model.cache.values[layers]
    return some


# --- Llama-3-8B's shape -----------------------------------------------------------------------------------------------


def section_large(clock: Clock) -> dict[str, Any]:
    """8 streams: of 2,048 tokens with 8 adapted layers; and against all layers where both caches fit, in turns."""
    whole = shaped("llama-8b", torch.bfloat16, WORLDS, context=CONTEXT)
    tidy()
    top, name = cut(whole, LARGE_TOP), f"top:{LARGE_TOP}"
    found: dict[str, Any] = {"weights of all, GiB": torch.cuda.memory_allocated() / 2**30}
    found[f"{name}, {CONTEXT} tokens"] = attempt(at_context, top, CONTEXT, True)
    longest = longest_context(whole)
    found["longest context of all"] = longest
    speeds: dict[str, list[float]] = {"all": [], name: []}
    for turn in (1, 2):
        for label, weights in (("all", whole), (name, top)):
            figures = "skipped: out of time" if clock.is_out(15) else attempt(at_context, weights, longest)
            found[f"{label}, {longest} tokens, turn {turn}"] = figures
            if isinstance(figures, dict):
                speeds[label].append(figures["tokens/s"])
    if all(speeds.values()):
        found["tokens/s"] = with_ratios({label: float(np.median(each)) for label, each in speeds.items()})
    return found


def longest_context(weights: Weights) -> int:
    """The most tokens that each of the streams can have beside these weights."""
    tidy()
    free, _ = torch.cuda.mem_get_info()
    block = cache_bytes(FusedModel(weights, 1))
    return min(CONTEXT, ((free - RESERVE) // block - 1) // LARGE_STREAMS * PAGE)


def at_context(weights: Weights, context: int, in_parts: bool = False) -> dict[str, Any]:
    """Allocate the cache of all streams, and run steps whose last is at the end of the context."""
    tidy()
    torch.cuda.reset_peak_memory_stats()
    case, steps = case_of(weights, blocks_for(LARGE_STREAMS, context)), 22
    handles = start(case.engine, LARGE_STREAMS, context - steps, steps)
    case.engine._waiting.clear()  # for timing, noise is as good as what prompts would leave in the cache
    coins = np.random.default_rng(1).gumbel(size=(LARGE_STREAMS, SUPPORT))
    loop = float(np.median(some_steps(case.engine, handles, coins, steps)[2:]))
    step = FusedStep(case.model, SUPPORT)
    found: dict[str, Any] = {
        "cache GiB": cache_bytes(case.model) / 2**30,
        "in use GiB": torch.cuda.memory_allocated() / 2**30,
        "peak GiB": torch.cuda.max_memory_reserved() / 2**30,
        "free GiB": torch.cuda.mem_get_info()[0] / 2**30,
        "step of the loop, ms": loop,
        "tokens/s": 1e3 * LARGE_STREAMS / loop,
        "device, ms": step_ms(step, LARGE_STREAMS, context, repeats=5),
        "floor ms": floor_ms(weights, LARGE_STREAMS, context),
    }
    if in_parts:
        found["parts"] = attempt(breakdown, case.model, LARGE_STREAMS, context)
        case.engine.clear()
        text = np.random.default_rng(0).integers(0, TOKENS, context - 48).tolist()
        found[f"prompt of {len(text)} tokens"] = attempt(text_speed, read_prompt, case.engine, text)
    return found


# --- compiling ahead, in many processes -------------------------------------------------------------------------------


def compile_ahead() -> None:
    """Compile everything to be measured, on two layers of which one is adapted, into Triton's cache."""
    jobs = [("llama", n) for n in STREAMS] + [("llama-8b", LARGE_STREAMS)]
    in_processes(_compile, jobs, "fork")


def _compile(family: str, n: int) -> None:
    weights = cut(shaped(family, torch.bfloat16, WORLDS, layers=2, context=CONTEXT), 1)
    case = case_of(weights, blocks_for(n, CAPACITY) + CONTEXT // PAGE)
    attempt(stream_speed, {"all": case}, n)
    attempt(text_speed, read_prompt, case.engine, list(range(CONTEXT - 48)))


SECTIONS = {"streams": section_streams, "parts": section_parts, "large": section_large}


def main() -> None:
    """Run the sections asked for, in order, until the time is up."""
    parser = argparse.ArgumentParser(description="Time the trunk on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop starting things after this long")
    parser.add_argument("--compile-ahead", action="store_true", help="compile in several processes first")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(time.monotonic() + arguments.seconds)
    if arguments.compile_ahead:
        compile_ahead()
        print(f"compiled ahead, {clock.deadline - time.monotonic():.0f} s left", flush=True)
    set_deterministic()
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    run_sections(SECTIONS, arguments.sections.split(","), clock, arguments.out, facts)


if __name__ == "__main__":
    main()
