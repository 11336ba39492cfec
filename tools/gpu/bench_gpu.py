"""Time decode steps and the reading of prompts of all worlds on one GPU: real shapes, random weights.

    python3 tools/gpu/bench_gpu.py --out results [--sections correct,one,...] [--seconds 80] [--compile-ahead]

Needs torch with CUDA, triton, transformers, numpy and safetensors; no model files, no network. Sections are
independent: a failure is recorded and the next one runs; results.json is rewritten after each, and sections that do not
fit into the time limit are listed as skipped. `floor` is the larger of bytes ÷ bandwidth and flops ÷ peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
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
    blocks_for,
    cache_bytes,
    cut,
    floor_ms,
    in_processes,
    milliseconds,
    prompts_of,
    shaped,
    step_ms,
    warm,
)
from paclm.engine.decode_step import PlainStep, PromptChunk
from paclm.engine.determinism import check_repeatable, set_deterministic
from paclm.engine.engine import Ballot, Engine
from paclm.engine.fused import DEFAULTS, FusedModel
from paclm.engine.graphs import FusedStep, GraphStep
from paclm.engine.stacked import StackedModel
from paclm.engine.weights import Weights
from sections import Clock, attempt, run_sections, tidy

CHUNK = 512  # prompt tokens of a pass, as served on a GPU
LENGTHS = [17, 60, 2, 90, 33, 16, 64, 1, 95, 48, 31, 80]  # of the prompts that are compared


def wall_ms(model: StackedModel, graph: GraphStep, sequences: int) -> float:
    """Host time of a whole step of a generate loop: copies, replay, copy back, append."""
    engine = Engine(model, SUPPORT, CHUNK, graph)
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
    return GraphStep(FusedStep(model, SUPPORT), model, SUPPORT, CHUNK)


# --- correctness ------------------------------------------------------------------------------------------------------


def section_correct(clock: Clock) -> dict[str, Any]:
    """Kernels and graphs against the plain path, on prompts of different lengths; each case in its own process."""
    cases = [(family, name, top) for family in ("gpt2", "llama") for name in DTYPES for top in (None, 2)]
    return dict(in_processes(correct, cases, "spawn"))


def correct(family: str, name: str, top: int | None) -> tuple[str, Any]:
    found = attempt(compare, shaped(family, DTYPES[name], 16, layers=4, top=top))
    if top is not None and isinstance(found, dict):
        found["against the trunk unshared"] = attempt(compare_unshared, family, DTYPES[name], top)
    return f"{family} {name}{'' if top is None else f' top:{top}'}", found


def compare(weights: Weights) -> dict[str, Any]:
    lengths, blocks = LENGTHS, blocks_for(len(LENGTHS), CAPACITY)
    plain, fused = StackedModel(weights, blocks), FusedModel(weights, blocks)
    graph = graph_of(fused)
    found: dict[str, Any] = {}
    for n in (1, len(lengths)):
        chunk = prompts_of(lengths[:n], CAPACITY)
        hidden = plain.prefill(chunk).float()
        for way, reader in (("eager", fused), ("recorded", graph)):
            difference = (reader.prefill(chunk).float() - hidden).abs().max().item()
            found[f"largest difference of prompts, {n}, {way}"] = difference
        decoded = [decode_some(model, chunk) for model in (plain, fused)]
        found[f"largest difference of steps, {n}"] = (decoded[0] - decoded[1]).abs().max().item()
        found[f"largest value, {n}"] = decoded[0].abs().max().item()
    ballots = {}
    for way, model, step in (("plain", plain, PlainStep(plain, SUPPORT)), ("fused graph", fused, graph)):
        ballots[way] = attempt(vote_on, Engine(model, SUPPORT, CHUNK, step), lengths)
    found["repeatable"] = attempt(check_repeatable, Engine(fused, SUPPORT, CHUNK, graph)) or True
    first, second = ballots.values()
    same = isinstance(first, Ballot) and isinstance(second, Ballot)
    found["equal votes"] = float((first.votes == second.votes).mean()) if same else [str(first), str(second)]
    return found


def compare_unshared(family: str, dtype: torch.dtype, top: int) -> dict[str, Any]:
    """The kernels with a trunk against the same where every world computes it, with adapters that are zero below.

    As a control the same with the adapters left in, which must differ.
    """
    blocks, chunk = blocks_for(len(LENGTHS), CAPACITY), prompts_of(LENGTHS, CAPACITY)
    whole = shaped(family, dtype, 16, layers=4)
    ways = {"trunk": shaped(family, dtype, 16, layers=4, top=top), "unshared": cut(whole, top, shared=False)}
    ballots, states = {}, {}
    for way, weights in (ways | {"control": whole}).items():
        model = FusedModel(weights, blocks)
        ballots[way] = vote_on(Engine(model, SUPPORT, CHUNK, graph_of(model)), LENGTHS).votes
        model.prefill(chunk)
        states[way] = decode_some(model, chunk)
    found: dict[str, Any] = {"trunk": ways["trunk"].trunk}
    for way in ("unshared", "control"):
        found[f"equal votes, {way}"] = float((ballots["trunk"] == ballots[way]).mean())
        found[f"largest difference, {way}"] = (states["trunk"] - states[way]).abs().max().item()
    return found


def decode_some(model: StackedModel, chunk: PromptChunk) -> torch.Tensor:
    """Hidden states of the second token after each prompt of the chunk."""
    table = torch.from_numpy(chunk.table).to(DEVICE)
    positions = torch.from_numpy(chunk.lengths).to(DEVICE, torch.int32)
    tokens = torch.arange(100, 100 + len(positions), dtype=torch.int32, device=DEVICE)
    model.decode(tokens, positions, table, CAPACITY)
    return model.decode(tokens, positions + 1, table, CAPACITY).float()


def vote_on(engine: Engine, lengths: list[int]) -> Ballot:
    generator = np.random.default_rng(0)
    handles = [engine.add(generator.integers(0, TOKENS, length).tolist()) for length in lengths]
    ballot = engine.step(handles, generator.gumbel(size=(len(lengths), SUPPORT)))
    engine.clear()
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
    model = FusedModel(w, blocks_for(1, CAPACITY))
    warm(model)
    fused = step_ms(FusedStep(model, SUPPORT), 1, 96)
    memory = (torch.cuda.max_memory_allocated() - before) / 2**30
    plain = StackedModel(w, model.num_blocks)
    plain.cache = model.cache
    floor = floor_ms(w, 1, 96)
    return {
        "ms": fused,
        "again": step_ms(FusedStep(model, SUPPORT), 1, 96),
        "floor ms": floor,
        "÷ floor": fused / floor,
        "memory GiB": memory,
        "plain graph": attempt(step_ms, PlainStep(plain, SUPPORT), 1, 96),
        "plain eager": attempt(step_ms, PlainStep(plain, SUPPORT), 1, 96, False),
        "with copies": attempt(wall_ms, model, graph_of(model), 1),
    }


def section_streams(clock: Clock) -> dict[str, Any]:
    """Many sequences, bf16, m = 128, context 96, SmolLM2-135M's and GPT-2-small's shapes."""
    return {family: attempt(many_sequences, family, clock) for family in ("llama", "gpt2")}


def many_sequences(family: str, clock: Clock) -> dict[str, Any]:
    tidy()
    w = shaped(family, torch.bfloat16, 128)
    model = FusedModel(w, blocks_for(100, CAPACITY))
    warm(model)
    graph = graph_of(model)
    found: dict[str, Any] = {"cache GiB": cache_bytes(model) / 2**30}
    for n in (1, 4, 16, 64, 100):
        found[f"{n} sequences"] = "skipped: out of time" if clock.is_out(4) else attempt(stream_speed, model, graph, n)
    return found


def stream_speed(model: FusedModel, graph: GraphStep, n: int) -> dict[str, Any]:
    ms, floor = step_ms(FusedStep(model, SUPPORT), n, 96), floor_ms(model.weights, n, 96)
    with_copies = attempt(wall_ms, model, graph, n)
    return {"ms": ms, "tokens/s": n / ms * 1e3, "floor ms": floor, "÷ floor": ms / floor, "with copies": with_copies}


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
    model = FusedModel(w, blocks_for(1, context))
    warm(model)
    ms, floor = step_ms(FusedStep(model, SUPPORT), 1, context), floor_ms(w, 1, context)
    return {"ms": ms, "floor ms": floor, "÷ floor": ms / floor}


def section_prefill(clock: Clock) -> dict[str, Any]:
    """Reading prompts, bf16, m = 128: recorded passes of several sizes, a long prompt in chunks, votes along a text."""
    return {
        family: "skipped: out of time" if clock.is_out(8) else attempt(reading, family, length)
        for family, length in gpu_kernels.PROMPTS.items()
    }


def reading(family: str, length: int) -> dict[str, Any]:
    tidy()
    model = FusedModel(shaped(family, torch.bfloat16, 128, context=length), blocks_for(1, length))
    graph = graph_of(model)
    found: dict[str, Any] = {}
    for lengths in gpu_kernels.PARTS:
        found[f"{sum(lengths)} in {len(lengths)}"] = attempt(pass_speed, model, graph, lengths)
    engine = Engine(model, SUPPORT, CHUNK, graph)
    text = np.random.default_rng(0).integers(0, TOKENS, length).tolist()
    for label, read in ((f"{length} in chunks of {CHUNK}", read_prompt), (f"votes along {length}", vote_along)):
        found[label] = attempt(text_speed, read, engine, text)
    found[f"profile of {CHUNK}"] = attempt(gpu_kernels.profile, partial(model.prefill, prompts_of([CHUNK], length)))
    return found


def pass_speed(model: FusedModel, graph: GraphStep, lengths: list[int]) -> dict[str, float]:
    """One pass over prompts of these lengths as it is served, and without its recording."""
    chunk, num_tokens = prompts_of(lengths, model.context), sum(lengths)
    ms, eager = (milliseconds(partial(reader.prefill, chunk), 3, 3) for reader in (graph, model))
    per_second = model.num_worlds * num_tokens / ms * 1e3
    floor = floor_ms(model.weights, num_tokens, 1)
    return {"ms": ms, "world-tokens/s": per_second, "÷ floor": ms / floor, "not recorded, ms": eager}


def text_speed(read: Callable[[Engine, list[int]], None], engine: Engine, text: list[int]) -> dict[str, float]:
    """The second of two readings: the first may compile."""
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        read(engine, text)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    return {"ms": 1e3 * seconds, "world-tokens/s": (engine.num_worlds + 1) * (len(text) - 1) / seconds}


def read_prompt(engine: Engine, text: list[int]) -> None:
    handle = engine.add(text)
    while not engine.is_ready(handle):
        engine.prefill()
    engine.remove(handle)


def vote_along(engine: Engine, text: list[int]) -> None:
    for _ in engine.teacher_forced(text, len(text)):
        pass


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


def main() -> None:
    """Run the sections asked for, in order, until the time is up."""
    parser = argparse.ArgumentParser(description="Time steps and prompts of all worlds on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json")
    parser.add_argument("--sections", default="correct,prefill,streams,one", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=80.0, help="stop starting things after this long")
    parser.add_argument("--compile-ahead", action="store_true", help="compile all variants in many processes first")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(time.monotonic() + arguments.seconds)
    if arguments.compile_ahead:
        gpu_kernels.compile_ahead(arguments.sections.split(","))
        print(f"compiled ahead, {clock.deadline - time.monotonic():.0f} s left", flush=True)
    set_deterministic()
    facts: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    facts["choices"] = {str(dtype): dataclasses.asdict(choices) for dtype, choices in DEFAULTS.items()}
    run_sections(SECTIONS, arguments.sections.split(","), clock, arguments.out, facts)


if __name__ == "__main__":
    main()
