"""Tokens per second with and without the ledger, 16 sequences at once, and what each part of a step takes.

The alternative is the same curator whose commits are kept in memory: no sealing, no signature, no disk. Both take
turns over the same engine and the same number of steps. The worlds' adapters are random: speed does not depend on them.

Run: python bench/bench_curator.py [--worlds 32 --sequences 16 --steps 12]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(min(8, os.cpu_count() or 1)))

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from curator.deployments import build_workspace, set_mechanism  # noqa: E402
from harness import median, print_table, race, spread  # noqa: E402
from paclm.curator.curator import Curator  # noqa: E402
from paclm.curator.custody import Custody  # noqa: E402
from paclm.engine.base_model import TINY_FOLDER  # noqa: E402
from paclm.engine.loading import open_engine  # noqa: E402
from paclm.worlds.workspace import Workspace  # noqa: E402

PARTS = {"votes of all worlds": "_ask", "releases": "_release", "text and engine": "_deliver"}


@contextmanager
def commits_in_memory() -> Iterator[None]:
    """What a curator without a ledger would do: remember the belief, and forget it when the process ends."""
    original = Custody.commit

    def forgetful(self: Custody, entries: Any, belief: Any) -> None:
        list(entries)
        self.belief = belief

    Custody.commit = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        Custody.commit = original  # type: ignore[method-assign]


def run_steps(curator: Curator, sequences: int, steps: int) -> None:
    """So many engine steps of so many streams."""
    streams = [curator.submit(curator.request("The patient", steps)) for _ in range(sequences)]
    for _ in range(steps):
        curator.step()
    for stream in streams:
        curator.cancel(stream)


def measure_parts(curator: Curator, sequences: int, steps: int) -> dict[str, float]:
    """Milliseconds per step of each part, by a watch around it."""
    seconds = dict.fromkeys([*PARTS, "commit, durable", "whole step"], 0.0)

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            result = work(*args)
            seconds[name] += time.perf_counter() - started
            return result

        return run

    for name, attribute in PARTS.items():
        setattr(curator, attribute, watched(name, getattr(curator, attribute)))
    original = Custody.commit
    Custody.commit = watched("commit, durable", original)  # type: ignore[method-assign]
    started = time.perf_counter()
    run_steps(curator, sequences, steps)
    seconds["whole step"] = time.perf_counter() - started
    Custody.commit = original  # type: ignore[method-assign]
    for attribute in PARTS.values():
        delattr(curator, attribute)
    return {name: value / steps * 1e3 for name, value in seconds.items()}


def main() -> None:
    """Two tables: throughput with and without the ledger, and the parts of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PACLM_STATE_DIR"] = temporary
        texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(400)]
        path = build_workspace(Path(temporary) / "clinic", texts, TINY_FOLDER, options.worlds, spread=0.02).path
        set_mechanism(path, per_token="2^-32", total="2^-10", support_size=200)
        workspace = Workspace.open(path)
        with Curator.open(workspace, engine=open_engine(workspace, 200)) as curator:
            report(curator, options)


def report(curator: Curator, options: argparse.Namespace) -> None:
    """Print the tables."""

    def with_ledger() -> None:
        run_steps(curator, options.sequences, options.steps)

    def without() -> None:
        with commits_in_memory():
            run_steps(curator, options.sequences, options.steps)

    contenders = {"with the ledger": with_ledger, "commits in memory": without}
    seconds = race(contenders, rounds=5)
    tokens = options.sequences * options.steps
    print_table(
        f"tiny, {options.worlds} worlds, {options.sequences} sequences, {options.steps} steps",
        ["curator", "tokens/s", "ms/step", "spread"],
        [
            [name, f"{tokens / median(s):.0f}", f"{median(s) / options.steps * 1e3:.2f}", spread(s)]
            for name, s in seconds.items()
            if name != "control"
        ]
        + [["control (machine)", "", "", spread(seconds["control"])]],
    )
    parts = measure_parts(curator, options.sequences, options.steps)
    whole = parts["whole step"]
    print_table(
        "Parts of a step (prefill shared out over the steps is in the whole)",
        ["part", "ms", "share"],
        [[name, f"{value:.3f}", f"{value / whole:.1%}"] for name, value in parts.items()],
    )


if __name__ == "__main__":
    main()
