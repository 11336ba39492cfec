"""DP-SGD beside the releases: what a promise about the whole corpus (`--promise corpus`) costs in accuracy.

One adapter per ε, scored on the positions and with the coins of `accuracy`, beside the public model and the plain
full-corpus adapter. Support: the public model's top 200, as for worlds. The trainings of a study spend like any other:
they are entered into the workspace's log of DP trainings and add up with what is served, so `all` does not run them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paclm.privacy.dp import format_up
from paclm.study.adapter_scores import ScoredAdapters, score_adapters
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.worlds.layout import adapters_file
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:
    from paclm.engine.dp_training import DpProgress

_FACTS = ("sampling_rate", "steps", "clip_norm", "learning_rate", "factors", "num_units", "unit")
_RATES = ("tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")


@dataclass(frozen=True, slots=True)
class DpScale:
    positions: int
    gumbel_draws: int
    epsilons: tuple[float, ...]
    delta: float | None = None  # n^-1.1


def run(lab: Lab, scale: DpScale) -> Findings:
    """Train at every ε what is not trained yet, then score."""
    trained = [_ensure(lab, epsilon, scale.delta) for epsilon in scale.epsilons]
    return Findings(score(lab, scale, trained), [_spent(lab)])


def _ensure(lab: Lab, epsilon: float, delta: float | None) -> ScoredAdapters:
    """The study's own adapter of this ε, never the one that is served; trained again if [dp] was changed."""
    from paclm.curator.dp_training import prepare_dp_training
    from paclm.engine.adapters import AdapterStack

    name = f"study-dp-{epsilon:g}"
    lab.workspace = Workspace.open(lab.workspace.path)
    entry = lab.workspace.manifest.adapters.get(adapters_file(name))
    asked = {"epsilon": epsilon, **dataclasses.asdict(lab.workspace.dp), **({"delta": delta} if delta else {})}
    seconds: float | None = None  # unknown for what was trained before
    if entry is None or any(entry["dp"][field] != value for field, value in asked.items()):
        lab.release_engine()
        job = prepare_dp_training(lab.workspace, epsilon, delta, name=name)
        done, advance = 0, lab.start_task(f"train {name}", job.dp.steps)

        def show(now: DpProgress) -> None:
            nonlocal done
            advance(now.step - done)
            done = now.step

        began = time.perf_counter()
        lab.workspace, entry = job.run(resume=job.is_unfinished, on_progress=show)
        seconds = time.perf_counter() - began
    card = entry["dp"]
    facts = {name: card[name] for name in ("epsilon", "delta", "noise_multiplier", *_FACTS)}
    promised = {name: card["alone"][name] for name in ("mia_bound", *_RATES)}
    stack = AdapterStack.load(lab.workspace.adapters_path / adapters_file(name))
    return ScoredAdapters({**facts, **promised, "training_seconds": seconds}, [stack])


def _spent(lab: Lab) -> str:
    """What all DP trainings on this corpus promise together."""
    from paclm.curator.dp_account import promise_figures

    together = promise_figures(lab.workspace)
    return (
        f"Each row states what its own training promises. The {together['trainings']} DP trainings on this corpus so "
        f"far, those of this study included, together promise ε = {format_up(together['epsilon'])} at δ = "
        f"{format_up(together['delta'])}: studies spend like any other training, and this also weakens what is served."
    )


def score(lab: Lab, scale: DpScale, trained: Sequence[ScoredAdapters]) -> list[Row]:
    """A row per ε and decoder."""
    return score_adapters(lab, scale.positions, scale.gumbel_draws, trained)


REGIME = Regime(
    name="dp",
    title="DP-SGD: a promise about the corpus",
    question="What does an adapter keep of the gain if it must hide whether any one record is in the corpus?",
    presets={"quick": DpScale(4096, 2, (2.0, 8.0)), "paper": DpScale(65_408, 1, (1.0, 2.0, 4.0, 8.0))},
    run=run,
    headlines=(
        headline("kept at ε = {epsilon:g}, {decoder}", "retained_gain ±", ".0%"),
        headline("membership inference at ε = {epsilon:g}, at most", "mia_bound", ".1%", decoder="greedy"),
    ),
    for_each_collection=False,
)
