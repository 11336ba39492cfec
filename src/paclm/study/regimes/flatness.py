"""Budget flatness (`tab:flatness`, `fig:flatness`): the budget drives the noise; how far does accuracy follow?

Fresh secret, uniform belief and fresh noise at every position, as for accuracy. Budgets share votes, secrets and
normal draws, so a flip is against the same realized vote at every budget. Under Gumbel every position is voted on
several times with fresh coins; greedy votes do not change, so there secrets and noise are drawn several times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """How much is measured."""

    positions: int
    draws: int  # of coins under Gumbel; of secret and noise under greedy


@dataclass(frozen=True, slots=True)
class _Ground:
    """The votes of one decoder before any noise; all arrays (n,), draws one after another."""

    votes: IntArray  # (n, m)
    truth: IntArray
    passage: IntArray
    distinct: IntArray
    majority_right: BoolArray
    truth_voted: BoolArray

    @property
    def is_dissent(self) -> BoolArray:
        differs: BoolArray = self.distinct > 1
        return differs


def run(lab: Lab, scale: FlatnessScale) -> Findings:
    """Every budget, both decoders."""
    decodings = (GREEDY, GUMBEL.times(scale.draws))
    rows: list[Row] = []
    for name, votes in lab.text_votes(scale.positions, decodings, with_full=False).items():
        passes = scale.draws if name == GREEDY.name else 1
        advance = lab.start_task(f"flatness, {name}", len(BUDGETS) + 1)
        rows += [{"decoder": name, **row} for row in _decoder_rows(lab, votes, passes, advance)]
    return Findings(rows, [])


def _decoder_rows(lab: Lab, votes: TextVotes, passes: int, advance: Advance) -> list[Row]:
    ground = _ground(votes, passes)
    common = _before_noise(lab, ground)
    rows: list[Row] = []
    for per_token in BUDGETS:
        released, realized, scales = _play(lab, votes, passes, per_token)
        if not rows:
            rows.append({**_at(lab, ground, math.inf, realized, realized, np.zeros(1)), **common})
        rows.append({**_at(lab, ground, per_token, released, realized, scales), **common})
        advance(1)
    return rows


def _play(lab: Lab, votes: TextVotes, passes: int, per_token: float) -> tuple[IntArray, IntArray, FloatArray]:
    """Released and realized tokens (n,), and σ at every dissenting position."""
    seed = lab.seed_for("flatness", "noise")  # the same secrets and normal draws at every budget
    length = votes.num_positions
    streams = list(play_fresh(votes, rule_named("gaussian"), per_token, passes, length, seed))
    released, realized, scales = (
        np.concatenate([getattr(stream, name) for stream in streams]) for name in ("released", "realized", "scales")
    )
    return released, realized, scales


def _ground(votes: TextVotes, passes: int) -> _Ground:
    cast = votes.votes
    (majority,) = play_fresh(votes, rule_named("plurality"), math.inf, 1, len(cast), 0)
    columns = {
        "votes": cast,
        "truth": votes.truth,
        "passage": votes.passage,
        "distinct": count_distinct(cast),
        "majority_right": majority.released == votes.truth,
        "truth_voted": (cast == votes.truth[:, None]).any(axis=1),
    }
    return _Ground(**{name: np.concatenate([column] * passes) for name, column in columns.items()})


def _before_noise(lab: Lab, ground: _Ground) -> Row:
    """The columns that do not depend on the budget."""
    dissent, voted = ground.is_dissent, ground.is_dissent & ground.truth_voted
    distinct = ground.distinct[dissent].astype(np.float64)
    row: Row = {
        "positions": int(dissent.size),
        "passages": len(np.unique(ground.passage)),
        "dissent_fraction": float(dissent.mean()),
        "mean_distinct_given_dissent": float(distinct.mean()) if distinct.size else None,
        "flip_limit": 1.0 - 1.0 / float(distinct.mean()) if distinct.size else None,
        "flip_limit_per_position": float((1.0 - 1.0 / distinct).mean()) if distinct.size else None,
        "truth_not_voted_given_dissent": float(1.0 - ground.truth_voted[dissent].mean()) if distinct.size else None,
    }
    majority = _share(lab, ground.majority_right, ground, voted)
    row["majority_right_given_voted"], row["majority_right_given_voted_stderr"] = majority
    row["positions_truth_voted"] = int(voted.sum())
    return row


def _at(lab: Lab, ground: _Ground, per_token: float, released: IntArray, realized: IntArray, scales: FloatArray) -> Row:
    everywhere = np.ones(len(released), dtype=np.bool_)
    dissent, voted = ground.is_dissent, ground.is_dissent & ground.truth_voted
    flip, right = released != realized, released == ground.truth
    change = right.astype(np.float64) - (realized == ground.truth)
    figures: Mapping[str, Estimate] = {
        "accuracy": _share(lab, right, ground, everywhere),
        "flip": _share(lab, flip, ground, everywhere),
        "flip_unanimous": _share(lab, flip, ground, ~dissent),
        "flip_dissent": _share(lab, flip, ground, dissent),
        "accuracy_dissent": _share(lab, right, ground, dissent),
        "accuracy_majority_right": _share(lab, right, ground, voted & ground.majority_right),
        "accuracy_majority_wrong": _share(lab, right, ground, voted & ~ground.majority_right),
        "change": _share(lab, change, ground, everywhere),
        "change_dissent": _share(lab, change, ground, dissent),
        "change_majority_right": _share(lab, change, ground, voted & ground.majority_right),
        "change_majority_wrong": _share(lab, change, ground, voted & ~ground.majority_right),
    }
    row: Row = {
        "per_token_nats": per_token,
        "budget": format_budget(per_token),
        "sigma_median": float(np.median(scales)) if scales.size else None,
        "sigma_max": float(scales.max()) if scales.size else None,
    }
    for name, (mean, stderr) in figures.items():
        row[name], row[f"{name}_stderr"] = mean, stderr
    row["change_by_arithmetic"] = float(dissent.mean()) * figures["change_dissent"].mean if dissent.any() else 0.0
    return row


def _share(lab: Lab, values: FloatArray | BoolArray, ground: _Ground, among: BoolArray) -> Estimate:
    """Mean over some of the positions, with errors over passages."""
    if not among.any():
        return Estimate(math.nan, math.nan)
    return clustered_mean(values[among], ground.passage[among], lab.rng("flatness", "bootstrap"))


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
