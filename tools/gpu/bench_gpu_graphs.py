"""Training speed of one adapter and of many worlds on one GPU, with and without CUDA graphs: one JSON line per way.

    python tools/gpu/bench_gpu_graphs.py --out graphs.json
    python tools/gpu/bench_gpu_graphs.py --model SmolLM2-135M.gguf      or a folder; otherwise random weights

Calls what `paclm train` calls (`train_worlds`). The first lines are `--what full`: all records, one adapter. Then a
profile of its step, the distance between adapters trained with and without graphs, and worlds. `tokens_per_s` is the
rate of the second half of the steps; `whole_tokens_per_s` includes compiling and recording. Takes under 90 seconds; a
way that fails is reported and the others run. `--small` is a smoke test for a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from paclm.config import TrainingConfig
from paclm.engine import training, training_pass
from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import load_model, resolve_base
from paclm.engine.memory import release_memory
from paclm.engine.training import make_schedule, train_worlds
from paclm.engine.training_forward import PlainForward
from paclm.engine.training_order import Schedule, make_blocks
from paclm.engine.training_pass import MOST_RECORDED, WorldsPass
from paclm.engine.training_queue import Progress
from paclm.worlds.assignment import assign_worlds

SETTINGS = TrainingConfig(epochs=1)
GOAL = 150_000  # tokens per second of one adapter
EVERY_PASS = 2**17  # positions: record as many as `paclm train` puts into a step


class EnoughError(Exception):
    """Raised when enough steps have been profiled."""


@dataclass
class Bench:
    """The model, where results go, and the time limit."""

    model: Any
    out: Path | None
    deadline: float
    lines: list[dict[str, Any]] = field(default_factory=list)

    def emit(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        if self.out is not None:
            self.out.write_text("\n".join(map(json.dumps, self.lines)) + "\n")

    def attempt(self, way: str, measure: Callable[[], dict[str, Any] | None]) -> None:
        """Measure and print, also if it fails: the other ways must still run."""
        if time.monotonic() > self.deadline:
            self.emit({"way": way, "skipped": "out of time"})
            return
        began = time.monotonic()
        try:
            found = measure() or {}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()[-1200:]}
        self.emit({"way": way, **found, "seconds": round(time.monotonic() - began, 2)})

    def schedule(self, lengths: list[int], num_worlds: int) -> Schedule:
        """Records of these lengths; every world holds half of them, a single one all."""
        draws = np.random.default_rng(0)
        records = [draws.integers(0, self.model.config.vocab_size, length).tolist() for length in lengths]
        n = len(records)
        membership = np.ones((n, 1), dtype=np.bool_) if num_worlds == 1 else assign_worlds(n, num_worlds, seed=1)
        return make_schedule(make_blocks(records, max(lengths), max(lengths)), membership, SETTINGS, seed=3)


def make_model(named: str | None, small: bool) -> Any:
    """The model that is named, or SmolLM2-135M's shape with random weights."""
    dtype, device = (torch.float32, "cpu") if small else (torch.bfloat16, "cuda")
    if named is not None:
        return load_model(resolve_base(named), dtype).to(device)
    torch.manual_seed(0)
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    if small:
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=2048, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)


@contextmanager
def watched_passes(most_recorded: int, compiled: bool) -> Iterator[list[WorldsPass]]:
    """Record up to so many positions; the passes that are made."""
    made: list[WorldsPass] = []

    def make_pass(*arguments: Any) -> WorldsPass:
        made.append(WorldsPass(*arguments))
        return made[-1]

    with ExitStack() as stack:
        stack.enter_context(patch.object(training_pass, "MOST_RECORDED", most_recorded))
        stack.enter_context(patch.object(training, "WorldsPass", make_pass))
        if not compiled:
            stack.enter_context(patch.object(training, "make_forward", partial(PlainForward, compiled=False)))
        yield made


def train(
    bench: Bench, schedule: Schedule, *, most_recorded: int = MOST_RECORDED, compiled: bool = True
) -> tuple[dict[str, Any], list[float], AdapterStack]:
    """Train as the command does: figures, losses and adapters."""
    release_memory()
    on_gpu = bench.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seen: list[tuple[float, Progress]] = []
    began = time.perf_counter()
    with watched_passes(most_recorded, compiled) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = train_worlds(
            bench.model,
            schedule,
            SETTINGS,
            base="bench",
            worlds_per_step=schedule.num_worlds,
            on_progress=lambda now: seen.append((time.perf_counter(), now)),
            must_improve=False,
        )
    half = len(seen) // 2
    rate = sum(now.num_tokens for _, now in seen[half:]) / (seen[-1][0] - seen[half - 1][0])
    figures = {
        "tokens_per_s": round(rate),
        "whole_tokens_per_s": round(sum(now.num_tokens for _, now in seen) / (seen[-1][0] - began)),
        "step_ms": round(1e3 * (seen[-1][0] - seen[half - 1][0]) / (len(seen) - half), 2),
        "steps": len(seen),
        "graphs": sum(len(passes.recordings) for passes in made),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1) if on_gpu else 0.0,
        "warnings": [str(item.message)[:200] for item in caught if "CUDA graphs" in str(item.message)],
    }
    return figures, [now.loss for _, now in seen], trained.stack


