"""Teacher-forced accuracy (`tab:accuracy`): the gain of private records, and the cost of subsampling and noise.

In expectation over a uniform secret and the noise at every position, under a uniform belief; the same votes at every
budget, so rows of one decoder differ by noise alone. Errors are over passages: only the text and its votes are a
sample. Decoders are not comparable with each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paclm.config import format_budget
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases, score_hits
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean

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
        expected = ExpectedReleases(votes)
        for per_token in (math.inf, *FOOTNOTE[::-1], *BUDGETS):
            rows.append({"decoder": name, **_at(lab, votes, expected, per_token)})
            advance(1)
    return Findings(rows, [IN_EXPECTATION])


def _at(lab: Lab, votes: TextVotes, expected: ExpectedReleases, per_token: float) -> Row:
    found = expected.under(rule_named("gaussian"), per_token)
    hits = {
        "public": (votes.public == votes.truth).astype(np.float64),
        "full": (votes.column("full") == votes.truth).astype(np.float64),
        "noiseless": found.noiseless,
        "private": found.hits,
    }
    row: Row = {"per_token_nats": per_token, "budget": format_budget(per_token), "positions": votes.num_positions}
    row["passages"] = len(np.unique(votes.passage))
    for name, right in hits.items():
        scored = score_hits(lab, votes, right)
        row[f"accuracy_{name}"], row[f"stderr_{name}"] = scored["accuracy"], scored["accuracy_stderr"]
        if name == "private":
            row["retained_gain"], row["retained_gain_stderr"] = scored["retained_gain"], scored["retained_gain_stderr"]
    costs = {"gain": ("full", "public"), "subsampling": ("noiseless", "full"), "noise": ("private", "noiseless")}
    for name, (after, before) in costs.items():
        paired, rng = hits[after] - hits[before], lab.rng("hits", "bootstrap")
        row[f"{name}_points"], row[f"{name}_stderr"] = clustered_mean(paired, votes.passage, rng)
    row["flip_dissent"] = float(found.flips[votes.is_dissent].mean()) if votes.is_dissent.any() else None
    row["integration_error"] = found.hits_error
    row["same_as_noiseless"] = bool(found.flips.sum() < 0.5)  # not one token of this text is expected to differ
    return row


REGIME = Regime(
    name="accuracy",
    title="Teacher-forced accuracy",
    question="How much of the gain of private records remains after subsampling and noise?",
    presets={"quick": AccuracyScale(4096, 2), "paper": AccuracyScale(65_408, 1)},
    run=run,
    headlines=(
        headline("gain, {decoder}", "gain_points ± gain_stderr", "+.2%", budget="2^-32"),
        headline("retained at {budget}, {decoder}", "retained_gain ±", ".1%", budget="2^-32"),
        headline("cost of noise, {decoder}", "noise_points ± noise_stderr", "+.2%", budget="2^-32"),
    ),
)
