"""Stability census (`tab:census`): how often worlds agree, and how much of each the public support covers.

Greedy votes on held-out text. The coupling ceiling β follows from the worlds' distributions on the renormalised
support at τ = 1 and does not depend on the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import BoolArray, IntArray
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
    positions_at_largest: int | None = None  # of the largest support, as in the paper; None: all


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
    keep = np.concatenate([np.asarray(passage.is_scored[1:], dtype=np.bool_) for passage in passages])
    cluster = np.concatenate([np.full(passage.num_scored, passage.document) for passage in passages])  # where kept
    if keep.sum() < scale.positions:
        notes.append(f"The test text has {keep.sum():,} positions of the {scale.positions:,} asked for.")
    advance = lab.start_task("census", len(keep))
    found = take_census(engine, [passage.tokens for passage in passages], sizes, advance=advance)
    rows = []
    for size, census in found.items():
        limit = scale.positions_at_largest if size == max(scale.support_sizes) else None
        rows.append(_row(lab, size, census, keep, cluster, limit))
    return Findings(rows, notes)


def _row(lab: Lab, size: int, census: Census, keep: BoolArray, cluster: IntArray, limit: int | None) -> Row:
    distinct = census.num_distinct[keep][:limit]
    mass = census.mass_coverage[keep][:limit]
    ceiling = census.ceiling[keep][:limit]
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
        "argmax_coverage": census.argmax_coverage[keep][:limit],
        "mass_coverage": mass,
        "ceiling": ceiling,
    }
    for name, values in columns.items():
        row[name], row[f"{name}_stderr"] = clustered_mean(values, cluster[:limit], rng)
    return row


REGIME = Regime(
    name="census",
    title="Stability census",
    question="How often do worlds trained on different halves of the records vote for the same token?",
    presets={"quick": CensusScale(2048), "paper": CensusScale(65_053, positions_at_largest=19_982)},
    run=run,
    headlines=(
        headline("unanimity, k = {support_size}", "unanimity ±", ".1%"),
        headline("ceiling β, k = {support_size}", "ceiling ±", ".1%"),
    ),
)
