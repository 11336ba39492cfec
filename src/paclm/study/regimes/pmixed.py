"""PMixED, InvisibleInk and neighbours against PAC, at matched bounds on membership inference (`sec:pmixed-results`).

Accuracy is the mean probability that the released token is the true one, computed and not drawn for PMixED and
InvisibleInk: they sample, and so does coupled Gumbel. Settings are searched on `search_positions`; the text that is
scored is read once for each N, in chunks, and only what the chosen settings need of it is kept.
PAC draws inside the public top-200 and PMixED over the whole vocabulary, which alone moves accuracy, so PMixED is also
cut to that support afterwards and the public model is shown both ways. The two guarantees differ in kind: equal bounds
on one attack are not equal strength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.leak import mean_and_stderr
from paclm.privacy.releases import Rule
from paclm.study.baselines.accountants import matched_nats, success_at_half
from paclm.study.baselines.distributions import Distributions, text_distributions
from paclm.study.baselines.ink_rows import InkSearch, ink_choices, ink_near_rows, ink_rows, select_ink
from paclm.study.baselines.ink_search import TEMPERATURES, InkPlayer, targets_of
from paclm.study.baselines.neighbours import Neighbours
from paclm.study.baselines.play import BLOCK, PMixedFigures, PMixedPlayer, TextFigures
from paclm.study.baselines.pmixed import PMixedSettings
from paclm.study.baselines.search import Choice, DpTarget, choose, digest_blocks, make_digest
from paclm.study.baselines.shards import authors_refinements, ensure_shards
from paclm.study.baselines.worst_case import worst_loss
from paclm.study.eval_text import Passage
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
    draws: int = 4  # of the shard models that take part, at every position; for what is not computed exactly
    search_positions: int = 4096  # that settings are searched on; of the public text, where one was given
    temperatures: tuple[float, ...] = TEMPERATURES  # of InvisibleInk
    gumbel_draws: int = 2
    passes: int = 8  # secrets and noise per vote of a release that is a plugin

    @property
    def near(self) -> list[DpTarget]:
        """Where PMixED stands beside its neighbours."""
        return [DpTarget(self.neighbour_queries, self.epsilons[0], DELTA, reading) for reading in READINGS]

    @property
    def targets(self) -> list[DpTarget]:
        return [DpTarget(t, e, DELTA, reading) for e in self.epsilons for t in self.horizons for reading in READINGS]


def run(lab: Lab, scale: PMixedScale) -> Findings:
    """Every ensemble, then PAC on the same text. No ensemble depends on which others there are."""
    passages = lab.passages(scale.positions)
    queries = min(scale.neighbour_queries, sum(passage.num_scored for passage in passages))
    scale = replace(scale, neighbour_queries=queries)
    parts = lab.parts("pmixed", asdict(replace(scale, shard_counts=())), is_lasting=True)
    rows: list[Row] = []
    for num_shards in scale.shard_counts:
        own = lab.workspace.training
        training = replace(own, epochs=own.epochs * scale.epochs_ratio)
        refinements = None
        if scale.uses_authors_training:
            training = replace(training, **AUTHORS_TRAINING)
            refinements = authors_refinements(lab, training, scale.search_positions)
        ensure_shards(lab, num_shards, training, refinements)
        entry = lab.workspace.manifest.adapters[adapters_file(f"shards-{num_shards}")]
        name = f"pmixed-{num_shards}-{entry['sha256'][:8]}"
        found = parts.rows(name, partial(_of_ensemble, lab, scale, passages, num_shards, entry))
        if num_shards != scale.shard_counts[-1]:
            rows += [row for row in found if row["kind"] != "neighbour"]
        else:
            rows += found + parts.rows(f"{name}-near", partial(_of_neighbours, lab, scale, passages, num_shards))
    _select(rows)
    select_ink(rows)
    rows += parts.rows("pmixed-pac", lambda: _pac(lab, scale))
    return Findings(rows, _notes(scale, has_public_text=bool(lab.public_passages(1))))


def _of_ensemble(
    lab: Lab, scale: PMixedScale, passages: Sequence[Passage], num_shards: int, entry: Mapping[str, Any]
) -> list[Row]:
    """PMixed and InvisibleInk: settings found on the text of the search, and one pass over the text that is scored."""
    engine = lab.engine(f"shards-{num_shards}")
    searched = make_digest(text_distributions(engine, _search_text(lab, scale)), scale.orders)
    choices = choose(searched, [*scale.targets, *scale.near], scale.orders, scale.rates)
    matched, near = choices[: len(scale.targets)], choices[len(scale.targets) :]
    del searched  # its tables take more memory than all that follows keeps
    player = PMixedPlayer(
        [
            (_validation_settings(num_shards), [lab.rng("pmixed", "validation")]),
            *((choice.settings, _generators(lab, scale, choice)) for choice in matched),
            *((choice.settings, []) for choice in near),
        ]
    )
    points = targets_of(scale.epsilons, scale.horizons, DELTA)
    close = targets_of(scale.epsilons[:1], [scale.neighbour_queries], DELTA)
    ink = ink_choices(lab, num_shards, [*points, *close], InkSearch(scale.search_positions, scale.temperatures))
    ink_matched, ink_near = [some[: len(points)] for some in ink], ink[-1][len(points) :]
    ink_player = InkPlayer([choice.settings for some in ink_matched for choice in some])
    ink_near_player = InkPlayer([choice.settings for choice in ink_near])
    advance = lab.start_task(f"distributions of {num_shards} shard models", sum(p.num_scored for p in passages))

    def see(part: Distributions) -> None:
        ink_player.see(part)
        if ink_near_player.num_positions < scale.neighbour_queries:
            ink_near_player.see(part)
        advance(part.num_positions)

    for block in digest_blocks(text_distributions(engine, passages), player.orders, BLOCK, see):
        player.see(block)
    text, (validated, *played) = player.text(), player.figures()
    rows = [_ensemble_row(text, num_shards, entry), _validation(lab, text, validated)]
    rows += [_matched(lab, text, *pair) for pair in zip(matched, played, strict=False)]
    rows += [_near(lab, text, *pair) for pair in zip(near, played[len(matched) :], strict=True)]
    return rows + ink_rows(lab, ink_matched, ink_player) + ink_near_rows(lab, ink_near, ink_near_player)


def _of_neighbours(lab: Lab, scale: PMixedScale, passages: Sequence[Passage], num_shards: int) -> list[Row]:
    """AdaPMixED, SubMix and GNMax on the first queries."""
    rng = lab.rng("pmixed", num_shards, "neighbours")
    others = Neighbours(scale.neighbour_queries, scale.epsilons[0], DELTA, num_shards, rng)
    others.see_all(text_distributions(lab.engine(f"shards-{num_shards}"), passages))
    public, ceiling, passage = others.text()
    rows: list[Row] = []
    for outcome in others.results():
        figures = _figures(lab, outcome.truth, public, ceiling, passage)
        named = {"method": outcome.method, "guarantee": outcome.guarantee, "epsilon": outcome.epsilon}
        rows.append(_near_row(num_shards, named, figures, outcome.private_share, len(public)))
    return rows


def _search_text(lab: Lab, scale: PMixedScale) -> Sequence[Passage]:
    """Public text, if there is any; else some of the text that is scored, which flatters PMixED."""
    return lab.public_passages(scale.search_positions) or lab.passages(scale.search_positions)


def _generators(lab: Lab, scale: PMixedScale, choice: Choice) -> list[np.random.Generator]:
    """One for every pass."""
    draws = 1 if choice.settings.rate == 1.0 else scale.draws
    return [lab.rng(*_names(choice), draw) for draw in range(draws)]


def _names(choice: Choice) -> tuple[object, ...]:
    target = choice.target
    return ("pmixed", choice.settings.num_shards, target.queries, target.epsilon, target.reading)


def _ensemble_row(text: TextFigures, num_shards: int, entry: Mapping[str, Any]) -> Row:
    refined = entry.get("refinements", {})
    return {
        "kind": "ensemble",
        "num_shards": num_shards,
        "positions": len(text.public),
        "accuracy_public": text.public.mean(),
        "accuracy_public_inside": text.public_inside.mean(),
        "accuracy_ceiling": text.ceiling.mean(),
        "accuracy_ceiling_inside": text.ceiling_inside.mean(),
        "perplexity_public": _perplexity(text.public),
        "perplexity_ceiling": _perplexity(text.ceiling),
        "epochs": entry["training"]["epochs"],
        "rank": entry["training"]["rank"],
        "learning_rate": entry["training"]["learning_rate"],
        "dropout": refined.get("dropout", 0.0),
        "warmup_steps": refined.get("warmup_steps", 0),
        "is_validated": refined.get("validation") is not None,
    }


def _validation_settings(num_shards: int) -> PMixedSettings:
    return PMixedSettings(num_shards=num_shards, order=2, queries=1024, epsilon=2.0, reading="generous")


def _validation(lab: Lab, text: TextFigures, figures: PMixedFigures) -> Row:
    """`tab:pmixed-val`: no sampling, order 2, generous ε = 2, T = 1024; nothing is random but the bootstrap."""
    settings, (played,) = figures.settings, figures.passes
    gain = played.truth - text.public
    spread = cluster_bootstrap(gain, text.passage, lab.rng("pmixed", "bootstrap"))
    rng = lab.rng("pmixed", "headroom")
    headroom = retained_gain(played.truth, text.public, text.ceiling, text.passage, rng)
    low, high = np.quantile(spread, [0.025, 0.975])
    least = min(float(played.truth.min()), float(text.public.min()))
    return {
        "kind": "validation",
        "num_shards": settings.num_shards,
        "radius": settings.radii[-1],
        "accuracy": played.truth.mean(),
        "accuracy_public": text.public.mean(),
        "perplexity": _perplexity(played.truth),
        "perplexity_public": _perplexity(text.public),
        "gain": gain.mean(),
        "gain_low": low,
        "gain_high": high,
        "mean_weight": played.mean_weight,
        "headroom": headroom.mean if headroom else None,
        "headroom_stderr": headroom.stderr if headroom else None,
        "least_probability": least,
        "is_at_floor": least <= float(np.finfo(np.float32).tiny),
    }


def _matched(lab: Lab, text: TextFigures, choice: Choice, figures: PMixedFigures) -> Row:
    target, settings, passes = choice.target, choice.settings, figures.passes
    inside = np.mean([one.inside.mean() for one in passes])
    public_inside = text.public_inside.mean()
    ceiling_inside = text.ceiling_inside.mean() - public_inside
    weights = [one.mean_weight for one in passes if np.isfinite(one.mean_weight)]
    accuracies = [one.truth.mean() for one in passes]
    return {
        "kind": "matched",
        "method": "PMixED",
        "reading": target.reading,
        "epsilon": target.epsilon,
        "queries": target.queries,
        "mia_bound": success_at_half(target.epsilon, target.delta),
        "num_shards": settings.num_shards,
        "order": None if settings.ball == "strict" else settings.order,
        "rate": settings.rate,
        "radius": settings.radii[max(1, round(settings.rate * settings.num_shards))],
        "empty": np.mean([one.empty for one in passes]),
        "empty_expected": (1.0 - settings.rate) ** settings.num_shards,
        "mean_weight": float(np.mean(weights)) if weights else None,
        **_figures(lab, figures.expected, text.public, text.ceiling, text.passage, *_names(choice)),
        "accuracy_of_draws": np.mean(accuracies),
        "stderr_of_draws": mean_and_stderr(accuracies).stderr if len(passes) > 1 else 0.0,
        "accuracy_inside": inside,
        "headroom_inside": float((inside - public_inside) / ceiling_inside) if ceiling_inside > 0.0 else None,
        "perplexity": _perplexity(np.concatenate([one.truth for one in passes])),
        "expected_gain": choice.gain,
        "guarantee": settings.guarantee,
        "delta": settings.delta,
    }


def _near(lab: Lab, text: TextFigures, choice: Choice, figures: PMixedFigures) -> Row:
    target, settings, n = choice.target, choice.settings, choice.target.queries
    named = {"method": f"PMixED, {target.reading}", "guarantee": settings.guarantee, "epsilon": target.epsilon}
    found = _figures(lab, figures.expected[:n], text.public[:n], text.ceiling[:n], text.passage[:n])
    share = 1.0 - (1.0 - settings.rate) ** settings.num_shards
    return _near_row(settings.num_shards, named, found, share, n)


def _near_row(num_shards: int, named: Row, figures: Row, private_share: float, queries: int) -> Row:
    row = {"kind": "neighbour", "num_shards": num_shards, "queries": queries}
    return named | row | figures | {"private_share": private_share}


def _figures(
    lab: Lab, truth: FloatArray, public: FloatArray, ceiling: FloatArray, passage: IntArray, *names: object
) -> Row:
    """How likely the true token is, (n,), and the share of the ceiling."""
    rng = lab.rng(*(names or ("pmixed", "near")), "bootstrap")
    return accuracy_row(truth, public, ceiling, passage, rng, rng)


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
    near = scale.epsilons[0], scale.neighbour_queries
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
    searched = f"Settings were searched on {scale.search_positions:,} positions of public text"
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
            f"{searched}, with the private shard models, outside of the account."
            if has_public_text
            else "Nothing was searched: τ = 1 and the largest number of shards. To search, give --public-text."
        ),
        f"PMixED: {searched}, in the same way."
        if has_public_text
        else f"PMixED: order, rate and N were searched on {scale.search_positions:,} positions of the text that is "
        "scored, which flatters it. To search elsewhere, give --public-text.",
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
        "quick": PMixedScale(1024, (4, 8), False, 4096, 256, search_positions=512),
        "paper": PMixedScale(65_408, (8, 16, 32, 64, 128), True, 65_408, 1000, gumbel_draws=1),
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
