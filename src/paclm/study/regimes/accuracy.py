"""Teacher-forced accuracy (`tab:accuracy`): the gain of private records, and the cost of subsampling and noise.

Fresh secret, uniform belief and fresh noise at every position; the same votes at every budget, so rows of one decoder
differ by noise alone. Decoders are not comparable with each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paclm.config import format_budget
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh

BUDGETS = tuple(2.0**-n for n in range(4, 33, 4))
FOOTNOTE = (2.0**-2, 1.0, 2.0**2, 2.0**4)


@dataclass(frozen=True, slots=True)
class AccuracyScale:
    positions: int
    gumbel_draws: int  # votes per position under Gumbel, with fresh coins each


def run(lab: Lab, scale: AccuracyScale) -> Findings:
    """Every budget, both decoders."""
    decodings = (GREEDY, GUMBEL.times(scale.gumbel_draws))
    rows = []
    for name, votes in lab.text_votes(scale.positions, decodings).items():
        advance = lab.start_task(f"accuracy, {name}", len(BUDGETS + FOOTNOTE) + 1)
        for per_token in (math.inf, *FOOTNOTE[::-1], *BUDGETS):
            rows.append({"decoder": name, **_at(lab, votes, per_token)})
            advance(1)
    return Findings(rows, [])


def _at(lab: Lab, votes: TextVotes, per_token: float) -> Row:
    rng = lab.rng("accuracy", "bootstrap")
    seed = lab.seed_for("accuracy", "noise")  # the same secrets and words at every budget
    (stream,) = play_fresh(votes, rule_named("gaussian"), per_token, 1, votes.num_positions, seed)
    hits = {
        "public": votes.public == votes.truth,
        "full": votes.column("full") == votes.truth,
        "noiseless": stream.realized == votes.truth,
        "private": stream.released == votes.truth,
    }
    row: Row = {"per_token_nats": per_token, "budget": format_budget(per_token), "positions": votes.num_positions}
    row["passages"] = len(np.unique(votes.passage))
    for name, right in hits.items():
        row[f"accuracy_{name}"], row[f"stderr_{name}"] = clustered_mean(right, votes.passage, rng)
    costs = {"gain": ("full", "public"), "subsampling": ("noiseless", "full"), "noise": ("private", "noiseless")}
    for name, (after, before) in costs.items():
        paired = hits[after].astype(np.float64) - hits[before]
        row[f"{name}_points"], row[f"{name}_stderr"] = clustered_mean(paired, votes.passage, rng)
    share = retained_gain(hits["private"], hits["public"], hits["full"], votes.passage, rng)
    row["retained_gain"], row["retained_gain_stderr"] = share or (None, None)
    row["same_as_noiseless"] = bool((stream.released == stream.realized).all())
    return row


REGIME = Regime(
    name="accuracy",
    title="Teacher-forced accuracy",
    question="How much of the gain of private records remains after subsampling and noise?",
    presets={"quick": AccuracyScale(4096, 2), "paper": AccuracyScale(8176, 2)},
    run=run,
    headlines=(
        headline("gain, {decoder}", "gain_points ± gain_stderr", "+.2%", budget="2^-32"),
        headline("retained at {budget}, {decoder}", "retained_gain ±", ".1%", budget="2^-32"),
        headline("cost of noise, {decoder}", "noise_points ± noise_stderr", "+.2%", budget="2^-32"),
    ),
)
