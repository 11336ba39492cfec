"""Run regimes that need nothing but votes on recorded ones, for the page of results.

    python tools/recorded_votes.py tests/fixtures/votes --out docs/research/results/recorded

Reads `wikipedia-greedy.npz` and `wikipedia-gumbel.npz`: the votes of 128 LoRA worlds and of a full-corpus adapter over
SmolLM2-135M at 32,768 positions of Wikipedia articles. How they were trained and on which articles is not recorded, nor
where one article ends; errors are over stretches of 512 positions. From 32 to 2,048 positions they change by a third.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paclm.study.decoding import Decoding
from paclm.study.lab import Lab
from paclm.study.parts import Kept, Parts
from paclm.study.recorded_votes import RecordedVotes, TextVotes
from paclm.study.regimes import regime_named
from paclm.study.regimes.accuracy import AccuracyScale
from paclm.study.regimes.flatness import FlatnessScale
from paclm.study.regimes.releases import ReleasesScale
from paclm.study.regimes.temperature import TemperatureScale
from paclm.study.regimes.worlds import WorldsScale
from paclm.study.results import Result, plain, provenance_of_run

STRETCH = 512
POSITIONS = 32_768
SCALES = {
    "accuracy": AccuracyScale(POSITIONS, 1),
    "flatness": FlatnessScale(POSITIONS, 1),
    "releases": ReleasesScale(POSITIONS, 1, 100, 4096),
    "worlds": WorldsScale(POSITIONS, 1),
    "temperature": TemperatureScale(POSITIONS, 1, (1.0, 0.0)),  # only the two ends of the ladder are recorded
}


class RecordedLab(Lab):
    """A lab without a workspace, whose only text is that of the votes."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self.seed, self.collection, self.plugins = 0, 1, ()
        self.start_task = lambda what, total: lambda _: None
        self.kept = Kept()
        self.votes = {
            path.stem.removeprefix("wikipedia-"): load(path) for path in sorted(folder.glob("wikipedia-*.npz"))
        }
        self._folder = kept

    @property
    def num_worlds(self) -> int:
        return self.votes["greedy"].num_worlds

    def text_votes(
        self, num_positions: int, decodings: Sequence[Decoding], *, with_full: bool = True
    ) -> dict[str, TextVotes]:
        """All that are recorded, whatever is asked for."""
        return {decoding.name: self.votes[decoding.name] for decoding in decodings}

    def parts(self, regime: str, scale: Any, *, is_lasting: bool = False) -> Parts:
        """Kept for this run alone."""
        return Parts(self._folder, [regime, scale], self.kept)


def load(path: Path) -> TextVotes:
    """Recorded votes with stretches of the text as passages."""
    votes = RecordedVotes.load(path)
    position = np.arange(votes.num_positions)
    return TextVotes(**votes.columns(), passage=position // STRETCH, position=position)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("votes", type=Path, help="folder with the two files")
    parser.add_argument("--out", type=Path, required=True, help="folder for results/*.json")
    return parser.parse_args()


def main() -> None:
    """Run all regimes."""
    options = parse_arguments()
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in options.votes.glob("wikipedia-*")}
    for name, scale in SCALES.items():
        with tempfile.TemporaryDirectory() as kept:
            lab = RecordedLab(options.votes, Path(kept))
            started = time.perf_counter()
            found = regime_named(name).run(lab, scale)
        result = Result(
            regime=name,
            preset="paper",
            seed=lab.seed,
            scale=asdict(scale),
            rows=plain([{"collection": 1, **row} for row in found.rows]),
            notes=found.notes,
            seconds=time.perf_counter() - started,
            provenance={
                "worlds": lab.num_worlds,
                "base_name": "SmolLM2-135M",
                "adapters": {},
                "votes": digests,
                **provenance_of_run("recorded votes"),
            },
        )
        result.save(options.out / "results")
        print(f"{name}: {result.seconds:.0f} s", *regime_named(name).summary(result), sep="\n  ")


if __name__ == "__main__":
    main()
