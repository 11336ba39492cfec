"""Budget flatness (`tab:flatness`, `fig:flatness`): the budget drives the noise; how far does accuracy follow?

Fresh secret, uniform belief and fresh noise at every position, as for accuracy. Budgets share votes, secrets and
normal draws, so a flip is against the same realized vote at every budget. Under Gumbel every position is voted on
several times with fresh coins; greedy votes do not change, so there secrets and noise are drawn several times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Advance, Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import count_distinct
from paclm.study.statistics import clustered_mean
from paclm.study.streams import play_fresh

BUDGETS = tuple(2.0**-n for n in range(4, 33, 4))


@dataclass(frozen=True, slots=True)
class FlatnessScale:
    positions: int
    draws: int  # of coins under Gumbel; of secret and noise under greedy


class VotesBeforeNoise:
    """The votes of one decoder, repeated for every pass, and which positions the figures are over."""

    def __init__(self, lab: Lab, votes: TextVotes, passes: int) -> None:
        self._lab, self._passes, self._votes = lab, passes, votes
        (majority,) = play_fresh(votes, rule_named("plurality"), math.inf, 1, votes.num_positions, 0)
        voted = (votes.votes == votes.truth[:, None]).any(axis=1)
        self.truth, self.passage, self.distinct, self.truth_voted, self.majority_right = (
            np.concatenate([column] * passes)
            for column in (
                *(votes.truth, votes.passage, count_distinct(votes.votes), voted),
                majority.released == votes.truth,
            )
        )  # (n,) each
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

    def play(self, per_token: float) -> tuple[IntArray, IntArray, FloatArray]:
        """Released and realized tokens (n,), and σ at every dissenting position."""
        votes, seed = self._votes, self._lab.seed_for("flatness", "noise")  # the same draws at every budget
        streams = list(play_fresh(votes, rule_named("gaussian"), per_token, self._passes, votes.num_positions, seed))
        released, realized, scales = (
            np.concatenate([getattr(stream, name) for stream in streams]) for name in ("released", "realized", "scales")
        )
        return released, realized, scales

    def row(self, per_token: float, released: IntArray, realized: IntArray, scales: FloatArray) -> Row:
        """Noise, flips and accuracy at one budget."""
        right = released == self.truth
        change = right.astype(np.float64) - (realized == self.truth)
        row: Row = {
            "per_token_nats": per_token,
            "budget": format_budget(per_token),
            "sigma_median": float(np.median(scales)) if scales.size else None,
            "sigma_max": float(scales.max()) if scales.size else None,
        }
        where = ("", "_dissent", "_majority_right", "_majority_wrong")
        flips = ("flip", released != realized, ("", "_unanimous", "_dissent"))
        for name, values, suffixes in (flips, ("accuracy", right, where), ("change", change, where)):
            for suffix in suffixes:
                row[name + suffix], row[f"{name}{suffix}_stderr"] = self.mean(values, self.among[suffix])
        dissent = self.among["_dissent"]
        row["change_by_arithmetic"] = float(dissent.mean()) * row["change_dissent"] if dissent.any() else 0.0
        return row


def run(lab: Lab, scale: FlatnessScale) -> Findings:
    """Every budget, both decoders."""
    rows: list[Row] = []
    decodings = (GREEDY, GUMBEL.times(scale.draws))
    for name, votes in lab.text_votes(scale.positions, decodings, with_full=False).items():
        advance = lab.start_task(f"flatness, {name}", len(BUDGETS))
        passes = scale.draws if name == GREEDY.name else 1
        rows += [{"decoder": name, **row} for row in decoder_rows(lab, votes, passes, advance)]
    return Findings(rows, [])


def decoder_rows(lab: Lab, votes: TextVotes, passes: int, advance: Advance) -> list[Row]:
    """One row without noise, then one per budget."""
    before = VotesBeforeNoise(lab, votes, passes)
    rows: list[Row] = []
    for per_token in BUDGETS:
        released, realized, scales = before.play(per_token)
        if not rows:
            rows.append(before.row(math.inf, realized, realized, np.zeros(1)))
        rows.append(before.row(per_token, released, realized, scales))
        advance(1)
    common = before.common()
    return [{**row, **common} for row in rows]


REGIME = Regime(
    name="flatness",
    title="Budget flatness",
    question="Tightening the budget multiplies the noise: how far does accuracy follow, and why no further?",
    presets={"quick": FlatnessScale(2048, 4), "paper": FlatnessScale(2048, 8)},
    run=run,
    headlines=(
        headline("flips given dissent, {decoder}", "flip_dissent ±", ".1%", budget="2^-32"),
        headline("change of accuracy, {decoder}", "change ±", "+.2%", budget="2^-32"),
    ),
)
