"""float32 against bfloat16: does the faster arithmetic change the tables?

The same text, coins and adapters; only the arithmetic of the forward pass differs. Single votes may differ: what must
hold is that unanimity and accuracy do not change by more than the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result
from paclm.study.statistics import clustered_mean

TOLERANCE = 0.005  # half a point: the most by which unanimity and accuracy may differ


@dataclass(frozen=True, slots=True)
class PrecisionScale:
    positions: int


def run(lab: Lab, scale: PrecisionScale) -> Findings:
    """Both decoders in both arithmetics."""
    found: dict[str, dict[str, TextVotes]] = {}
    for dtype in ("float32", "bfloat16"):
        other = lab.with_runtime(replace(lab.runtime, dtype=dtype))
        found[dtype] = other.text_votes(scale.positions, (GREEDY, GUMBEL), with_full=False)
    rows = []
    for decoder in ("greedy", "gumbel"):
        wide, narrow = found["float32"][decoder], found["bfloat16"][decoder]
        row: dict[str, object] = {"decoder": decoder, "positions": wide.num_positions}
        scores = {
            "unanimity": [~votes.is_dissent for votes in (wide, narrow)],
            "accuracy": [(votes.votes == votes.truth[:, None]).mean(axis=1) for votes in (wide, narrow)],  # of worlds
        }
        for name, (first, second) in scores.items():
            paired, rng = np.subtract(second, first, dtype=np.float64), lab.rng("precision", decoder, name)
            row[f"{name}_float32"], row[f"{name}_bfloat16"] = float(first.mean()), float(second.mean())
            row[f"{name}_difference"], row[f"{name}_stderr"] = clustered_mean(paired, wide.passage, rng)
        row["equal_votes"] = float((wide.votes == narrow.votes).mean())
        rows.append(row)
    return Findings(rows, [])


def verdicts(result: Result) -> list[str]:
    """Whether unanimity and accuracy stay within the tolerance."""
    names = ("unanimity_difference", "accuracy_difference")
    largest = max(abs(row[name]) for row in result.rows for name in names)
    verdict = "within" if largest <= TOLERANCE else "NOT within"
    return [f"largest change of unanimity or accuracy: {largest:.2%}, {verdict} the tolerance of {TOLERANCE:.1%}"]


REGIME = Regime(
    name="precision",
    title="Arithmetic",
    question="Do the tables change when the forward pass runs in bfloat16 instead of float32?",
    presets={"quick": PrecisionScale(1024), "paper": PrecisionScale(16384)},
    run=run,
    headlines=(headline("equal votes, {decoder}", "equal_votes", ".1%"),),
    verdicts=verdicts,
    for_each_collection=False,
)
