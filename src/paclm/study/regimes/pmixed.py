"""PMixED, InvisibleInk and neighbours against PAC, at matched bounds on membership inference (`sec:pmixed-results`).

Accuracy is the mean probability that the released token is the true one, computed and not drawn for PMixED and
InvisibleInk: they sample, and so does coupled Gumbel.
PAC draws inside the public top-200 and PMixED over the whole vocabulary, which alone moves accuracy, so PMixED is also
cut to that support afterwards and the public model is shown both ways. The two guarantees differ in kind: equal bounds
on one attack are not equal strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.releases import Rule
from paclm.study.baselines.accountants import matched_nats, success_at_half
from paclm.study.baselines.distributions import Distributions, text_distributions
from paclm.study.baselines.ink_rows import InkSearch, ink_choices, ink_rows, select_ink
from paclm.study.baselines.ink_search import TEMPERATURES, InkPlayer, targets_of
from paclm.study.baselines.neighbours import Neighbours
from paclm.study.baselines.pmixed import PMixedSettings
from paclm.study.baselines.search import Choice, Digest, DpTarget, choose, expected_truth, make_digest, play
from paclm.study.baselines.shards import authors_refinements, ensure_shards
from paclm.study.baselines.worst_case import worst_loss
from paclm.study.expectation import ExpectedReleases
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Result, Row
from paclm.study.statistics import accuracy_row, cluster_bootstrap, retained_gain
from paclm.worlds.layout import adapters_file

DELTA = 1e-5
READINGS = ("rigorous", "generous", "strict")
RATES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005, 0.0002, 0.0001)
# The published settings; dropout, warm-up, decay and the best epoch are in `authors_refinements`.
AUTHORS_TRAINING: Any = {
    "rank": 4,
    "alpha": 32.0,
    "learning_rate": 2e-4,
    "weight_decay": 0.01,
    "batch_size": 8,
    "epochs": 15,
    "layers": "all",
}
ORDERS = (2, 3, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class PMixedScale:
    positions: int
    shard_counts: tuple[int, ...]  # N
    uses_authors_training: bool  # shard models are trained with PMixED's published settings, or else as the worlds were
    vote_positions: int  # as in `accuracy`; PAC uses those on the same text
    neighbour_queries: int
    epochs_ratio: int = 5  # epochs of a shard model over those of a world, where its authors' 15 are not taken
    horizons: tuple[int, ...] = (10**2, 10**3, 10**4, 10**5, 10**6)
    epsilons: tuple[float, ...] = (1.0, 2.0)
    orders: tuple[int, ...] = ORDERS
    rates: tuple[float, ...] = RATES
    draws: int = 16  # of the shard models that take part, at every position; for what is not computed exactly
    public_positions: int = 4096  # that InvisibleInk is searched on, where public text was given
    temperatures: tuple[float, ...] = TEMPERATURES  # of InvisibleInk
    gumbel_draws: int = 2
    passes: int = 8  # secrets and noise per vote of a release that is a plugin


def run(lab: Lab, scale: PMixedScale) -> Findings:
    """Every ensemble, then PAC on the same text."""
    parts = lab.parts("pmixed", asdict(scale))
    rows: list[Row] = []
    for num_shards in scale.shard_counts:
        own = lab.workspace.training
        training = replace(own, epochs=own.epochs * scale.epochs_ratio)
        refinements = None
        if scale.uses_authors_training:
            training = replace(training, **AUTHORS_TRAINING)
            refinements = authors_refinements(lab, training, scale.public_positions)
        ensure_shards(lab, num_shards, training, refinements)
        entry = lab.workspace.manifest.adapters[adapters_file(f"shards-{num_shards}")]
        name = f"pmixed-{num_shards}-{entry['sha256'][:8]}"
        rows += parts.rows(name, partial(_of_ensemble, lab, scale, num_shards, entry))
    _select(rows)
    select_ink(rows)
    rows += parts.rows("pmixed-pac", lambda: _pac(lab, scale))
    return Findings(rows, _notes(scale, has_public_text=bool(lab.public_passages(1))))


def _of_ensemble(lab: Lab, scale: PMixedScale, num_shards: int, entry: Mapping[str, Any]) -> list[Row]:
    passages = lab.passages(scale.positions)
    engine = lab.engine(f"shards-{num_shards}")
    rng = lab.rng("pmixed", num_shards, "neighbours")
    queries = min(scale.neighbour_queries, sum(passage.num_scored for passage in passages))
    is_last = num_shards == scale.shard_counts[-1]
    others = Neighbours(queries, scale.epsilons[0], DELTA, num_shards, rng) if is_last else None
    points = targets_of(scale.epsilons, scale.horizons, DELTA)
    close = targets_of(scale.epsilons[:1], [queries], DELTA) if is_last else []
    search = InkSearch(scale.public_positions, scale.temperatures)
    ink = ink_choices(lab, num_shards, [*points, *close], search)
    player = InkPlayer([choice.settings for some in ink for choice in some])
    advance = lab.start_task(f"distributions of {num_shards} shard models", sum(p.num_scored for p in passages))

    def see(part: Distributions) -> None:
        if others is not None:
            others.see(part)
        player.see(part)
        advance(part.num_positions)

    digest = make_digest(text_distributions(engine, passages), scale.orders, see)
    rows = [_ensemble_row(digest, entry), _validation(lab, digest)]
    targets = [DpTarget(t, e, DELTA, r) for e in scale.epsilons for t in scale.horizons for r in READINGS]
    near = [DpTarget(queries, scale.epsilons[0], DELTA, r) for r in READINGS] if others is not None else []
    choices = choose(digest, [*targets, *near], scale.orders, scale.rates)
    advance = lab.start_task(f"PMixED, {num_shards} shard models", len(targets))
    for target, choice in zip(targets, choices, strict=False):
        rows.append(_matched(lab, scale, digest, target, choice))
        advance(1)
    if others is not None:
        for target, choice in zip(near, choices[len(targets) :], strict=True):
            rows.append(_near(lab, digest, target, choice))
        for outcome in others.results():
            row = {"method": outcome.method, "guarantee": outcome.guarantee, "epsilon": outcome.epsilon}
            rows.append(row | _near_figures(lab, digest, outcome.truth, outcome.private_share))
    return rows + ink_rows(lab, ink, player, len(points))


def _ensemble_row(digest: Digest, entry: Mapping[str, Any]) -> Row:
    refined = entry.get("refinements", {})
    return {
        "kind": "ensemble",
        "num_shards": digest.num_shards,
        "positions": digest.num_positions,
        "accuracy_public": digest.truth_public.mean(),
        "accuracy_public_inside": digest.public_inside().mean(),
        "accuracy_ceiling": digest.ceiling().mean(),
        "accuracy_ceiling_inside": digest.ceiling_inside().mean(),
        "perplexity_public": _perplexity(digest.truth_public),
        "perplexity_ceiling": _perplexity(digest.ceiling()),
        "epochs": entry["training"]["epochs"],
        "rank": entry["training"]["rank"],
        "learning_rate": entry["training"]["learning_rate"],
        "dropout": refined.get("dropout", 0.0),
        "warmup_steps": refined.get("warmup_steps", 0),
        "is_validated": refined.get("validation") is not None,
    }


def _validation(lab: Lab, digest: Digest) -> Row:
    """`tab:pmixed-val`: no sampling, order 2, generous ε = 2, T = 1024; nothing is random but the bootstrap."""
    settings = PMixedSettings(num_shards=digest.num_shards, order=2, queries=1024, epsilon=2.0, reading="generous")
    played = play(digest, settings, lab.rng("pmixed", "validation"))
    gain = played.truth - digest.truth_public
    spread = cluster_bootstrap(gain, digest.passage, lab.rng("pmixed", "bootstrap"))
    rng = lab.rng("pmixed", "headroom")
    headroom = retained_gain(played.truth, digest.truth_public, digest.ceiling(), digest.passage, rng)
    low, high = np.quantile(spread, [0.025, 0.975])
    least = min(float(played.truth.min()), float(digest.truth_public.min()))
    return {
        "kind": "validation",
        "num_shards": digest.num_shards,
        "radius": settings.radii[-1],
        "accuracy": played.truth.mean(),
        "accuracy_public": digest.truth_public.mean(),
        "perplexity": _perplexity(played.truth),
        "perplexity_public": _perplexity(digest.truth_public),
        "gain": gain.mean(),
        "gain_low": low,
        "gain_high": high,
        "mean_weight": played.mean_weight,
        "headroom": headroom.mean if headroom else None,
        "headroom_stderr": headroom.stderr if headroom else None,
        "least_probability": least,
        "is_at_floor": least <= float(np.finfo(np.float32).tiny),
    }


def _matched(lab: Lab, scale: PMixedScale, digest: Digest, target: DpTarget, choice: Choice) -> Row:
    settings = choice.settings
    names = ("pmixed", digest.num_shards, target.queries, target.epsilon, target.reading)
    draws = 1 if settings.rate == 1.0 else scale.draws
    played = [play(digest, settings, lab.rng(*names, draw)) for draw in range(draws)]
    insides = np.array([one.inside.mean() for one in played])
    public_inside = digest.public_inside().mean()
    ceiling_inside = digest.ceiling_inside().mean() - public_inside
    weights = [one.mean_weight for one in played if np.isfinite(one.mean_weight)]
    return {
        "kind": "matched",
        "method": "PMixED",
        "reading": target.reading,
        "epsilon": target.epsilon,
        "queries": target.queries,
        "mia_bound": success_at_half(target.epsilon, target.delta),
        "num_shards": digest.num_shards,
        "order": None if settings.ball == "strict" else settings.order,
        "rate": settings.rate,
        "radius": settings.radii[max(1, round(settings.rate * digest.num_shards))],
        "empty": np.mean([one.empty for one in played]),
        "empty_expected": (1.0 - settings.rate) ** digest.num_shards,
        "mean_weight": float(np.mean(weights)) if weights else None,
        **_figures(digest, expected_truth(digest, settings), lab.rng(*names, "bootstrap")),
        "accuracy_of_draws": np.mean([one.truth.mean() for one in played]),
        "stderr_of_draws": mean_and_stderr([one.truth.mean() for one in played]).stderr if draws > 1 else 0.0,
        "accuracy_inside": insides.mean(),
        "headroom_inside": float((insides.mean() - public_inside) / ceiling_inside) if ceiling_inside > 0.0 else None,
        "perplexity": _perplexity(np.concatenate([one.truth for one in played])),
        "expected_gain": choice.gain,
        "guarantee": settings.guarantee,
        "delta": settings.delta,
    }


def _near(lab: Lab, digest: Digest, target: DpTarget, choice: Choice) -> Row:
    settings = choice.settings
    truth = expected_truth(digest, settings)[: target.queries]
    row = {"method": f"PMixED, {target.reading}", "guarantee": settings.guarantee, "epsilon": target.epsilon}
    return row | _near_figures(lab, digest, truth, 1.0 - (1.0 - settings.rate) ** digest.num_shards)


def _near_figures(lab: Lab, digest: Digest, truth: FloatArray, private_share: float) -> Row:
    return {
        "kind": "neighbour",
        "num_shards": digest.num_shards,
        "queries": len(truth),
        **_figures(digest, truth, lab.rng("pmixed", "near", "bootstrap")),
        "private_share": private_share,
    }


def _figures(digest: Digest, truth: FloatArray, rng: np.random.Generator) -> Row:
    """How likely the true token is at the first positions, (n,), and the share of the ceiling."""
    n = len(truth)
    return accuracy_row(truth, digest.truth_public[:n], digest.ceiling()[:n], digest.passage[:n], rng, rng)


def _select(rows: list[Row]) -> None:
    """Mark what PMixED's own search takes at every operating point, the N with the largest expected gain.

    Beside it the largest δ of the two-token examples at that point.
    """
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "matched":
            row["is_selected"] = False
            point = (row["epsilon"], row["queries"], row["reading"])
            if point not in best or row["expected_gain"] > best[point]["expected_gain"]:
                best[point] = row
    for row in best.values():
        target = DpTarget(row["queries"], row["epsilon"], row["delta"], row["reading"])
        worst = worst_loss(target.settings(row["num_shards"], row["order"] or 2, row["rate"]))
        row |= {"is_selected": True, "delta_of_example": worst.delta}  # which the promised δ should not be below
        row |= {"example_public_mass": worst.public_mass, "example_shard_mass": worst.shard_mass}


def _pac(lab: Lab, scale: PMixedScale) -> list[Row]:
    """Every release at the budget that matches each (ε, T), and at the neighbours' point on their first queries."""
    votes = lab.gumbel_votes(scale.vote_positions, scale.gumbel_draws)
    positions = sum(passage.num_scored for passage in lab.passages(scale.positions))
    near = scale.epsilons[0], min(scale.neighbour_queries, positions)
    points = [(e, t) for e in scale.epsilons for t in scale.horizons]
    rows: list[Row] = []
    advance = lab.start_task("PAC at matched bounds", len(points) * len(lab.rules))
    for rule in lab.rules.values():
        whole: Row | None = None
        for epsilon, queries in points:
            per_token = matched_nats(epsilon, DELTA) / queries
            if whole is None or rule.reads_secret:
                whole = _pac_figures(lab, votes, positions, rule, per_token, scale.passes)
            bound = success_at_half(epsilon, DELTA)
            point = {"epsilon": epsilon, "queries": queries, "per_token_nats": per_token, "mia_bound": bound}
            rows.append({"kind": "pac", "method": "PAC", "release": rule.name, **point, **whole})
            advance(1)
        epsilon, queries = near
        total = matched_nats(epsilon, DELTA)
        figures = _pac_figures(lab, votes, queries, rule, total / queries, scale.passes)
        guarantee = f"mutual information: {total:.3f} nats over {queries:,} tokens"
        if not rule.reads_secret:
            guarantee = "mutual information: none at all about which world was realized"
        named = {"kind": "neighbour", "method": f"PAC, {rule.name}", "guarantee": guarantee, "epsilon": epsilon}
        rows.append({**named, "queries": queries, "private_share": 1.0, **figures})
    return rows


