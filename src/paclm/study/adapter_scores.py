"""Adapters beside the full-corpus one: accuracy, share of the gain and loss on the positions and coins of `accuracy`.

All of them are in one engine. Support: the public model's top 200, as for worlds. Knows no training and no promise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.leak import mean_and_stderr
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class ScoredAdapters:
    """Trainings that are averaged: what rows say of them, and their adapters, which differ by chance alone."""

    facts: Row
    stacks: Sequence[AdapterStack]  # one world each


def score_adapters(lab: Lab, positions: int, gumbel_draws: int, trained: Sequence[ScoredAdapters]) -> list[Row]:
    """A row for each of `trained` and each decoder."""
    from paclm.engine.loading import join_stacks, open_engine

    passages = lab.passages(positions)
    stacks = [stack for one in trained for stack in one.stacks]
    stacks += stacks[: len(stacks) % 2]  # voters come in pairs
    stack = join_stacks([*stacks, lab.stack("full")])
    lab.release_engine()
    runtime = dataclasses.replace(lab.runtime, max_sequences=1, context=lab.window)
    engine = open_engine(lab.workspace, runtime=runtime, stack=stack)
    decodings = (GREEDY, GUMBEL.times(gumbel_draws))
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
