"""Time to the first token and between tokens over HTTP, against the curator called directly in one process.

Both serve the same number of streams over the same engine, and take turns: tiny with 32 worlds, random adapters (speed
does not depend on them). The direct curator sets the pace; what HTTP, JSON and the event loop add is the ratio.

Run: python bench/bench_server.py [--worlds 32 --clients 16 --rounds 3 --seconds 4 --tokens 24]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(min(8, os.cpu_count() or 1)))

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from curator.deployments import build_workspace, set_mechanism  # noqa: E402
from harness import print_table  # noqa: E402
from paclm.curator.curator import Curator  # noqa: E402
from paclm.engine.base_model import TINY_FOLDER, base_of, load_tokenizer  # noqa: E402
from paclm.engine.loading import open_engine  # noqa: E402
from paclm.worlds.workspace import Workspace  # noqa: E402
from server.live import serve  # noqa: E402
from server.load import Received, ask_for, prompt_of  # noqa: E402


def run_directly(curator: Curator, options: argparse.Namespace) -> Received:
    """The same load without HTTP: every client asks again when its answer has ended."""
    got = Received()
    until = time.monotonic() + options.seconds
    asked: dict[Any, float] = {}
    last: dict[Any, float] = {}
    clients = {
        curator.submit(curator.request(prompt_of(n), options.tokens, greedy=True)): n for n in range(options.clients)
    }
    asked.update(dict.fromkeys(clients, time.perf_counter()))
    while curator.num_active:
        deliveries = curator.step()
        now = time.perf_counter()
        for stream, _ in deliveries:
            (got.between if stream in last else got.first).append(now - last.get(stream, asked[stream]))
            last[stream] = now
            got.tokens += 1
            if stream.finish_reason is not None:
                got.complete += 1
                client = clients.pop(stream)
                if time.monotonic() < until:
                    again = curator.submit(curator.request(prompt_of(client), options.tokens, greedy=True))
                    clients[again], asked[again] = client, time.perf_counter()
    return got


def row(name: str, got: Received, seconds: float) -> list[str]:
    """One line of the table."""
    first, between = np.percentile(got.first, [50, 99]) * 1e3, np.percentile(got.between, [50, 99]) * 1e3
    cells = [f"{value:.1f}" for value in (*first, *between)]
    return [name, f"{got.tokens / seconds:.0f}", *cells]


def main() -> None:
    """One table: over HTTP, directly, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PACLM_STATE_DIR"] = temporary
        texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(400)]
        path = build_workspace(Path(temporary) / "clinic", texts, TINY_FOLDER, options.worlds, spread=0.02).path
        set_mechanism(path, per_token="2^-40", total="2^-10", support_size=200)
        workspace = Workspace.open(path)
        engine, tokenizer = open_engine(workspace, 200), load_tokenizer(base_of(workspace))
        direct, over_http = Measured(), Measured()
        for _ in range(options.rounds):
            with Curator.open(workspace, engine=engine, tokenizer=tokenizer) as curator:
                direct.add(lambda curator=curator: run_directly(curator, options))
            with serve(workspace, engine, tokenizer, admin_name=f"admin-{time.time_ns()}") as live:
                load = {"clients": options.clients, "seconds": options.seconds, "tokens": options.tokens}
                over_http.add(lambda live=live, load=load: ask_for(live.url, live.admin, **load))
    report(options, direct, over_http)


class Measured:
    """What was received in all rounds, and in how many seconds."""

    def __init__(self) -> None:
        self.got = Received()
        self.seconds = 0.0

    def add(self, run: Callable[[], Received]) -> None:
        """One round."""
        started = time.perf_counter()
        got = run()
        self.seconds += time.perf_counter() - started
        self.got.tokens += got.tokens
        self.got.first += got.first
        self.got.between += got.between


def report(options: argparse.Namespace, direct: Measured, over_http: Measured) -> None:
    """Print the table."""
    rows = [
        row("curator, directly", direct.got, direct.seconds),
        row("server, over HTTP", over_http.got, over_http.seconds),
    ]
    ratios = [f"{float(b) / float(a):.2f}×" for a, b in zip(rows[0][1:], rows[1][1:], strict=True)]
    print_table(
        f"tiny, {options.worlds} worlds, {options.clients} clients, answers of {options.tokens} tokens (ms)",
        ["", "tokens/s", "first p50", "first p99", "between p50", "between p99"],
        [*rows, ["ratio", *ratios]],
    )


if __name__ == "__main__":
    main()