def _pac_figures(lab: Lab, votes: TextVotes, positions: int, rule: Rule, per_token: float, passes: int) -> Row:
    """How often the token released at the first positions is the true one, averaged over secrets and noise."""
    keep = votes.position < positions  # in all draws
    votes = TextVotes(**{name: column[keep] for name, column in votes.columns().items()})
    seed = lab.seed_for("pmixed", "pac")
    found = ExpectedReleases(votes).under(rule, per_token, draws=passes, seed=seed)
    public = (votes.public == votes.truth).astype(np.float64)
    rngs = [lab.rng("pmixed", "pac", name) for name in ("bootstrap", "headroom")]
    return accuracy_row(found.hits, public, found.noiseless, votes.passage, *rngs)


def _perplexity(truth: FloatArray) -> float:
    return float(np.exp(-np.log(truth).mean()))


def _notes(scale: PMixedScale, *, has_public_text: bool) -> list[str]:
    return [
        "PMixED bounds the influence of one shard of records in the worst case; PAC bounds mutual information under "
        "the stated draw of the world. Both are brought to one attack, from even odds.",
        "The published accountant of PMixED holds the ball at one order and charges for all below it. The rows give "
        "the δ that a two-token example reaches; where it exceeds the promised δ, the rigorous reading is no "
        "guarantee. The strict rows have none of this.",
        "InvisibleInk: the neighbours `any` are for a record that may change its shard model in any way, `public` for "
        "one whose shard falls back to the public model, as its authors have it. Public model and ceiling are at its "
        "own temperature. "
        + (
            "Its settings were searched on public text, with the private shard models, outside of the account."
            if has_public_text
            else "Nothing was searched: τ = 1 and the largest number of shards. To search, give --public-text."
        ),
        "λ comes from tables that round to the safe side: a few tenths of a per cent below the exact weight.",
        "Shard models were trained by the authors' settings; warm-up takes at most a quarter of the steps"
        + (
            ", and the best of 15 epochs was found on public text."
            if has_public_text
            else ", and the last epoch is kept."
        )
        if scale.uses_authors_training
        else "Shard models were trained as the worlds were, for more epochs; the authors' settings are in `paper`.",
    ]


