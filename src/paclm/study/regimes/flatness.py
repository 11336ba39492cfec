"""Budget flatness (`tab:flatness`, `fig:flatness`): the budget drives the noise; how far does accuracy follow?

In expectation over secret and noise at every position, as for accuracy; budgets share the votes. A flip is a released
token that is not the realized world's vote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.privacy.leak import Estimate
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.expectation import IN_EXPECTATION, Expected, ExpectedReleases
from paclm.study.lab import Advance, Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import count_distinct
from paclm.study.statistics import clustered_mean

BUDGETS = tuple(2.0**-n for n in range(4, 33, 4))


@dataclass(frozen=True, slots=True)
class FlatnessScale:
    positions: int
    draws: int  # of coins, under Gumbel


class VotesBeforeNoise:
    """The votes of one decoder, and which positions the figures are over."""

    def __init__(self, lab: Lab, votes: TextVotes) -> None:
        self._lab = lab
        self.expected = ExpectedReleases(votes)
        self.passage = votes.passage
        self.distinct = count_distinct(votes.votes)
        self.truth_voted: BoolArray = (votes.votes == votes.truth[:, None]).any(axis=1)
        self.majority_right: BoolArray = self.expected.under(rule_named("plurality"), math.inf).hits == 1.0
        dissent: BoolArray = self.distinct > 1
        self.among = {
            "": np.ones(len(dissent), dtype=np.bool_),
            "_unanimous": ~dissent,
            "_dissent": dissent,
            "_majority_right": dissent & self.truth_voted & self.majority_right,
            "_majority_wrong": dissent & self.truth_voted & ~self.majority_right,
        }

    def mean(self, values: FloatArray | BoolArray, among: BoolArray) -> Estimate:
        """Mean over some of the positions, with errors over passages."""
        if not among.any():
            return Estimate(math.nan, math.nan)
        return clustered_mean(values[among], self.passage[among], self._lab.rng("flatness", "bootstrap"))

    def common(self) -> Row:
        """The columns that do not depend on the budget."""
        dissent = self.among["_dissent"]
        voted = dissent & self.truth_voted
        distinct = self.distinct[dissent].astype(np.float64)
        row: Row = {
            "positions": int(dissent.size),
            "passages": len(np.unique(self.passage)),
            "dissent_fraction": float(dissent.mean()),
            "mean_distinct_given_dissent": float(distinct.mean()) if distinct.size else None,
            "flip_limit": 1.0 - 1.0 / float(distinct.mean()) if distinct.size else None,
            "flip_limit_per_position": float((1.0 - 1.0 / distinct).mean()) if distinct.size else None,
            "truth_not_voted_given_dissent": float(1.0 - self.truth_voted[dissent].mean()) if distinct.size else None,
            "positions_truth_voted": int(voted.sum()),
        }
        majority = self.mean(self.majority_right, voted)
        row["majority_right_given_voted"], row["majority_right_given_voted_stderr"] = majority
        return row

    def row(self, per_token: float) -> Row:
        """Noise, flips and accuracy at one budget."""
        found: Expected = self.expected.under(rule_named("gaussian"), per_token)
        scales = np.zeros(1) if per_token == math.inf else self.expected.noise_scales(per_token)
        row: Row = {
            "per_token_nats": per_token,
            "budget": format_budget(per_token),
            "sigma_median": float(np.median(scales)) if scales.size else None,
            "sigma_max": float(scales.max()) if scales.size else None,
        }
        where = ("", "_dissent", "_majority_right", "_majority_wrong")
        flips = ("flip", found.flips, ("", "_unanimous", "_dissent"))
        change = ("change", found.hits - found.noiseless, where)
        for name, values, suffixes in (flips, ("accuracy", found.hits, where), change):
            for suffix in suffixes:
                row[name + suffix], row[f"{name}{suffix}_stderr"] = self.mean(values, self.among[suffix])
        dissent = self.among["_dissent"]
        row["change_by_arithmetic"] = float(dissent.mean()) * row["change_dissent"] if dissent.any() else 0.0
        return row


def run(lab: Lab, scale: FlatnessScale) -> Findings:
    """Every budget, both decoders."""
    rows: list[Row] = []
    decodings = (GREEDY, GUMBEL.times(scale.draws))
    for name, votes in lab.text_votes(scale.positions, decodings).items():
        advance = lab.start_task(f"flatness, {name}", len(BUDGETS) + 1)
        rows += [{"decoder": name, **row} for row in decoder_rows(lab, votes, advance)]
    return Findings(rows, [IN_EXPECTATION])


def decoder_rows(lab: Lab, votes: TextVotes, advance: Advance) -> list[Row]:
    """One row without noise, then one per budget."""
    before = VotesBeforeNoise(lab, votes)
    rows: list[Row] = []
    for per_token in (math.inf, *BUDGETS):
        rows.append(before.row(per_token))
        advance(1)
    common = before.common()
    return [{**row, **common} for row in rows]


REGIME = Regime(
    name="flatness",
    title="Budget flatness",
    question="Tightening the budget multiplies the noise: how far does accuracy follow, and why no further?",
    presets={"quick": FlatnessScale(4096, 2), "paper": FlatnessScale(65_408, 1)},
    run=run,
    headlines=(
        headline("flips given dissent, {decoder}", "flip_dissent ±", ".1%", budget="2^-32"),
        headline("change of accuracy, {decoder}", "change ±", "+.2%", budget="2^-32"),
    ),
)
