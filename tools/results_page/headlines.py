"""The headline figures of docs/research/results.md: each has one definition and is a value of one row of a result.

    found = HEADLINES["kept, Gumbel"].figure(study)          a Cell with its error, and what it rests on
    record(studies)                                          what docs/research/results/earlier.json holds
    changes(studies, earlier)                                what differs from it

Holds the definitions; the page prints them beside the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paclm.study.cell import Cell, make_cell
from paclm.study.expectation import IN_EXPECTATION
from paclm.study.paper_numbers import NOTHING, PAPER
from paclm.study.results import Result, Row, Value
from paclm.worlds.layout import WORLDS_FILE
from results_page import pooling
from results_page.evaluation import Evaluation

SAMPLES = ("positions", "passages", "sessions", "members")
"""Columns that say how much a figure rests on; where a row has none of them, the sizes of the result."""


class Figure(NamedTuple):
    """A headline of one evaluation."""

    cell: Cell
    basis: str  # what it was measured on
    interval: tuple[float, float] | None = None  # where several collections are pooled

    def shown(self) -> str:
        """With its error, or with its interval: few collections would make an error read too narrowly."""
        if self.interval is None:
            return self.cell.ours()
        value, low, high = (
            replace(self.cell, value=end, stderr=None).ours() for end in (self.cell.value, *self.interval)
        )
        return f"{value} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A figure of the row of a result that has certain values."""

    name: str
    meaning: str
    regime: str
    value: str  # as in `Column`
    style: str
    where: Mapping[str, Value]
    largest: str = ""  # of several such rows the one with the largest value of this column
    beside: str = ""  # the paper's table with the same figure
    per: str = ""  # another headline that this one is divided by

    def figure(self, study: Evaluation, collection: int = 1) -> Figure | None:
        """The figure, if the evaluation has it."""
        rows = study.rows(self.regime, **self.where, collection=collection)
        row = max(rows, key=lambda row: row[self.largest]) if rows and self.largest else rows[0] if rows else None
        if row is None or row.get(self.value.split()[0]) is None:
            return None
        cell = make_cell(row, self.value, self.style, PAPER.get(self.beside, NOTHING).beside(row))
        if self.per:
            divisor = HEADLINES[self.per].figure(study, collection)
            if divisor is None or not cell.value:
                return None
            cell = replace(cell, value=int(cell.value / divisor.cell.value))
        is_pooled = "collections" in row and cell.stderr is not None
        ends = pooling.interval(row, self.value.split()[0]) if is_pooled else None
        return Figure(cell, _basis(study.results[self.regime], row), ends)


def _basis(result: Result, row: Row) -> str:
    if result.regime == "cost":
        return f"context {row['context']}"
    sizes = row if any(name in row for name in SAMPLES) else result.scale
    words = [f"{sizes[name]:,} {name}" for name in SAMPLES if type(sizes.get(name)) is int]
    return ", ".join([*words, "in expectation"] if IN_EXPECTATION in result.notes else words)


def _headline(name: str, meaning: str, regime: str, value: str, style: str, **rest: Any) -> Headline:
    named = {key: rest.pop(key) for key in ("largest", "beside", "per") if key in rest}
    return Headline(name=name, meaning=meaning, regime=regime, value=value, style=style, where=rest, **named)


