"""Coupling ablation (`tab:ablation`): rules of voting compared, everything else held fixed.

Trial i has the same prompt, world, noise seed and coins under every rule and budget. Each rule is compared with the
full-corpus model sampled at the rule's own temperature: a world's marginal is the same however worlds are coupled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import IntArray
from paclm.study.continuations import Continuations
from paclm.study.decoding import Decoding
from paclm.study.lab import Lab
from paclm.study.quality import measure_text
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean

VARIANTS = (
    Decoding("greedy", 0.0),
    Decoding("Gumbel, τ = 1.0", 1.0),
    Decoding("Gumbel, τ = 0.8", 0.8),
    Decoding("hybrid, β ≥ 0.9", 1.0, coupling="hybrid"),
    Decoding("independent", 1.0, coupling="independent"),
)
NOTES = [
    "Prompts, worlds, noise seeds and coins are paired across rules and budgets; texts diverge from the first token "
    "that differs.",
    "Perplexity ratios are to the full-corpus model at the rule's own temperature, so rows of different temperatures "
    "have different references.",
]


@dataclass(frozen=True, slots=True)
class AblationScale:
    trials: int
    length: int = 64
    budgets: tuple[float, ...] = (2.0**-8, 2.0**-16)
    prompt: int = 32


def run(lab: Lab, scale: AblationScale) -> Findings:
    """All worlds first, then what one model can do."""
    prompts = lab.prompts(scale.trials, scale.prompt, "ablation")
    texts = Continuations(lab, "ablation", scale.prompt + scale.length, scale.trials)
    parts = lab.parts("ablation", [asdict(scale), prompts])
    seed = lab.seed_for("ablation", "noise")  # one for all budgets: paired
    played = [
        parts.arrays(
            f"ablation-{i}-{format_budget(b)}", partial(texts.released, prompts, decoding, b, seed, scale.length)
        )
        for i, decoding in enumerate(VARIANTS)
        for b in scale.budgets
    ]
    references = {}  # by temperature: what the full-corpus model's own text scores
    for tau in sorted({decoding.temperature for decoding in VARIANTS}):
        tokens = texts.alone(prompts, "full", Decoding("full", tau), scale.length)
        references[tau] = texts.surprise(prompts, tokens)
    rows: list[Row] = []
    for (decoding, per_token), arrays in zip(product(VARIANTS, scale.budgets), played, strict=True):
        rng = lab.rng("ablation", "bootstrap", decoding.name, per_token)
        surprise = texts.surprise(prompts, arrays["tokens"])
        text = measure_text(arrays["tokens"], surprise, references[decoding.temperature], rng)
        row: Row = {"variant": decoding.name, "budget": format_budget(per_token), "trials": scale.trials}
        rows.append(row | depth_of_dissent(arrays["distinct"], rng) | text)
    return Findings(rows, NOTES)


def depth_of_dissent(distinct: IntArray, rng: np.random.Generator) -> Row:
    """How often worlds agree and how far they scatter where they do not: distinct votes (n, T)."""
    clusters = np.repeat(np.arange(len(distinct)), distinct.shape[1])
    flat = distinct.ravel()
    unanimity = clustered_mean(flat == 1, clusters, rng)
    row: Row = {"unanimity": unanimity.mean, "unanimity_stderr": unanimity.stderr}
    names = ("distinct_given_dissent", "distinct_given_dissent_stderr", "p95_distinct", "p99_distinct")
    apart = flat > 1
    if not apart.any():
        return row | dict.fromkeys(names)
    depth = clustered_mean(flat[apart], clusters[apart], rng)
    return row | dict(zip(names, (*depth, *np.percentile(flat[apart], (95, 99)).tolist()), strict=True))


REGIME = Regime(
    name="ablation",
    title="Coupling ablation",
    question="Which rule of voting makes worlds agree most often, and scatter least where they do not?",
    presets={"quick": AblationScale(trials=6, prompt=16), "paper": AblationScale(trials=50)},
    run=run,
    headlines=(
        headline("unanimity, {variant}", "unanimity ±", ".3f", budget="2^-16"),
        headline("distinct votes given dissent, {variant}", "distinct_given_dissent ±", ".2f", budget="2^-16"),
    ),
)
