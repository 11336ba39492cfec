"""Coupled against uncoupled training: the effect of one start and one order of records for all worlds.

The same worlds with the same records are trained twice. Coupled: all start from one adapter and follow one order, so
they differ by their records alone. Uncoupled: each has its own start and order. Text and coins are the same for both;
secret and noise are in expectation.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.expectation import IN_EXPECTATION, ExpectedReleases, score_hits
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import count_distinct
from paclm.study.statistics import clustered_mean
from paclm.worlds.layout import adapters_file

PER_TOKEN = 2.0**-32
PAIRED = ("unanimity", "accuracy_world", "accuracy_private")  # compared position by position


@dataclass(frozen=True, slots=True)
class CouplingScale:
    positions: int
    gumbel_draws: int  # as in the accuracy regime, which shares the coupled votes
    ceiling_positions: int  # for β


def run(lab: Lab, scale: CouplingScale) -> Findings:
    """Both ways of training, both decoders."""
    decodings = (GREEDY, GUMBEL.times(scale.gumbel_draws))
    coupled = lab.text_votes(scale.positions, decodings)
    uncoupled = lab.named("uncoupled")
    lab.ensure(uncoupled)

    def make() -> list[Row]:
        passages = lab.passages(scale.positions)
        advance = lab.start_task("votes of uncoupled worlds", sum(passage.num_scored for passage in passages))
        seeds = [lab.seed_for("coins", decoding.name) for decoding in decodings]  # the coins of the coupled votes
        loose = collect_votes(lab.engine(uncoupled, "full"), passages, decodings, seeds, True, advance)
        return [row for name in coupled for row in _rows_of(lab, name, coupled[name], loose[name])]

    trained = lab.workspace.manifest.adapters[adapters_file(uncoupled)]["sha256"]
    parts = lab.parts("coupling", [asdict(scale), trained])
    rows = parts.rows("votes", make)
    for way, adapters in (("coupled", lab.worlds_name), ("uncoupled", uncoupled)):
        found = parts.rows(way, partial(_ceiling, lab, scale, adapters))
        rows += [{"training": way, **row} for row in found]
    return Findings(rows, [IN_EXPECTATION])


def _rows_of(lab: Lab, decoder: str, coupled: TextVotes, uncoupled: TextVotes) -> list[Row]:
    """Both ways of training, and their difference, paired position by position."""
    common: Row = {"decoder": decoder, "positions": coupled.num_positions}
    tied, loose = map(_at_positions, (coupled, uncoupled))
    both = (("coupled", coupled, tied), ("uncoupled", uncoupled, loose))
    rows: list[Row] = [{"training": way, **common, **_figures(lab, votes, values)} for way, votes, values in both]
    added: Row = {"training": "difference", **common}
    for name in PAIRED:
        paired, rng = tied[name] - loose[name], lab.rng("coupling", "bootstrap")
        added[name], added[f"{name}_stderr"] = clustered_mean(paired, coupled.passage, rng)
    return [*rows, added]


def _at_positions(votes: TextVotes) -> dict[str, FloatArray]:
    """The values at every position that are averaged."""
    found = ExpectedReleases(votes).under(rule_named("gaussian"), PER_TOKEN)
    right = {"public": votes.public, "full": votes.column("full")}
    return {
        "unanimity": (~votes.is_dissent).astype(np.float64),
        "accuracy_world": found.noiseless,
        "accuracy_private": found.hits,
        **{f"accuracy_{name}": (tokens == votes.truth).astype(np.float64) for name, tokens in right.items()},
    }


def _figures(lab: Lab, votes: TextVotes, values: dict[str, FloatArray]) -> Row:
    distinct = count_distinct(votes.votes[votes.is_dissent])
    row: Row = {
        "distinct_given_dissent": float(distinct.mean()) if distinct.size else None,
        "distinct_p95": float(np.percentile(distinct, 95)) if distinct.size else None,
    }
    for name, each in values.items():
        rng = lab.rng("hits", "bootstrap")
        row[name], row[f"{name}_stderr"] = clustered_mean(each, votes.passage, rng)
    scored = score_hits(lab, votes, values["accuracy_private"])
    return row | {name: scored[name] for name in ("retained_gain", "retained_gain_stderr")}


def _ceiling(lab: Lab, scale: CouplingScale, adapters: str) -> list[Row]:
    """Mean β: the largest rate of agreement that any coupling of the decoders could reach."""
    from paclm.engine.census import coupling_ceiling

    each = 1 + math.ceil(scale.ceiling_positions / len(lab.test_passages))  # a little of every window: many clusters
    passages = [(passage.document, passage.tokens[: 1 + each]) for passage in lab.test_passages]
    advance = lab.start_task(f"coupling ceiling, {adapters}", sum(len(tokens) - 1 for _, tokens in passages))
    engine = lab.engine(adapters)
    values, clusters = [], []
    for document, tokens in passages:
        for hidden in engine.windows(tokens, len(tokens)):
            _, logits = engine.restricted(hidden)
            values.append(coupling_ceiling(logits[:, :-1]).cpu().numpy())
            clusters.append(np.full(len(values[-1]), document))
            advance(len(values[-1]))
    found = clustered_mean(np.concatenate(values), np.concatenate(clusters), lab.rng("coupling", "ceiling"))
    return [{"decoder": "any", "ceiling": found.mean, "ceiling_stderr": found.stderr}]


REGIME = Regime(
    name="coupling",
    title="Coupled training",
    question="What is the effect of training all worlds from one start and in one order?",
    presets={"quick": CouplingScale(4096, 2, 512), "paper": CouplingScale(65_408, 1, 4096)},
    run=run,
    headlines=(
        headline("unanimity, {decoder}, {training}", "unanimity ±", ".1%"),
        headline("retained gain, {decoder}, {training}", "retained_gain ±", ".0%"),
        headline("ceiling β, {training}", "ceiling ±", ".3f"),
    ),
    for_each_collection=False,
)
