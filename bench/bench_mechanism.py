"""Microseconds per released token at m = 128 on recorded votes. Targets: served gaussian 20, replay 6.

The releases are served one token after another against one secret, with noise from the operating system. `replay` is
the study's session protocol, as `paclm replay` runs it, figures included. For comparison, the dense twin
(tests/reference/ambient.py) works on all 200 candidates with one eigendecomposition per token. One thread.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # before numpy: matrices this small want one thread

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from harness import median, print_table, race, spread  # noqa: E402
from paclm.privacy.belief import uniform_belief  # noqa: E402
from paclm.privacy.randomness import Noise  # noqa: E402
from paclm.privacy.releases import RULES  # noqa: E402
from paclm.study.recorded_votes import RecordedVotes  # noqa: E402
from paclm.study.replay import ReplaySettings, planned_tokens, replay  # noqa: E402
from reference import ambient  # noqa: E402

PER_TOKEN = 2.0**-16
RECORDED = RecordedVotes.load(ROOT / "tests/fixtures/votes/wikipedia-gumbel.npz")
REPLAY = ReplaySettings(per_token=PER_TOKEN, sessions=64, tokens=2048)


def stream(votes: np.ndarray, release) -> None:
    """Release every row in order against one secret."""
    belief, noise = uniform_belief(votes.shape[1]), Noise()
    for row in votes:
        belief = release(row, belief, 5, PER_TOKEN, noise).belief


def ambient_stream(votes: np.ndarray) -> None:
    """The same by the dense twin; unanimous tokens are skipped."""
    belief, rng = np.full(votes.shape[1], 1 / votes.shape[1]), np.random.default_rng(0)
    for row in votes:
        if (row != row[0]).any():
            _, belief = ambient.release(row, belief, 5, PER_TOKEN, rng, 200)


def split_votes(num_tokens: int, num_worlds: int, num_distinct: int) -> np.ndarray:
    """Votes that dissent at every token, with the given number of distinct votes."""
    rng = np.random.default_rng(1)
    return np.array([rng.permutation(np.arange(num_worlds) % num_distinct) for _ in range(num_tokens)])


def main() -> None:
    """Three tables: the releases on real votes, cost by number of worlds, cost by number of distinct votes."""
    real = np.ascontiguousarray(RECORDED.votes[:4096]).astype(np.int64)
    few = real[:128]
    contenders = {name: (lambda release=rule.release: stream(real, release)) for name, rule in RULES.items()}
    replayed, dense = "replay, gaussian", "dense twin, 200 candidates"
    seconds = race({**contenders, replayed: lambda: replay(RECORDED, REPLAY), dense: lambda: ambient_stream(few)})
    tokens = {replayed: planned_tokens(RECORDED, REPLAY), dense: len(few)}
    per_token = {name: median(s) / tokens.get(name, len(real)) * 1e6 for name, s in seconds.items()}
    twin = per_token[dense]
    dissent = (real != real[:, :1]).any(axis=1).mean()
    print_table(
        f"Released tokens on real votes, m = 128, {dissent:.1%} dissent, b = 2^-16",
        ["release", "µs/token", "twin ÷ release", "spread"],
        [
            [n, f"{per_token[n]:.2f}", f"{twin / per_token[n]:.0f}×", spread(seconds[n])]
            for n in seconds
            if n != "control"
        ]
        + [["control (machine)", "", "", spread(seconds["control"])]],
    )

    rows = []
    for num_worlds in (32, 128, 512, 1024):
        votes = {a: split_votes(256, num_worlds, a) for a in (1, 2, 3)}
        seconds = race({str(a): (lambda v=v: stream(v, RULES["gaussian"].release)) for a, v in votes.items()}, rounds=5)
        rows.append([str(num_worlds), *[f"{median(seconds[str(a)]) / 256 * 1e6:.1f}" for a in votes]])
    print_table("gaussian: µs/token by number of worlds", ["worlds", "unanimous", "2 distinct", "3 distinct"], rows)

    rows = []
    for num_distinct in (2, 3, 5, 9, 17, 33, 65, 128):
        votes = split_votes(64, 128, num_distinct)
        seconds = race(
            {name: (lambda v=votes, r=RULES[name].release: stream(v, r)) for name in ("gaussian", "channel")}, 5
        )
        rows.append([str(num_distinct), *[f"{median(seconds[n]) / 64 * 1e6:.1f}" for n in ("gaussian", "channel")]])
    print_table("µs/token by number of distinct votes, m = 128", ["distinct", "gaussian", "channel"], rows)


if __name__ == "__main__":
    main()