def distance(one: tuple[Any, list[float], AdapterStack], other: tuple[Any, list[float], AdapterStack]) -> Any:
    """How far two trainings are apart: losses, and adapters relative to their size."""
    stacks = one[2], other[2]
    flat = [torch.cat([t.flatten() for t in (*s.A.values(), *s.B.values())]).double().cpu() for s in stacks]
    up = [torch.cat([t.flatten() for t in s.B.values()]).double().cpu() for s in stacks]
    return {
        "losses_differ_by": max(abs(a - b) / abs(a) for a, b in zip(one[1], other[1], strict=True)),
        "adapters_differ_by": float((flat[0] - flat[1]).norm() / flat[0].norm()),
        "B_differs_by": float((up[0] - up[1]).norm() / up[0].norm()),  # B starts at 0: the whole of it is trained
        "last_losses": [one[1][-1], other[1][-1]],
    }


def profile(bench: Bench, schedule: Schedule, most_recorded: int, num_steps: int = 4) -> dict[str, Any]:
    """Launches, busy time and gaps of a step, and its longest kernels."""
    num_taken = 0
    take = training.GroupTraining.step
    report: dict[str, Any] = {}

    def step(group: Any, picks: Any) -> Any:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 6:  # everything is compiled and recorded
            torch.cuda.synchronize()
            with torch.profiler.profile() as record:
                began = time.perf_counter()
                for _ in range(num_steps):
                    take(group, picks)
                launched = time.perf_counter() - began
                torch.cuda.synchronize()
                whole = time.perf_counter() - began
            report.update(_summarize(record, num_steps))
            report.update(host_ms=1e3 * launched / num_steps, step_ms=1e3 * whole / num_steps)
            raise EnoughError
        return take(group, picks)

    with patch.object(training.GroupTraining, "step", step), suppress(EnoughError):
        train(bench, schedule, most_recorded=most_recorded)
    return report


def _summarize(record: Any, num_steps: int) -> dict[str, Any]:
    events = [event for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    took: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        took[event.name[:90]] += event.time_range.end - event.time_range.start
        calls[event.name[:90]] += 1
    return {
        "kernels_per_step": len(events) / num_steps,
        "busy_ms": busy / 1e3 / num_steps,
        "gaps_ms": (reached - spans[0][0] - busy) / 1e3 / num_steps,
        "top": [[round(us / 1e3 / num_steps, 3), calls[name] / num_steps, name] for name, us in took.most_common(24)],
    }


def run(bench: Bench) -> None:
    on_gpu = bench.model.device.type == "cuda"
    long, short = (512, 64) if on_gpu else (16, 8)
    some, few = (32, 128) if on_gpu else (2, 4), 20 if on_gpu else 3
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(300), 0.6, 8 * (300 if on_gpu else 3)), 16, 2048)
    one, twenty = (bench.schedule([long] * (8 * steps), 1) for steps in (5 * few, few))
    mixed = bench.schedule([int(length) for length in (lengths if on_gpu else lengths / 50 + 3)], 1)
    many, most = bench.schedule([long] * (16 * few), some[0]), bench.schedule([short] * (16 * few), some[1])
    runs: dict[str, tuple[dict[str, Any], list[float], AdapterStack]] = {}

    def measure(way: str, schedule: Schedule, **options: Any) -> None:
        def once() -> dict[str, Any]:
            runs[way] = train(bench, schedule, **options)
            return runs[way][0]

        bench.attempt(way, once)

    def compare(way: str, one: str, other: str) -> None:
        bench.attempt(way, lambda: distance(runs[one], runs[other]))

    measure("full", one)
    measure("full, 20 steps", twenty)
    measure("full, 20 steps, no graphs", twenty, most_recorded=0)
    compare("graphs against none, after 20 steps", "full, 20 steps, no graphs", "full, 20 steps")
    if on_gpu:
        bench.attempt("profile of full", lambda: profile(bench, twenty, MOST_RECORDED))
    measure("full, not compiled", one, compiled=False)
    measure("full, records of unequal lengths", mixed)
    measure(f"{some[1]} worlds, short blocks", most)
    measure(f"{some[1]} worlds, short blocks, no graphs", most, most_recorded=0)
    measure(f"{some[0]} worlds", many)
    measure(f"{some[0]} worlds, every pass recorded", many, most_recorded=EVERY_PASS)
    measure("full, 20 steps, no graphs, again", twenty, most_recorded=0)
    compare("rounding alone, after 20 steps", "full, 20 steps, no graphs", "full, 20 steps, no graphs, again")
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if on_gpu else ():
        with sdpa_kernel(backend):
            measure(f"full, {backend.name}", one)
    if on_gpu:
        bench.attempt("profile of full, no graphs", lambda: profile(bench, twenty, 0))
    figure = runs["full"][0]["tokens_per_s"] if "full" in runs else 0
    bench.emit({"figure": "train --what full, tokens/s", "reached": figure, "goal": GOAL})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", help="folder or .gguf file of the base model; otherwise random weights")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--seconds", type=float, default=70.0, help="start nothing new after this long")
    parser.add_argument("--small", action="store_true", help="a smoke test on the CPU")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --small runs a smoke test on the CPU")
    if arguments.small:
        torch.set_num_threads(1)
    deadline = time.monotonic() + arguments.seconds
    bench = Bench(make_model(arguments.model, arguments.small), arguments.out, deadline)
    bench.emit({"device": torch.cuda.get_device_name() if not arguments.small else "cpu", "torch": torch.__version__})
    run(bench)


if __name__ == "__main__":
    main()
