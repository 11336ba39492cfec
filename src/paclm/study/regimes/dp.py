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

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.dp import format_up
from paclm.privacy.leak import mean_and_stderr
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.worlds.layout import adapters_file
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.dp_training import DpProgress
    from paclm.engine.engine import Engine

_FACTS = ("sampling_rate", "steps", "clip_norm", "learning_rate", "factors", "num_units", "unit")
_RATES = ("tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")


@dataclass(frozen=True, slots=True)
class DpScale:
    positions: int
    gumbel_draws: int
    epsilons: tuple[float, ...]
    delta: float | None = None  # n^-1.1


@dataclass(frozen=True, slots=True)
class DpAdapters:
    """The trainings at one ε: what rows say of them, and their adapters, which differ by sample and noise alone."""

    facts: Row  # epsilon, delta, noise_multiplier, mia_bound …
    stacks: Sequence[AdapterStack]  # one world each


def run(lab: Lab, scale: DpScale) -> Findings:
    """Train at every ε what is not trained yet, then score."""
    trained = [_ensure(lab, epsilon, scale.delta) for epsilon in scale.epsilons]
    return Findings(score(lab, scale, trained), [_spent(lab)])


def _ensure(lab: Lab, epsilon: float, delta: float | None) -> DpAdapters:
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
    return DpAdapters({**facts, **promised, "training_seconds": seconds}, [stack])


def _spent(lab: Lab) -> str:
    """What all DP trainings on this corpus promise together."""
    from paclm.curator.dp_account import promise_figures

    together = promise_figures(lab.workspace)
    return (
        f"Each row states what its own training promises. The {together['trainings']} DP trainings on this corpus so "
        f"far, those of this study included, together promise ε = {format_up(together['epsilon'])} at δ = "
        f"{format_up(together['delta'])}: studies spend like any other training, and this also weakens what is served."
    )


def score(lab: Lab, scale: DpScale, trained: Sequence[DpAdapters]) -> list[Row]:
    """A row per ε and decoder."""
    from paclm.engine.loading import join_stacks, open_engine

    passages = lab.passages(scale.positions)
    stacks = [stack for one in trained for stack in one.stacks]
    stacks += stacks[: len(stacks) % 2]  # voters come in pairs
    stack = join_stacks([*stacks, lab.stack("full")])
    lab.release_engine()
    runtime = dataclasses.replace(lab.runtime, max_sequences=1, context=lab.window)
    engine = open_engine(lab.workspace, runtime=runtime, stack=stack)
    decodings = (GREEDY, GUMBEL.times(scale.gumbel_draws))
    seeds = [lab.seed_for("coins", decoding.name) for decoding in decodings]  # as the votes of other regimes
    advance = lab.start_task("teacher-forced tokens", sum(passage.num_scored for passage in passages))
    found = collect_votes(engine, passages, decodings, seeds, True, advance)
    losses = _losses(engine, passages)
    rows, first = [], 0
    for one in trained:
        own = slice(first, first + len(one.stacks))
        first = own.stop
        loss = {"loss": losses[own].mean(), "loss_full": losses[-2], "loss_public": losses[-1]}
        for decoder, votes in found.items():
            rows.append({"decoder": decoder, **one.facts, **_accuracy(lab, votes, own), **loss})
    return rows


def _accuracy(lab: Lab, votes: TextVotes, own: slice) -> Row:
    """How often the token is the true one, averaged over the trainings."""
    rng, passage = lab.rng("dp", "bootstrap"), votes.passage
    each: FloatArray = (votes.votes[:, own] == votes.truth[:, None]).astype(np.float64)  # (n, trainings)
    right, full, public = each.mean(axis=1), votes.column("full") == votes.truth, votes.public == votes.truth
    row: Row = {"positions": votes.num_positions, "passages": len(np.unique(passage))}
    row["trainings"] = own.stop - own.start
    row["accuracy"], row["accuracy_stderr"] = clustered_mean(right, passage, rng)
    row["accuracy_stderr_of_trainings"] = mean_and_stderr(each.mean(axis=0)).stderr
    row |= {"accuracy_public": public.mean(), "accuracy_full": full.mean()}
    row["gain_points"], row["gain_stderr"] = clustered_mean(right - public, passage, rng)
    share = retained_gain(right, public, full, passage, rng)
    row["retained_gain"], row["retained_gain_stderr"] = share or (None, None)
    return row


def _losses(engine: Engine, passages: Sequence[Passage]) -> FloatArray:
    """Mean loss of every adapter and of the public model, (adapters + 1,) nats a token over the whole vocabulary."""
    import torch

    from paclm.study.baselines.distributions import text_distributions

    parts = []
    for part in text_distributions(engine, passages):
        logs = torch.cat([part.log_shards, part.log_public[:, None]], 1)  # (c, W, V)
        where = part.truth[:, None, None].expand(-1, logs.shape[1], 1)
        parts.append(-logs.gather(2, where)[:, :, 0].cpu().numpy())
    means: FloatArray = np.concatenate(parts).mean(axis=0)
    return means


REGIME = Regime(
    name="dp",
    title="DP-SGD: a promise about the corpus",
    question="What does an adapter keep of the gain if it must hide whether any one record is in the corpus?",
    presets={"quick": DpScale(4096, 2, (2.0, 8.0)), "paper": DpScale(8176, 2, (1.0, 2.0, 4.0, 8.0))},
    run=run,
    headlines=(
        headline("kept at ε = {epsilon:g}, {decoder}", "retained_gain ±", ".0%"),
        headline("membership inference at ε = {epsilon:g}, at most", "mia_bound", ".1%", decoder="greedy"),
    ),
    for_each_collection=False,
)
