"""Adaptive temperature: lowered where the worlds differ, against one temperature everywhere.

A ladder of temperatures is decoded on the same coins. A rule takes, at every position, the largest one at which the
worlds agree well enough. It sees the votes of all worlds at every temperature and nothing else: never the secret
(proof: `docs/internals/mechanisms.md`). Every rule is compared with fixed temperatures at an equal distance from the
ladder's first: the share of votes that it changes. Where no fixed temperature has that distance the next two are mixed
by a public coin, which mixes all of their figures in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import Estimate
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL, Decoding
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime
from paclm.study.results import Result, Row
from paclm.study.statistics import clustered_mean, retained_gain

LADDER = (1.0, 0.85, 0.7, 0.5, 0.3, 0.0)  # 0: greedy
ENDS = {  # by the end of their columns
    "noiseless": ("gaussian", math.inf),
    "plurality": ("plurality", math.inf),
    "at_8": ("gaussian", 2.0**-8),
    "at_32": ("gaussian", 2.0**-32),
}
DISTANCE = (
    "Distance: the share of votes that differ from the same world's vote at the first temperature with the same coins. "
    "It bounds the total variation between the laws of a world's token. Gains are measured against public model and "
    "full-corpus adapter at the temperature that was chosen for the position. Differences at an equal distance are "
    "paired; their errors are over passages and take the distance as given."
)


class TemperatureRule(NamedTuple):
    """The largest temperature at which at most this share of the worlds dissents from the plurality."""

    name: str
    most_dissent: float
    falls_back: bool  # where no temperature has so little dissent: to the last one, or else to the first


ADAPTIVE = (
    TemperatureRule("agree, else first", 0.0, False),
    TemperatureRule("agree, else last", 0.0, True),
    TemperatureRule("1/16", 1 / 16, True),
    TemperatureRule("1/4", 1 / 4, True),
)


@dataclass(frozen=True, slots=True)
class TemperatureScale:
    positions: int
    draws: int  # of coins
    temperatures: tuple[float, ...] = LADDER


class Measured(NamedTuple):
    """What is averaged over positions, (n,) each; of a mixture by a public coin, the means over that coin."""

    dissent: FloatArray
    distance: FloatArray
    public: FloatArray  # hits of the public model
    full: FloatArray  # hits of the full-corpus adapter
    hits: Mapping[str, FloatArray]  # by release and budget

    def mixed(self, other: Measured, share: float) -> Measured:
        """This one, or with probability `share` the other, by a public coin at every position."""

        def mean(one: FloatArray, two: FloatArray) -> FloatArray:
            return (1.0 - share) * one + share * two

        return Measured(
            mean(self.dissent, other.dissent),
            mean(self.distance, other.distance),
            mean(self.public, other.public),
            mean(self.full, other.full),
            {end: mean(hits, other.hits[end]) for end, hits in self.hits.items()},
        )


def choose_temperatures(votes: Sequence[IntArray], rule: TemperatureRule) -> IntArray:
    """Which of the temperatures is used at each position, (n,), from the votes (n, m) of all worlds at each of them.

    Positions stand alone, and worlds may be renumbered: the secret has no way in.
    """
    dissent = np.array([1.0 - plurality_share(one) for one in votes])  # (temperatures, n)
    is_enough = dissent <= rule.most_dissent
    is_enough[-1 if rule.falls_back else 0] |= ~is_enough.any(axis=0)
    chosen: IntArray = is_enough.argmax(axis=0)
    return chosen


def plurality_share(votes: IntArray) -> FloatArray:
    """The share of the worlds behind the most frequent vote: (n, m) → (n,)."""
    ordered, m = np.sort(votes, axis=1), votes.shape[1]
    place = np.arange(m)
    starts = np.ones(votes.shape, dtype=np.bool_)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)  # where each world's group of equal votes begins
    share: FloatArray = (place - first + 1).max(axis=1) / m
    return share


def pick_votes(ladder: Sequence[TextVotes], chosen: IntArray) -> TextVotes:
    """At every position the votes of the chosen temperature, also of public model and full-corpus adapter."""
    rows = np.arange(len(chosen))
    columns = ("votes", "public", "full")
    picked = {name: np.stack([one.column(name) for one in ladder])[chosen, rows] for name in columns}
    return replace(ladder[0], **picked)


def run(lab: Lab, scale: TemperatureScale) -> Findings:
    """Every fixed temperature, then every rule."""
    decodings = [decoding_at(tau).times(scale.draws) for tau in scale.temperatures]
    found = lab.text_votes(scale.positions, decodings)
    ladder = [found[decoding.name] for decoding in decodings]
    parts = lab.parts("temperature", [asdict(scale), [votes.digest for votes in ladder]])
    rows = parts.rows("temperature", partial(_rows, lab, scale, ladder))
    return Findings(rows, [IN_EXPECTATION, DISTANCE])


def decoding_at(temperature: float) -> Decoding:
    """Sampling at a temperature on the coins of τ = 1; greedy at 0."""
    for known in (GUMBEL, GREEDY):  # greedy draws no coins: its votes are the same in every draw
        if temperature == known.temperature:
            return known
    return Decoding(f"gumbel-{temperature:g}", temperature, coins=GUMBEL.name)


def _rows(lab: Lab, scale: TemperatureScale, ladder: Sequence[TextVotes]) -> list[Row]:
    advance = lab.start_task("temperatures", len(ladder) + len(ADAPTIVE))
    fixed: list[Measured] = []
    rows: list[Row] = []
    for temperature, votes in zip(scale.temperatures, ladder, strict=True):
        fixed.append(_measure(votes, ladder[0]))
        row = {"kind": "fixed", "rule": f"τ = {temperature:g}", "temperature": temperature}
        rows.append(row | _row(lab, votes, fixed[-1]))
        advance(1)
    for rule in ADAPTIVE:
        chosen = choose_temperatures([votes.votes for votes in ladder], rule)
        votes = pick_votes(ladder, chosen)
        own, row = _measure(votes, ladder[0]), {"kind": "adaptive", "rule": rule.name}
        row |= {"temperature": float(np.mean(np.array(scale.temperatures)[chosen])), "most_dissent": rule.most_dissent}
        row["lowered"] = float((chosen > 0).mean())
        rows.append(row | _row(lab, votes, own) | _against_fixed(lab, votes, own, fixed))
        advance(1)
    return rows


def _measure(votes: TextVotes, first: TextVotes) -> Measured:
    expected = ExpectedReleases(votes)
    return Measured(
        votes.is_dissent.astype(np.float64),
        (votes.votes != first.votes).mean(axis=1),
        (votes.public == votes.truth).astype(np.float64),
        (votes.column("full") == votes.truth).astype(np.float64),
        {end: expected.under(rule_named(name), per_token).hits for end, (name, per_token) in ENDS.items()},
    )


def _row(lab: Lab, votes: TextVotes, own: Measured) -> Row:
    row: Row = {"positions": votes.num_positions, "worlds": votes.num_worlds}
    row["dissent"], row["dissent_stderr"] = _mean(lab, votes, own.dissent)
    row["distance"], row["distance_stderr"] = _mean(lab, votes, own.distance)
    row["accuracy_public"], row["accuracy_full"] = float(own.public.mean()), float(own.full.mean())
    for end, hits in own.hits.items():
        for name, values in (("accuracy", hits), ("lead", hits - own.public)):
            row[f"{name}_{end}"], row[f"{name}_{end}_stderr"] = _mean(lab, votes, values)
        kept = retained_gain(hits, own.public, own.full, votes.passage, lab.rng("hits", "bootstrap"))
        row[f"retained_gain_{end}"], row[f"retained_gain_{end}_stderr"] = kept or (None, None)
    return row


def _mean(lab: Lab, votes: TextVotes, values: FloatArray) -> Estimate:
    return clustered_mean(values, votes.passage, lab.rng("hits", "bootstrap"))


def _against_fixed(lab: Lab, votes: TextVotes, own: Measured, fixed: Sequence[Measured]) -> Row:
    """Dissent and gain kept less those of fixed temperatures at an equal distance; nothing where there are none."""
    other = at_distance(fixed, float(own.distance.mean()))
    if other is None:
        return {}
    row: Row = {"dissent_fixed": float(other.dissent.mean())}
    row["dissent_change"], row["dissent_change_stderr"] = _mean(lab, votes, own.dissent - other.dissent)
    for end in ENDS:
        lead, stays = (one.hits[end] - one.public for one in (own, other))
        row[f"lead_change_{end}"], row[f"lead_change_{end}_stderr"] = _mean(lab, votes, lead - stays)
        one, two = _share(own, end), _share(other, end)
        if one is not None and two is not None:
            row[f"kept_fixed_{end}"], row[f"kept_change_{end}"] = two[0], one[0] - two[0]
            row[f"kept_change_{end}_stderr"] = _mean(lab, votes, one[1] - two[1]).stderr
    return row


def at_distance(fixed: Sequence[Measured], distance: float) -> Measured | None:
    """Fixed temperatures that together change so many votes: two neighbours on the ladder, mixed by a public coin."""
    for one, two in pairwise(fixed):
        low, high = one.distance.mean(), two.distance.mean()
        if low <= distance <= high and low < high:
            return one.mixed(two, float((distance - low) / (high - low)))
    return None


def _share(one: Measured, end: str) -> tuple[float, FloatArray] | None:
    """The share of the gain that is kept, and what each position adds to its error; None without a gain."""
    gain, kept = one.full - one.public, one.hits[end] - one.public
    if not gain.mean() > 0.0:
        return None
    ratio = float(kept.mean() / gain.mean())
    return ratio, (kept - ratio * gain) / gain.mean()


def in_short(result: Result) -> list[str]:
    """Every rule beside fixed temperatures at its distance."""
    lines = []
    for row in result.select(kind="adaptive", collection=1):
        text = f"{row['rule']}: {row['distance']:.1%} of votes changed, dissent {row['dissent']:.1%}"
        if row.get("dissent_fixed") is not None:
            text += f" (fixed: {row['dissent_fixed']:.1%})"
        if row.get("kept_change_at_32") is not None:
            change, error = (100 * row[f"kept_change_at_32{end}"] for end in ("", "_stderr"))
            text += f", kept at 2^-32 {row['retained_gain_at_32']:.0%}, {change:+.1f} ± {error:.1f} points of fixed"
        lines.append(text)
    return lines


REGIME = Regime(
    name="temperature",
    title="Adaptive temperature",
    question="Does a lower temperature where worlds differ buy less dissent or more gain than one temperature?",
    presets={"quick": TemperatureScale(4096, 2), "paper": TemperatureScale(65_408, 1)},
    run=run,
    in_short=in_short,
)
