"""Stability census (`tab:census`): how often worlds agree, and how much of each the public support covers.

Greedy votes on held-out text. The coupling ceiling β follows from the worlds' distributions on the renormalised
support at τ = 1 and does not depend on the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import IntArray
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean

if TYPE_CHECKING:
    from paclm.engine.census import Census

HYBRID_THRESHOLD = 0.9
"""β from which the hybrid rule of the ablation uses the maximal coupling, which scatters with probability 1 − β."""


@dataclass(frozen=True, slots=True)
class CensusScale:
    positions: int
    support_sizes: tuple[int, ...] = (50, 200, 1000)


def run(lab: Lab, scale: CensusScale) -> Findings:
    """One pass over the text for all support sizes."""
    from paclm.engine.census import take_census

    engine = lab.engine()
    sizes = [size for size in scale.support_sizes if size < engine.vocabulary]
    notes = [
        f"k = {size:,} is left out: the vocabulary has only {engine.vocabulary:,} tokens."
        for size in scale.support_sizes
        if size not in sizes
    ]
    passages = lab.passages(scale.positions)
    cluster = np.concatenate([np.full(passage.num_scored, passage.document) for passage in passages])
    if len(cluster) < scale.positions:
        notes.append(f"The test text has {len(cluster):,} positions of the {scale.positions:,} asked for.")
    advance = lab.start_task("census", sum(len(passage) - 1 for passage in passages))
    found = take_census(engine, [(passage.tokens, passage.is_scored) for passage in passages], sizes, advance=advance)
    return Findings([_row(lab, size, census, cluster) for size, census in found.items()], notes)


def _row(lab: Lab, size: int, census: Census, cluster: IntArray) -> Row:
    distinct = census.num_distinct
    mass = census.mass_coverage
    ceiling = census.ceiling
    rng = lab.rng("census", "bootstrap")
    row: Row = {
        "support_size": size,
        "positions": int(distinct.size),
        "worlds": lab.num_worlds,
        "median_distinct": float(np.median(distinct)),
        "p95_distinct": float(np.percentile(distinct, 95)),
        "max_distinct": int(distinct.max()),
        "mean_distinct_given_dissent": float(distinct[distinct > 1].mean()) if (distinct > 1).any() else None,
        "mass_coverage_median": float(np.median(mass)),
        "mass_coverage_p5": float(np.percentile(mass, 5)),
        "hybrid_share": float((ceiling >= HYBRID_THRESHOLD).mean()),
        "hybrid_scatter": float(np.where(ceiling >= HYBRID_THRESHOLD, 1.0 - ceiling, 0.0).mean()),
    }
    columns = {
        "unanimity": distinct == 1,
        "argmax_coverage": census.argmax_coverage,
        "mass_coverage": mass,
        "ceiling": ceiling,
    }
    for name, values in columns.items():
        row[name], row[f"{name}_stderr"] = clustered_mean(values, cluster, rng)
    return row


REGIME = Regime(
    name="census",
    title="Stability census",
    question="How often do worlds trained on different halves of the records vote for the same token?",
    presets={"quick": CensusScale(2048), "paper": CensusScale(65_408)},
    run=run,
    headlines=(
        headline("unanimity, k = {support_size}", "unanimity ±", ".1%"),
        headline("ceiling β, k = {support_size}", "ceiling ±", ".1%"),
    ),
)
