"""Adapters in the upper half of the layers against adapters in all: steps and answers of `tiny` on the CPU, in turns.

Below the first adapted layer all worlds are one row: computed once, cached once. Random adapters of rank 8; a step at a
context of about 96, an answer reads 45 tokens and adds 16.

Run: python bench/bench_trunk.py [--worlds 16] [--rounds 15] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent)]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import RuntimeConfig  # noqa: E402
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets  # noqa: E402
from paclm.engine.base_model import load_model, resolve_base  # noqa: E402
from paclm.engine.engine import Engine  # noqa: E402
from paclm.engine.loading import build_engine  # noqa: E402

SUPPORT, CONTEXT, PROMPT, ANSWER = 200, 128, 45, 16
TOPS = {"all": None, "top:4": 4}
STREAMS = (1, 16)


def make_engine(top: int | None, worlds: int, sequences: int) -> Engine:
    model, spec = load_model(resolve_base("tiny"), torch.float32), AdapterSpec(top=top)
    start = AdapterStack.initial(find_targets(model, spec), spec, worlds, 0, "bench", coupled=False)
    B = {layer: torch.randn_like(b) * 0.02 for layer, b in start.B.items()}
    threads = torch.get_num_threads()  # as --threads says, however busy the machine is
    runtime = RuntimeConfig(device="cpu", max_sequences=sequences, context=CONTEXT, threads=threads)
    return build_engine(model, AdapterStack(spec, "bench", start.A, B), runtime, SUPPORT)


def add_prompts(engine: Engine, sequences: int, length: int) -> list[int]:
    generator = np.random.default_rng(0)
    return [engine.add(generator.integers(0, engine.vocabulary, length).tolist()) for _ in range(sequences)]


def step(engine: Engine, handles: list[int], coins: np.ndarray) -> None:
    """As a caller runs it: every world's votes, and a token for each sequence."""
    ballot = engine.step(handles, coins)
    for handle, token in zip(handles, ballot.public, strict=True):
        engine.append(handle, int(token))


def steps_of(engine: Engine, sequences: int, rounds: int) -> Callable[[], object]:
    """One step of sequences whose context is 96 in the middle of the rounds."""
    handles = add_prompts(engine, sequences, 96 - rounds // 2)
    return partial(step, engine, handles, np.random.default_rng(1).gumbel(size=(sequences, SUPPORT)))


def answer(engine: Engine, sequences: int, coins: np.ndarray) -> None:
    """Whole answers, the prompts included."""
    handles = add_prompts(engine, sequences, PROMPT)
    for _ in range(ANSWER):
        step(engine, handles, coins)
    engine.clear()


def main() -> None:
    """Print a table and, if asked, write it as JSON."""
    parser = argparse.ArgumentParser(description="Adapters in half of the layers against all, on the CPU.")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, seconds = [], {}
    for n in STREAMS:
        engines = {name: make_engine(top, arguments.worlds, n) for name, top in TOPS.items()}
        coins = np.random.default_rng(1).gumbel(size=(n, SUPPORT))
        steps = race(
            {name: steps_of(engine, n, arguments.rounds) for name, engine in engines.items()}, arguments.rounds
        )
        for engine in engines.values():
            engine.clear()
        answers = race({name: partial(answer, engine, n, coins) for name, engine in engines.items()}, 3)
        for what, tokens, times in (("step", n, steps), ("answer", n * ANSWER, answers)):
            seconds[f"{what}, {n}"] = times
            for name in TOPS:
                found = median(times[name])
                figures = (f"{1e3 * found:.1f} ms", f"{tokens / found:.0f}", f"{median(times['all']) / found:.2f} ×")
                rows.append([f"{what}, {n} sequences, {name}", *figures, spread(times[name])])
    title = f"Adapters in half of the layers of tiny, {arguments.worlds} worlds, {arguments.threads} threads"
    print_table(title, ["", "time", "tokens/s", "all ÷ this", "spread"], rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"worlds": arguments.worlds, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
