"""Capacity pilot (`sec:canary-results`): how many repetitions until a canary reaches the argmax?

Adapters with a single canary against a clean control on identical data, all from one start and in one order: an
adapter differs from the control by its canary alone. The adapters are not kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import BoolArray
from paclm.privacy.leak import mean_and_stderr
from paclm.study.lab import Lab
from paclm.study.quality import TargetScores, score_targets
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.study.text_training import train_on_texts
from paclm.worlds.canaries import Canary, make_canaries

if TYPE_CHECKING:
    from paclm.config import TrainingConfig
    from paclm.engine.adapters import AdapterStack

SETTINGS = ((8, 2), (32, 4))  # rank and epochs; α grows with the rank, so that adapters are scaled alike
BATCH = 8  # blocks per step, as in the paper


@dataclass(frozen=True, slots=True)
class CapacityScale:
    records: int  # clean records, the same for every adapter
    record_tokens: int  # of each record that are trained on, at most
    canaries: int  # half of them C-OOD, half C-COMMON
    repetitions: tuple[int, ...]  # visits of the canary in one epoch


@dataclass(frozen=True, slots=True)
class Pilot:
    """Adapter 0 is the clean control; the others hold one canary each, at one count of repetitions."""

    canaries: list[Canary]
    repetitions: tuple[int, ...]

    def adapter(self, canary: int, repetitions: int) -> int:
        """Which adapter holds that canary at that count."""
        return 1 + canary * len(self.repetitions) + self.repetitions.index(repetitions)

    def membership(self, num_records: int) -> BoolArray:
        """(clean records and then one row per bearing adapter, adapters)"""
        bearing = len(self.canaries) * len(self.repetitions)
        clean = np.ones((num_records, 1 + bearing), dtype=np.bool_)
        own = np.concatenate([np.zeros((bearing, 1), dtype=np.bool_), np.eye(bearing, dtype=np.bool_)], axis=1)
        return np.concatenate([clean, own])


def run(lab: Lab, scale: CapacityScale) -> Findings:
    """Both settings of rank and epochs."""
    pilot = Pilot(make_canaries(scale.canaries, lab.tokenizer, lab.seed_for("capacity")), tuple(scale.repetitions))
    parts = lab.parts("capacity", asdict(scale))
    rows: list[Row] = []
    for rank, epochs in SETTINGS:
        own = lab.workspace.training
        training = dataclasses.replace(own, rank=rank, epochs=epochs, alpha=own.alpha / own.rank * rank)
        settings = dataclasses.replace(training, batch_size=BATCH, coupled=True)
        rows += parts.rows(f"rank-{rank}", partial(_rows, lab, scale, pilot, settings))
    rate = lab.workspace.training.learning_rate
    note = f"How soon a canary is learnt depends on the learning rate: {rate:g} here, 0.0002 in the paper."
    return Findings(rows, [note])


def _train(lab: Lab, scale: CapacityScale, pilot: Pilot, settings: TrainingConfig) -> AdapterStack:
    from paclm.worlds.blocks import encode_texts

    records = lab.workspace.records("train")
    chosen = np.sort(lab.rng("capacity", "records").permutation(len(records))[: scale.records])
    texts = encode_texts(lab.tokenizer, [records[i].text for i in chosen.tolist()])
    bearers = [(canary, count) for canary in pilot.canaries for count in pilot.repetitions]
    return train_on_texts(
        lab,
        [*texts, *([*canary.trigger_ids, *canary.payload_ids] for canary, _ in bearers)],
        pilot.membership(len(texts)),
        dataclasses.replace(settings, max_record_tokens=min(scale.record_tokens, settings.max_record_tokens)),
        lab.seed_for("capacity", "training") % 2**32,
        f"capacity pilot, rank {settings.rank}",
        block_tokens=settings.block_tokens or lab.window,
        repetitions=[1] * len(texts) + [count for _, count in bearers],
    ).stack


def _scores(lab: Lab, pilot: Pilot, stack: AdapterStack) -> list[TargetScores]:
    """What every adapter gives to each canary's payload, (adapters and the public model, payload) per canary."""
    from paclm.engine.loading import open_engine

    length = max(len(canary.trigger_ids) + len(canary.payload_ids) for canary in pilot.canaries)
    runtime = dataclasses.replace(lab.runtime, max_sequences=1, context=length)
    lab.release_engine()  # of what training held, too
    engine = open_engine(lab.workspace, 1, runtime, stack)
    return [
        score_targets(engine, [*canary.trigger_ids, *canary.payload_ids], first=len(canary.trigger_ids))
        for canary in pilot.canaries
    ]


def _rows(lab: Lab, scale: CapacityScale, pilot: Pilot, settings: TrainingConfig) -> list[Row]:
    scores = _scores(lab, pilot, _train(lab, scale, pilot, settings))
    rows: list[Row] = []
    for kind in ("C-COMMON", "C-OOD"):
        chosen = [i for i, canary in enumerate(pilot.canaries) if canary.kind == kind]
        for count in pilot.repetitions:
            own = np.stack([scores[i].log_probability[pilot.adapter(i, count)] for i in chosen])  # (c, payload)
            clean = np.stack([scores[i].log_probability[0] for i in chosen])
            rank = np.stack([scores[i].rank[pilot.adapter(i, count)] for i in chosen])
            row: Row = {"rank": settings.rank, "epochs": settings.epochs, "kind": kind, "repetitions": count}
            row |= {"canaries": len(chosen), "payload_positions": int(rank.size)}
            row["gap_nats"], row["gap_stderr"] = mean_and_stderr((own - clean).mean(axis=1))
            row["first_gap_nats"], row["first_gap_stderr"] = mean_and_stderr((own - clean)[:, 0])
            row["median_rank"] = float(np.median(rank) + 1.0)
            row["median_rank_control"] = float(np.median([scores[i].rank[0] for i in chosen]) + 1.0)
            row["argmax_share"] = float((rank == 0).mean())
            rows.append(row)
    return rows


REGIME = Regime(
    name="capacity",
    title="Capacity pilot",
    question="How often must a canary be repeated until an adapter puts it first?",
    presets={
        "quick": CapacityScale(6, 48, 2, (1, 8, 32)),
        "paper": CapacityScale(256, 2048, 8, (1, 16, 64, 256, 1024, 4096)),
    },
    run=run,
    headlines=(
        headline(
            "gap of {kind}, rank {rank}, {repetitions} visits", "gap_nats ± gap_stderr", "+.2f", largest="repetitions"
        ),
    ),
    for_each_collection=False,
)
