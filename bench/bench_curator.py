"""What the curator itself takes: an engine that answers at once with recorded votes of 128 worlds, and a real ledger.

The first table is what HTTP and engine leave to the curator: tokens per second, and what stands between the votes of
one step and the launch of the next, when a GPU waits. The rest of a step happens while it computes. `in memory` is the
same curator whose commits are not sealed, signed or written. The second table has the parts of a step; its commits are
written and not synced, so that it does not show the disk.

Run: python bench/bench_curator.py [--steps 200]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # before numpy: matrices this small want one thread

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from curator.deployments import build_workspace, set_mechanism  # noqa: E402
from harness import median, print_table  # noqa: E402
from paclm.curator.curator import Curator  # noqa: E402
from paclm.curator.custody import Custody  # noqa: E402
from paclm.engine.base_model import TINY_FOLDER  # noqa: E402
from paclm.engine.engine import Ballot  # noqa: E402
from paclm.study.recorded_votes import RecordedVotes  # noqa: E402

RECORDED = RecordedVotes.load(ROOT / "tests/fixtures/votes/wikipedia-gumbel.npz")
SIZES = (1, 16, 100)
SUPPORT = 200
PARTS = {
    "coins, one step ahead": "_draw_coins",
    "votes checked": "_collect",
    "append and launch": "_continue",
    "text and pieces": "_deliver",
}


class RecordedEngine:
    """Answers every step at once with the next recorded votes. Notes how long each caller took to launch again."""

    num_worlds, support_size, vocabulary, context, num_free = RECORDED.num_worlds, SUPPORT, 8192, 2048, 10**6

    def __init__(self) -> None:
        votes = RECORDED.votes.astype(np.int64) + 1000  # no special tokens
        self._votes, self._public = votes, votes[:, 0]
        self._handle = self._row = 0
        self._launched: Sequence[int] = ()
        self.answered = 0.0
        self.waits: list[float] = []

    def has_room(self, num_tokens: int) -> bool:
        return True

    def add(self, tokens: Sequence[int], max_new_tokens: int, owner: str | None = None) -> int:
        self._handle += 1
        return self._handle

    def prefill(self) -> None:
        pass

    def is_ready(self, handle: int) -> bool:
        return True

    def launch(self, handles: Sequence[int], coins: Any, temperature: Sequence[float], allowed: Any) -> None:
        if self.answered:
            self.waits.append(time.perf_counter() - self.answered)
        self._launched = handles

    def collect(self) -> Ballot:
        n = len(self._launched)
        self._row = (self._row + n) % (len(self._votes) - 1000)
        rows = slice(self._row, self._row + n)
        ballot = Ballot(self._votes[rows, :1], self._votes[rows], self._public[rows])
        self.answered = time.perf_counter()
        return ballot

    def step(self, handles: Sequence[int], coins: Any, temperature: Sequence[float]) -> Ballot:
        self.launch(handles, coins, temperature, None)
        return self.collect()

    def append(self, handle: int, token: int) -> None:
        pass

    def remove(self, handle: int) -> None:
        pass

    def probe(self, context: Sequence[int], coins: Any) -> tuple[Any, Any]:
        return self._votes[0], np.zeros(1)


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


def steps_of(curator: Curator, sequences: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step of so many streams, and seconds between votes and the next launch."""
    engine: Any = curator._engine
    streams = [curator.submit(curator.request("The patient", steps + 4, tag=f"key {i % 8}")) for i in range(sequences)]
    for _ in range(2):
        curator.step()
    engine.waits.clear()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        curator.step()
        seconds.append(time.perf_counter() - started)
    waits = list(engine.waits)
    for stream in streams:
        curator.cancel(stream)
    engine.answered = 0.0
    return seconds, waits


def parts_of(curator: Curator, sequences: int, steps: int) -> dict[str, float]:
    """Microseconds per step of each part, by a watch around it: medians."""
    seconds: dict[str, list[float]] = {}

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            result = work(*args)
            seconds.setdefault(name, []).append(time.perf_counter() - started)
            return result

        return run

    watches: list[tuple[Any, str, str]] = [(curator, attribute, name) for name, attribute in PARTS.items()]
    watches += [(curator._releaser, "charges", "charges"), (curator._releaser, "release", "releases")]
    for owner, attribute, name in watches:
        setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    original = Custody.commit
    Custody.commit = watched("commit, not synced", original)  # type: ignore[method-assign]
    steps_of(curator, sequences, steps)
    Custody.commit = original  # type: ignore[method-assign]
    for owner, attribute, _ in watches:
        delattr(owner, attribute)
    return {name: median(values) * 1e6 for name, values in seconds.items()}


def main() -> None:
    """Two tables: the curator as a whole, and the parts of a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-parts", action="store_true", help="only the first table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PACLM_STATE_DIR"] = temporary
        texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(400)]
        path = build_workspace(Path(temporary) / "clinic", texts, TINY_FOLDER, RECORDED.num_worlds, spread=0.02).path
        set_mechanism(path, per_token="2^-32", total="2^-4", support_size=SUPPORT)
        with Curator.open(path, engine=RecordedEngine()) as curator:
            report(curator, options.steps, has_parts=not options.no_parts)


def report(curator: Curator, steps: int, *, has_parts: bool) -> None:
    """Print the tables."""
    rows = []
    for n in SIZES:
        seconds, waits = steps_of(curator, n, steps)
        with commits_in_memory():
            unwritten, _ = steps_of(curator, n, steps)
        step, memory, wait = (median(values) * 1e6 for values in (seconds, unwritten, waits))
        figures = (n / step * 1e6, step, step / n, memory, wait)
        rows.append([str(n), *(f"{figure:,.0f}" for figure in figures)])
    dissent = f"{RECORDED.is_dissent.mean():.0%} dissent"
    print_table(
        f"The curator alone, {RECORDED.num_worlds} worlds, {dissent}, medians of {steps} steps",
        ["streams", "tokens/s", "µs/step", "µs/token", "µs/step in memory", "µs from votes to launch"],
        rows,
    )
    if has_parts:
        curator._custody.ledger.store.db.execute("PRAGMA synchronous=OFF")
        parts = {n: parts_of(curator, n, steps) for n in SIZES}
        print_table(
            "Parts of a step, µs",
            ["part", *(f"{n} streams" for n in SIZES)],
            [[name, *(f"{parts[n][name]:,.0f}" for n in SIZES)] for name in parts[1]],
        )


if __name__ == "__main__":
    main()
