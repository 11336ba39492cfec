"""Worlds on two and four worker processes beside one process, in turns; and the exchange between them alone.

Steps of `tiny` at a context of about 96, random adapters, one torch thread in each process. The exchange is a step in
which no rank computes anything, with the shapes of 128 worlds: what workers add to a step. Its parts are timed at rank
0 with two ranks; "wait" is the way to the worker, its own unpacking and packing, and the way back.

Run: python bench/bench_workers.py [--worlds 16] [--rounds 9] [--only steps,exchange] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from exchange import exchange_of, idle_group  # noqa: E402
from harness import median, print_table, race, spread  # noqa: E402
from paclm.config import RuntimeConfig  # noqa: E402
from paclm.engine import wire, workers  # noqa: E402
from paclm.engine.engine import Engine  # noqa: E402
from paclm.engine.launch import start_workers  # noqa: E402
from paclm.engine.loading import open_engine  # noqa: E402

SUPPORT, CONTEXT, WORLDS = 200, 96, 128
STREAMS, RANKS, WORKERS = (1, 16, 100), (2, 4, 8), (1, 2, 4)
GOAL_MS = 0.6
REPEATS = 20  # exchanges in one turn


def make_workspace(path: Path, num_worlds: int) -> Any:
    from curator.deployments import build_workspace
    from paclm.engine.base_model import TINY_FOLDER

    texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(100)]
    return build_workspace(path, texts, TINY_FOLDER, num_worlds, spread=0.02)


def steps_of(engine: Engine, streams: int, rounds: int) -> Callable[[], object]:
    """One step of sequences whose context is 96 in the middle of the rounds."""
    generator = np.random.default_rng(0)
    length = CONTEXT - rounds // 2
    handles = [engine.add(generator.integers(0, engine.vocabulary, length).tolist()) for _ in range(streams)]
    coins = generator.gumbel(size=(streams, SUPPORT))

    def step() -> None:
        ballot = engine.step(handles, coins)
        for handle, token in zip(handles, ballot.public, strict=True):
            engine.append(handle, int(token))

    return step


def race_steps(num_worlds: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of steps by streams and processes."""
    runtime = RuntimeConfig(device="cpu", max_sequences=max(STREAMS), context=128, threads=1)
    found = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        os.environ["PACLM_STATE_DIR"] = temporary
        workspace = make_workspace(Path(temporary) / "clinic", num_worlds)
        groups = {n: stack.enter_context(start_workers(workspace.path, n, timeout=60.0)) for n in WORKERS if n > 1}
        engines = {n: open_engine(workspace, SUPPORT, runtime, workers=groups.get(n)) for n in WORKERS}
        for streams in STREAMS:
            runs = {str(n): steps_of(engine, streams, rounds) for n, engine in engines.items()}
            found[str(streams)] = race(runs, rounds)
            for engine in engines.values():
                engine.clear()
    return found


def race_exchanges(rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Seconds of an exchange by streams and ranks; and parts of one, in microseconds, with two ranks."""
    found, parts = {}, {}
    with ExitStack() as stack:
        steps = {ranks: stack.enter_context(idle_group(ranks, WORLDS, SUPPORT)) for ranks in RANKS}
        for streams in STREAMS:
            runs = {str(ranks): exchange_of(step, streams, SUPPORT, CONTEXT) for ranks, step in steps.items()}
            times = race({ranks: partial(repeat, run) for ranks, run in runs.items()}, rounds)
            found[str(streams)] = {
                name: [t / (REPEATS if name in runs else 1) for t in ts] for name, ts in times.items()
            }
            parts[str(streams)] = profile(runs["2"], 25 * rounds)
    return found, parts


def repeat(run: Callable[[], object]) -> None:
    for _ in range(REPEATS):
        run()


def profile(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Medians of the parts of an exchange, microseconds."""
    seen: defaultdict[str, list[float]] = defaultdict(list)
    places = [("pack", workers, "packed"), ("send", wire.Wire, "post"), ("digest", workers, "digest_of")]
    places += [("receive", wire.Wire, "receive"), ("unpack", wire, "_unpacked")]
    with ExitStack() as stack:
        for name, place, attribute in places:
            stack.enter_context(timed(place, attribute, seen[name]))
        for _ in range(repeats):
            begun = time.perf_counter()
            run()
            seen["all"].append(time.perf_counter() - begun)
    found = {name: 1e6 * median(times) for name, times in seen.items()}
    found["wait"] = found.pop("receive") - found["unpack"]
    found["join, the rest"] = 2 * found["all"] - sum(found.values())
    return found


@contextmanager
def timed(place: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Note how long each call takes."""
    plain = getattr(place, name)

    @wraps(plain)
    def call(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return plain(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begun)

    setattr(place, name, call)
    try:
        yield
    finally:
        setattr(place, name, plain)


def main() -> None:
    """Print tables and, if asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="steps,exchange", help="steps, exchange, or both")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"worlds": options.worlds, "load before": os.getloadavg(), "cores": os.cpu_count()}
    if "exchange" in options.only:
        exchanges, parts = race_exchanges(5 * options.rounds)
        rows = [
            [f"{n} streams, {name}", f"{1e3 * median(times):.3f} ms", f"{1e3 * min(times):.3f}", spread(times)]
            for n, found in exchanges.items()
            for name, times in found.items()
        ]
        print_table(f"The exchange alone, by ranks; goal {GOAL_MS} ms with 2", ["", "time", "least", "spread"], rows)
        names = ("all", "pack", "send", "digest", "wait", "unpack", "join, the rest")
        rows = [[name, *(f"{parts[str(n)][name]:.0f}" for n in STREAMS)] for name in names]
        print_table("Its parts with two ranks, µs", ["", *(f"{n} streams" for n in STREAMS)], rows)
        figures |= {"exchange, s": exchanges, "parts, µs": parts}
    if "steps" in options.only:
        steps = race_steps(options.worlds, options.rounds)
        rows = []
        for n, found in steps.items():
            for name, times in found.items():
                ratio = "" if name == "control" else f"{median(found['1']) / median(times):.2f} ×"
                rows.append([f"{n} streams, {name}", f"{1e3 * median(times):.1f} ms", ratio, spread(times)])
        title = f"Steps of tiny by processes, {options.worlds} worlds, one thread each"
        print_table(title, ["", "step", "one ÷ this", "spread"], rows)
        figures |= {"steps, s": steps}
    figures["load after"] = os.getloadavg()
    print(
        f"\n  load {figures['load before'][0]:.1f} before, {figures['load after'][0]:.1f} after, {os.cpu_count()} cores"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