def verdicts(result: Result) -> list[str]:
    """At how many points an example exceeds the δ that the rigorous reading promises."""
    selected = result.select(kind="matched", reading="rigorous", is_selected=True)
    broken = [row["delta_of_example"] for row in selected if row["delta_of_example"] > row["delta"]]
    worst = f" (δ up to {max(broken):.2g}, promised {selected[0]['delta']:g})" if broken else ""
    return [f"points where the accountant of PMixED, rigorous, does not hold: {len(broken)} of {len(selected)}{worst}"]


REGIME = Regime(
    name="pmixed",
    title="PMixED and its neighbours",
    question="At the same provable bound on membership inference, what do differentially private ensembles keep?",
    presets={
        "quick": PMixedScale(1024, (4, 8), False, 4096, 256),
        "paper": PMixedScale(8176, (8, 16, 32, 64, 128), True, 8176, 1000),
    },
    run=run,
    headlines=(
        headline("PAC, {release}, ε = {epsilon:g}", "headroom ±", ".0%", kind="pac", largest="queries"),
        headline(
            "PMixED, {reading}, ε = {epsilon:g}",
            "headroom ±",
            ".1%",
            kind="matched",
            largest="queries",
            is_selected=True,
        ),
        headline(
            "InvisibleInk, {adjacency}, ε = {epsilon:g}, searched: {is_searched}",
            "headroom ±",
            ".1%",
            kind="ink",
            largest="queries",
            is_selected=True,
        ),
    ),
    verdicts=verdicts,
    for_each_collection=False,
)
