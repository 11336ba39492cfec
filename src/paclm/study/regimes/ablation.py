"""Coupling ablation (`tab:ablation`): rules of voting side by side, everything else held fixed.

Trial i has the same prompt, world, noise seed and coins under every rule and budget. Each rule is compared with the
full-corpus model sampled at the rule's own temperature: a world's marginal is the same however worlds are coupled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from paclm.config import format_budget
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.decoding import Decoding
from paclm.study.history import Arrays, join_sessions
from paclm.study.lab import Lab
from paclm.study.quality import measure_text, public_surprise
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.serving import EngineStreams, begin, continue_alone, draw_secrets, engine_for, play
from paclm.study.statistics import clustered_mean

VARIANTS = (
    Decoding("greedy", 0.0),
    Decoding("Gumbel, τ = 1.0", 1.0),
    Decoding("Gumbel, τ = 0.8", 0.8),
    Decoding("hybrid, β ≥ 0.9", 1.0, coupling="hybrid"),
    Decoding("independent", 1.0, coupling="independent"),
)
NOTES = [
    "Prompts, worlds, noise seeds and coins are paired across rules and budgets; the texts part as soon as a token "
    "differs.",
    "Perplexity ratios are to the full-corpus model at the rule's own temperature, so rows of different temperatures "
    "have different references.",
]


@dataclass(frozen=True, slots=True)
class AblationScale:
    """How much is generated."""

    trials: int
    length: int = 64
    budgets: tuple[float, ...] = (2.0**-8, 2.0**-16)
    prompt: int = 32


class Ablation:
    """The paired trials."""

    def __init__(self, lab: Lab, scale: AblationScale) -> None:
        self.lab, self.scale = lab, scale
        self.context = scale.prompt + scale.length
        self.prompts = lab.prompts(scale.trials, scale.prompt, "ablation")
        self._seed = lab.seed_for("ablation", "noise")  # one for all budgets: paired
        self._secrets = draw_secrets(lab.num_worlds, self._seed, scale.trials)

    def play(self, decoding: Decoding) -> Arrays:
        """The columns of `Played` (budgets · trials, T), budget by budget."""
        lab, scale = self.lab, self.scale
        count = len(scale.budgets) * scale.trials
        engine, together = engine_for(lab, sequences=count, context=self.context)
        advance = lab.start_task(f"ablation, {decoding.name}", count * scale.length)
        done = []
        for rows in (range(start, min(start + together, count)) for start in range(0, count, together)):
            places = [divmod(row, scale.trials) for row in rows]  # budget and trial
            sessions = []
            for b, per_token in enumerate(scale.budgets):
                own = [trial for budget, trial in places if budget == b]
                if own:
                    secrets = self._secrets[own[0] : own[-1] + 1]
                    rule = rule_named("gaussian")
                    sessions.append(begin(lab.num_worlds, rule, per_token, self._seed, own[0], secrets))
            trials = [trial for _, trial in places]
            streams = EngineStreams(engine, decoding, self._coins(trials))
            prompts = [self.prompts[trial] for trial in trials]
            done.append(play(streams, prompts, sessions, scale.length, advance=advance).arrays())
        return join_sessions(done)

    def reference(self, temperature: float) -> FloatArray:
        """What the full-corpus model's own text scores under the public model: (trials, T)."""
        engine = self.lab.engine("full", sequences=self.scale.trials, context=self.context)
        streams = EngineStreams(engine, Decoding("full", temperature), self._coins(range(self.scale.trials)))
        tokens = continue_alone(streams, self.prompts, self.scale.length, lambda panel: panel.worlds[:, 0])
        return self.surprise(tokens)

    def surprise(self, tokens: IntArray) -> FloatArray:
        """Of the continuations of all prompts (trials, T)."""
        engine = self.lab.engine("full", sequences=self.scale.trials, context=self.context)
        return public_surprise(engine, self.prompts, tokens)

    def _coins(self, trials: range | list[int]) -> list[Coins]:
        return [Coins(self.lab.seed_for("ablation", "coins", trial)) for trial in trials]


def run(lab: Lab, scale: AblationScale) -> Findings:
    """All worlds first, then what one model can do."""
    ablation = Ablation(lab, scale)
    parts = lab.parts("ablation", [asdict(scale), ablation.prompts])
    played = [
        parts.arrays(f"ablation-{number}", partial(ablation.play, decoding)) for number, decoding in enumerate(VARIANTS)
    ]
    references = {tau: ablation.reference(tau) for tau in sorted({decoding.temperature for decoding in VARIANTS})}
    rows: list[Row] = []
    for decoding, arrays in zip(VARIANTS, played, strict=True):
        for b, per_token in enumerate(scale.budgets):
            own = slice(b * scale.trials, (b + 1) * scale.trials)
            tokens, distinct = arrays["tokens"][own], arrays["distinct"][own]
            rng = lab.rng("ablation", "bootstrap", decoding.name, per_token)
            text = measure_text(tokens, ablation.surprise(tokens), references[decoding.temperature], rng)
            row: Row = {"variant": decoding.name, "budget": format_budget(per_token), "trials": scale.trials}
            rows.append(row | depth_of_dissent(distinct, rng) | text)
    return Findings(rows, NOTES)


def depth_of_dissent(distinct: IntArray, rng: np.random.Generator) -> Row:
    """How often worlds agree and how far they scatter where they do not: distinct votes (n, T)."""
    clusters = np.repeat(np.arange(len(distinct)), distinct.shape[1])
    flat = distinct.ravel()
    unanimity = clustered_mean(flat == 1, clusters, rng)
    row: Row = {"unanimity": unanimity.mean, "unanimity_stderr": unanimity.stderr}
    names = ("distinct_given_dissent", "distinct_given_dissent_stderr", "p95_distinct", "p99_distinct")
    row |= dict.fromkeys(names)
    apart = flat > 1
    if apart.any():
        depth = clustered_mean(flat[apart], clusters[apart], rng)
        row |= {
            "distinct_given_dissent": depth.mean,
            "distinct_given_dissent_stderr": depth.stderr,
            "p95_distinct": float(np.percentile(flat[apart], 95)),
            "p99_distinct": float(np.percentile(flat[apart], 99)),
        }
    return row


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