_KEPT = "share of the gain that the paper's release keeps at 2^-32"
_ACCURACY = {"budget": "2^-32", "beside": "tab:accuracy"}
_LONG = {"budget": "2^-16", "largest": "horizon", "beside": "tab:session"}
HEADLINES = {
    one.name: one
    for one in (
        _headline(
            "gain, greedy",
            "accuracy of the full-corpus adapter above the public model's",
            *("accuracy", "gain_points ± gain_stderr", ".2%"),
            decoder="greedy",
            **_ACCURACY,
        ),
        _headline(
            "gain, Gumbel",
            "the same, sampled votes",
            *("accuracy", "gain_points ± gain_stderr", ".2%"),
            decoder="gumbel",
            **_ACCURACY,
        ),
        _headline("kept, greedy", _KEPT, "accuracy", "retained_gain ±", ".0%", decoder="greedy", **_ACCURACY),
        _headline(
            "kept, Gumbel",
            "the same, sampled votes",
            "accuracy",
            "retained_gain ±",
            ".0%",
            decoder="gumbel",
            **_ACCURACY,
        ),
        _headline(
            "kept without noise, Gumbel",
            "share that a uniformly drawn world keeps: b = ∞",
            *("accuracy", "retained_gain ±", ".0%"),
            decoder="gumbel",
            budget="inf",
        ),
        _headline(
            "cost of noise, Gumbel",
            "accuracy at 2^-32 less accuracy without noise",
            *("accuracy", "noise_points ± noise_stderr", ".2%"),
            decoder="gumbel",
            **_ACCURACY,
        ),
        _headline(
            "kept by `plurality`",
            "share kept by the token with most votes, Gumbel; never reads the secret",
            *("releases", "retained_gain ±", ".0%"),
            release="plurality",
        ),
        _headline(
            "kept by `mixture`",
            "share kept by a fresh world for every token, Gumbel; never reads the secret",
            *("releases", "retained_gain ±", ".0%"),
            release="mixture",
        ),
        _headline(
            "lead of `plurality`",
            "its accuracy less that of the paper's release at 2^-32, paired",
            *("releases", "lead_points ± lead_stderr", ".2%"),
            release="plurality",
        ),
        _headline(
            "worlds agree",
            "positions at which all worlds cast one greedy vote, support 200",
            *("census", "unanimity ±", ".1%"),
            support_size=200,
            beside="tab:census",
        ),
        _headline(
            "leaked ÷ charged",
            "longest sessions that write their own text, 2^-16, every token charged",
            *("sessions", "leaked_over_charged ±", ".1%"),
            **_LONG,
        ),
        _headline(
            "dissent when serving",
            "share of tokens in the same sessions on which worlds differ",
            *("sessions", "dissent ±", ".1%"),
            **_LONG,
        ),
        _headline(
            "tokens to a bound of 51%",
            "paper's release at 2^-32, every token charged, membership inference from even odds",
            *("releases", "tokens_until_every_token", ",.0f"),
            release="gaussian",
            budget="2^-32",
        ),
        _headline(
            "the same, dissent charged",
            "the line above ÷ dissent when serving",
            *("releases", "tokens_until_every_token", ",.0f"),
            release="gaussian",
            budget="2^-32",
            per="dissent when serving",
        ),
        _headline(
            "tokens' share of the leak",
            "leak of the tokens ÷ leak of the history that the theorem bounds, 2^-16",
            *("tokens_only", "tokens_over_history ±", ".0%"),
            release="gaussian",
            budget="2^-16",
        ),
        _headline(
            "kept by DP-SGD, ε = 8",
            "share that an adapter trained by DP-SGD keeps, Gumbel",
            *("dp", "retained_gain ±", ".0%"),
            decoder="gumbel",
            epsilon=8.0,
        ),
        _headline(
            "kept by DP-SGD, ε = 1",
            "the same at the smallest ε",
            *("dp", "retained_gain ±", ".0%"),
            decoder="gumbel",
            epsilon=1.0,
        ),
        _headline(
            "headroom, the paper's release",
            "share of its own ceiling at PMixED's bound for ε = 1, most queries",
            *("pmixed", "headroom ±", ".0%"),
            kind="pac",
            release="gaussian",
            epsilon=1.0,
            largest="queries",
            beside="tab:pmixed-full, PAC",
        ),
        _headline(
            "headroom, PMixED",
            "the same of PMixED, read generously",
            *("pmixed", "headroom ±", ".0%"),
            kind="matched",
            reading="generous",
            epsilon=1.0,
            is_selected=True,
            largest="queries",
            beside="tab:pmixed-full, PMixED",
        ),
        _headline(
            "corpus membership, adapters held",
            "AUC of the spread of losses over worlds; a guess has one half",
            *("universe", "auc ±", ".3f"),
            part="score",
            attack="spread",
        ),
        _headline(
            "tokens a second",
            "one stream with its durable ledger, at the shortest context timed",
            *("cost", "tokens_per_second", ".0f"),
            what="serving",
            sequences=1,
        ),
    )
}


