"""Baselines of your own on the same votes, beside the public model, the full-corpus adapter and every release.

Teacher-forced coupled-Gumbel votes of the test text; a fresh secret at every position for releases that read it.
Baselines come from plugins (`paclm.baselines`). Their guarantees are what their authors state: nothing here checks
them. Methods over shard models are in the regime `pmixed`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import IntArray
from paclm.privacy.releases import Rule
from paclm.study.baselines.baseline import Baseline
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh

PUBLIC = Baseline("public model", "reads no private record", lambda votes, _: votes.public)
FULL = Baseline("full corpus", "none about the corpus", lambda votes, _: votes.column("full"))


@dataclass(frozen=True, slots=True)
class BaselinesScale:
    positions: int
    gumbel_draws: int
    per_token: float = 2.0**-16  # of releases that read the secret


def run(lab: Lab, scale: BaselinesScale) -> Findings:
    """One row per method."""
    votes = lab.gumbel_votes(scale.positions, scale.gumbel_draws)
    parts = lab.parts("baselines", [asdict(scale), votes.digest])
    methods: list[tuple[str | None, Baseline]] = [(None, PUBLIC), (None, FULL)]
    methods += [(lab.origin_of(rule.name), _of_rule(lab, rule, scale.per_token)) for rule in lab.rules.values()]
    methods += [(plugin.origin, one) for plugin, one in lab.plugged("baselines")]
    advance = lab.start_task("baselines", len(methods))
    rows: list[Row] = []
    for package, method in methods:
        rows += parts.rows(f"baselines-{method.name}", partial(_rows, lab, votes, package, method))
        advance(1)
    return Findings(rows, ["Guarantees of plugins are as their authors state them."])


def _of_rule(lab: Lab, rule: Rule, per_token: float) -> Baseline:
    """A release as a baseline: one pass, a fresh secret at every position."""
    budget = per_token if rule.reads_secret else math.inf

    def release(votes: TextVotes, _: np.random.Generator) -> IntArray:
        (stream,) = play_fresh(votes, rule, budget, 1, votes.num_positions, lab.seed_for("baselines"))
        return stream.released

    stated = f"{format_budget(budget)} nats a token" if rule.reads_secret else "no leak about the realized world"
    return Baseline(rule.name, stated, release)


def _rows(lab: Lab, votes: TextVotes, package: str | None, method: Baseline) -> list[Row]:
    right = method.tokens(votes, lab.rng("baselines", method.name)) == votes.truth
    public, full = votes.public == votes.truth, votes.column("full") == votes.truth
    rng = lab.rng("baselines", "bootstrap")
    row: Row = {"method": method.name, "package": package, "guarantee": method.guarantee, "positions": right.size}
    row["accuracy"], row["accuracy_stderr"] = clustered_mean(right, votes.passage, rng)
    share = retained_gain(right, public, full, votes.passage, rng)
    row["retained_gain"], row["retained_gain_stderr"] = share or (None, None)
    return [row]


REGIME = Regime(
    name="baselines",
    title="Baselines",
    question="What do other methods keep of the gain on the same votes, and what do they guarantee?",
    presets={"quick": BaselinesScale(4096, 2), "paper": BaselinesScale(65_408, 1)},
    run=run,
    headlines=(headline("accuracy, {method}", "accuracy ±", ".1%"),),
)