def record(studies: Iterable[Evaluation]) -> dict[str, Any]:
    """Every headline of every evaluation, and the digest of its worlds."""
    return {
        study.folder.name: {
            "worlds": _worlds(study),
            "figures": {
                name: {"value": found.cell.value, "stderr": found.cell.stderr, "basis": found.basis}
                for name, headline in HEADLINES.items()
                if (found := headline.figure(study))
            },
        }
        for study in studies
    }


class Change(NamedTuple):
    """A headline that is not what it was."""

    name: str
    study: str
    before: str
    now: str
    errors: float | None  # the difference in standard errors of both, as if they were independent
    basis_before: str
    basis_now: str


def changes(studies: Iterable[Evaluation], earlier: Mapping[str, Any]) -> list[Change]:
    """Headlines whose figure or basis differs from the earlier page's."""
    found = []
    for study in studies:
        before = earlier.get(study.folder.name, {}).get("figures", {})
        for name, headline in HEADLINES.items():
            now, old = headline.figure(study), before.get(name)
            if now is None or old is None or (now.cell.value, now.basis) == (old["value"], old["basis"]):
                continue
            was = replace(now.cell, value=old["value"], stderr=old["stderr"])
            error = math.hypot(now.cell.stderr or 0.0, old["stderr"] or 0.0)
            apart = (now.cell.value - old["value"]) / error if error else None
            found.append(Change(name, study.title, was.ours(), now.cell.ours(), apart, old["basis"], now.basis))
    return found


REDEFINED = {
    "kept without noise, Gumbel": "b = ∞ has the same secret as every other budget; before, another was drawn for it."
}
"""Headlines whose figure is another one of the same results."""
EARLIER = ("wiki", "cables", "wikitext", "collections")
"""Evaluations of the earlier page."""


def reasons(
    changed: Iterable[Change], studies: Iterable[Evaluation], earlier: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Why figures changed, as far as results and the earlier record tell: each reason with its headlines."""
    retrained = {
        study.title
        for study in studies
        if study.folder.name in earlier and _worlds(study) != earlier[study.folder.name]["worlds"]
    }
    found: dict[str, list[str]] = {}
    for one in changed:
        before, now = one.basis_before, one.basis_now
        told = [
            (
                "in expectation" in now and "in expectation" not in before,
                "Secret and noise are in expectation; before, they were drawn.",
            ),
            (
                _passages(now) > 2 * _passages(before) > 0,
                "Text is stretches of all held-out records; before, the beginnings of a few, too few for good errors.",
            ),
            (one.study in retrained, "The worlds were trained again: other adapters from the same records."),
            (before != now, "The sample is of another size (last column)."),
        ]
        why = [reason for applies, reason in told if applies]
        for reason in why or [REDEFINED.get(one.name, "No reason is on record.")]:
            found.setdefault(reason, []).append(f"{one.name} ({one.study})")
    return found


def added(studies: Iterable[Evaluation]) -> list[str]:
    """Evaluations that the earlier page did not have."""
    return [study.title for study in studies if study.folder.name not in EARLIER]


def _worlds(study: Evaluation) -> str | None:
    """The digest of the worlds' adapters."""
    digest = study.origin["adapters"].get(WORLDS_FILE)
    return None if digest is None else str(digest)


def _passages(basis: str) -> int:
    (count,) = [part.split()[0] for part in basis.split(", ") if part.endswith(" passages")] or ["0"]
    return int(count.replace(",", ""))
