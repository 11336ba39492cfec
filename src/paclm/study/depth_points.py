"""Points of the regime `depth`: adapters of some layers and rank, their learning rate, votes, speed and memory.

No adapter is kept. Speed and memory do not depend on the values of adapters, so untrained ones are timed: all points in
one run, with any number of worlds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.privacy.belief import BoolArray, FloatArray
from paclm.privacy.leak import Estimate
from paclm.privacy.randomness import Coins
from paclm.privacy.releases import rule_named
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.eval_text import Passage
from paclm.study.expectation import ExpectedReleases
from paclm.study.lab import Lab
from paclm.study.parts import Array
from paclm.study.quality import score_targets
from paclm.study.recorded_votes import TextVotes, collect_votes
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean
from paclm.worlds.assignment import assign_groups, units_of

if TYPE_CHECKING:
    from paclm.config import TrainingConfig
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.engine import Engine
    from paclm.engine.training_job import TrainingJob
    from paclm.engine.training_order import Blocks

SUPPORT = 200
DECODINGS = (GREEDY, GUMBEL)
PER_TOKEN = 2.0**-32
HELD_OUT = 8  # one in so many training units is held out while a learning rate is chosen
TARGETS = 32  # scored in a window, at least
WARM_UP = 3  # steps


@dataclass(frozen=True, slots=True)
class DepthScale:
    worlds: int  # trained at every point, at most
    records: int  # drawn from, at most
    positions: int
    trial_worlds: int  # trained for every learning rate that is tried
    trial_positions: int
    most_rates: int  # tried at one depth, at most
    sessions: int  # for the leak
    tokens: int  # of each session
    streams: int  # sequences of a timed step
    timed_worlds: int
    steps: int  # timed
    ranks: tuple[int, ...] = (8, 16, 32)  # at half depth
    window: int = 128  # tokens read of each window of text; targets are the last of them
    context: int = 96  # tokens of each timed sequence


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """Adapters in the last `depth` layers, of one rank."""

    depth: int
    num_layers: int
    rank: int

    @property
    def layers(self) -> str:
        """As [training] has it."""
        return "all" if self.depth == self.num_layers else f"top:{self.depth}"

    @property
    def name(self) -> str:
        """In names of parts."""
        return f"{self.depth}-rank-{self.rank}"

    def settings(self, own: TrainingConfig, rate: float) -> TrainingConfig:
        """The workspace's settings at this point; α grows with the rank, so that adapters are scaled alike."""
        alpha = own.alpha / own.rank * self.rank
        return replace(own, layers=self.layers, rank=self.rank, alpha=alpha, learning_rate=rate)

    def row(self) -> Row:
        """The columns that name it."""
        return {"layers": self.layers, "depth": self.depth, "num_layers": self.num_layers, "rank": self.rank}


def choose_points(num_layers: int, rank: int, ranks: Sequence[int]) -> list[DepthPoint]:
    """All layers, the upper half and quarter at the workspace's rank, then other ranks at half depth."""
    half, quarter = (num_layers + 1) // 2, max(1, (num_layers + 2) // 4)
    wanted = [*((depth, rank) for depth in (num_layers, half, quarter)), *((half, other) for other in ranks)]
    return [DepthPoint(depth, num_layers, each) for depth, each in dict.fromkeys(wanted)]


def spread(windows: Sequence[Passage], num_positions: int, window: int) -> list[Passage]:
    """The last targets in the first `window` tokens of every window: as many in each, and `num_positions` in all."""
    windows = windows[: max(1, num_positions // TARGETS)]
    share = math.ceil(num_positions / len(windows))
    found = []
    for each in windows:
        end = min(len(each), max(window, share + 1))
        is_scored = tuple(is_scored and i >= end - share for i, is_scored in enumerate(each.is_scored[:end]))
        found.append(Passage(each.tokens[:end], is_scored, each.document))
    return [passage for passage in found if passage.num_scored]


def values_at(votes: TextVotes) -> dict[str, FloatArray]:
    """What is averaged, at every position; secret and noise of the release in expectation."""
    found = ExpectedReleases(votes).under(rule_named("gaussian"), PER_TOKEN)
    values = {
        "public": (votes.public == votes.truth).astype(np.float64),
        "noiseless": found.noiseless,
        "private": found.hits,
        "dissent": votes.is_dissent.astype(np.float64),
    }
    if votes.full is not None:
        values["full"] = (votes.full == votes.truth).astype(np.float64)
    return values


class Trainer:
    """Trains adapters that are not kept. Base model and blocks are loaded once, for a run that trains."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @cached_property
    def _job(self) -> TrainingJob:
        from paclm.engine.training_job import prepare_training

        self.lab.release_engine()
        return prepare_training(self.lab.workspace, "full")

    def blocks(self, records: BoolArray) -> Blocks:
        """Of these records alone."""
        from paclm.engine.training_order import Blocks

        blocks = self._job.schedule.blocks
        chosen = np.flatnonzero(records[blocks.records])
        tokens = np.concatenate([blocks[i] for i in chosen.tolist()])
        starts = np.concatenate([[0], np.cumsum(blocks.lengths[chosen])])
        return Blocks(tokens, starts, blocks.records[chosen], blocks.repetitions[chosen])

    def train(
        self, blocks: Blocks, membership: BoolArray, settings: TrainingConfig, seed: int, what: str
    ) -> tuple[AdapterStack, FloatArray]:
        """Train on a membership (records, adapters); the adapters, and seconds and tokens of the training."""
        from paclm.engine.loading import pick_device
        from paclm.engine.training import make_schedule, train_worlds

        job = replace(self._job, settings=settings, schedule=make_schedule(blocks, membership, settings, seed))
        model: Any = job.model
        self.lab.release_engine()
        try:
            model.to(pick_device(self.lab.workspace.runtime.device))
            plan = job.plan()
            task = f"train {what}, layers {settings.layers}, rank {settings.rank}"
            advance = self.lab.start_task(task, plan.num_steps)
            trained = train_worlds(
                model,
                job.schedule,
                settings,
                base=self.lab.workspace.base.fingerprint,
                worlds_per_step=plan.worlds_per_step,
                on_progress=lambda _: advance(1),
                must_improve=False,  # at a rate that is too high the loss may rise
            )
        finally:
            model.to("cpu")  # the engine that votes next may need the room
        return trained.stack, np.array([trained.seconds, job.schedule.num_tokens.sum()])


def _kept_records(lab: Lab, scale: DepthScale) -> BoolArray:
    """(records,) which take part."""
    count = len(lab.workspace.membership)
    kept = np.zeros(count, dtype=np.bool_)
    kept[lab.rng("depth", "records").permutation(count)[: scale.records]] = True
    return kept


def _open(lab: Lab, stack: AdapterStack, sequences: int, context: int, support_size: int = SUPPORT) -> Engine:
    from paclm.engine.loading import open_engine

    lab.release_engine()  # of what training held, too
    runtime = replace(lab.runtime, max_sequences=sequences, context=context)
    return open_engine(lab.workspace, support_size, runtime, stack)


def search_rate(trainer: Trainer, scale: DepthScale, point: DepthPoint, start: float) -> list[Row]:
    """Double or halve the rate for as long as private accuracy on training records that are held out rises.

    Not by loss: it may fall on at rates where worlds dissent so often that the release keeps less of the gain.
    """
    lab = trainer.lab
    units, seed = units_of(lab.workspace.members()), lab.seed_for("depth", "rates")
    names = np.random.default_rng(seed).permutation(sorted(set(units)))
    is_text = np.array([record.repetitions == 1 for record in lab.workspace.members()])  # no canary
    is_held = np.isin(units, names[: -(-len(names) // HELD_OUT)]) & is_text
    kept = _kept_records(lab, scale) & is_text & ~is_held
    blocks, held = trainer.blocks(kept), trainer.blocks(is_held)
    drawn = assign_groups(units, scale.trial_worlds, seed >> 32) & kept[:, None]
    windows = [replace(Passage.of(held[i].tolist()), document=int(held.records[i])) for i in range(len(held))]
    passages = spread(windows, scale.trial_positions, scale.window)
    clusters = np.concatenate([np.full(passage.num_scored, passage.document) for passage in passages])
    tried: dict[float, Row] = {}
    private: dict[float, FloatArray] = {}

    def mean(values: FloatArray) -> Estimate:
        return clustered_mean(values, clusters, lab.rng("depth", "rates", "bootstrap"))

    def accuracy(rate: float) -> float:
        settings = point.settings(lab.workspace.training, rate)
        stack, _ = trainer.train(blocks, drawn, settings, seed >> 32, f"at rate {rate:.2g}")
        engine = _open(lab, stack, 1, max(map(len, passages)))
        coins = [lab.seed_for("depth", "rates", "coins")]  # the same at every rate
        values = values_at(collect_votes(engine, passages, (GUMBEL,), coins, False)[GUMBEL.name])
        found = [score_targets(engine, one.tokens, len(one) - one.num_scored).log_probability for one in passages]
        losses = -np.concatenate(found, axis=1)  # (worlds and the public model, targets)
        private[rate] = values["private"]
        row: Row = {"kind": "rate", **point.row(), "learning_rate": rate, "is_chosen": False}
        row |= {
            "trial_worlds": scale.trial_worlds,
            "records_held": len(np.unique(clusters)),
            "positions_held": len(clusters),
        }
        for name in ("public", "private", "noiseless"):
            row[f"accuracy_{name}"], row[f"accuracy_{name}_stderr"] = mean(values[name])
        row["dissent"], row["dissent_stderr"] = mean(values["dissent"])
        row["loss"], row["loss_stderr"] = mean(losses[:-1].mean(axis=0))
        row["loss_change"], row["loss_change_stderr"] = mean(losses[:-1].mean(axis=0) - losses[-1])
        tried[rate] = row
        return float(row["accuracy_private"])

    best = climb(accuracy, start, scale.most_rates)
    behind = {rate: mean(private[rate] - private[best]) for rate in sorted(tried)}
    for rate, (difference, stderr) in behind.items():
        tried[rate] |= {"difference": difference, "difference_stderr": stderr}
    tried[smallest_within_error(behind)]["is_chosen"] = True
    return [tried[rate] for rate in sorted(tried)]


def climb(score: Callable[[float], float], start: float, most: int) -> float:
    """The best rate, doubled or else halved from the start for as long as the score rises; `most` are tried."""
    tried = {start: score(start)}
    best = start
    for step in (2.0, 0.5):
        while len(tried) < most and best * step not in tried:
            tried[best * step] = score(best * step)
            if tried[best * step] <= tried[best]:
                break
            best *= step
    return best


def smallest_within_error(behind: Mapping[float, Estimate]) -> float:
    """Of rates, each with its difference to the best one: the smallest at most one standard error behind."""
    return min(rate for rate, (difference, stderr) in behind.items() if difference >= 0.0 or -difference <= stderr)


def train_and_vote(trainer: Trainer, scale: DepthScale, settings: TrainingConfig) -> dict[str, Array]:
    """Votes of the worlds and of the full-corpus adapter, trained together; seconds and tokens of that training."""
    lab = trainer.lab
    kept = _kept_records(lab, scale)
    held = lab.workspace.membership[:, : min(scale.worlds, lab.num_worlds)]
    own = np.hstack([held, np.ones_like(held[:, :1])]) & kept[:, None]  # the last one is trained on all records
    seed = int(lab.workspace.manifest.arguments["seed"])
    stack, training = trainer.train(trainer.blocks(kept), own, settings, seed, "worlds")
    passages = spread(lab.test_passages, scale.positions, scale.window)
    advance = lab.start_task(f"votes, layers {settings.layers}", sum(passage.num_scored for passage in passages))
    engine = _open(lab, stack, 1, max(map(len, passages)))
    seeds = [lab.seed_for("coins", decoding.name) for decoding in DECODINGS]
    found = collect_votes(engine, passages, DECODINGS, seeds, True, advance)
    arrays = {key: array for name, votes in found.items() for key, array in votes.arrays(name).items()}
    return arrays | {"training": training}


def measure_costs(lab: Lab, scale: DepthScale, points: list[DepthPoint]) -> list[Row]:
    """Time of a step and memory of every engine, one after another, with untrained adapters."""
    import torch

    from paclm.engine.adapters import AdapterStack, find_targets
    from paclm.engine.base_model import base_of, load_model
    from paclm.engine.training import adapter_spec

    lab.release_engine()
    model: Any = load_model(base_of(lab.workspace), torch.float32)
    context = min(scale.context, int(model.config.max_position_embeddings))
    tokens = lab.rng("depth", "prompts").integers(len(lab.tokenizer), size=(scale.streams, context - 1))
    advance = lab.start_task("time of a step", len(points))
    rows: list[Row] = []
    streams = scale.streams
    for point in points:
        spec = adapter_spec(point.settings(lab.workspace.training, 1.0))
        targets = find_targets(model, spec)
        stack = AdapterStack.initial(targets, spec, scale.timed_worlds, 0, lab.workspace.base.fingerprint)
        engine = _open(lab, stack, streams, context)
        streams = min(streams, engine.num_together(context))  # the first engine needs the most memory
        seconds, peak = _time_steps(lab, scale, engine, tokens[:streams].tolist())
        row: Row = {"timed_worlds": scale.timed_worlds, "streams": streams, "context": context}
        row |= {"step_ms": 1e3 * seconds, "tokens_per_second": streams / seconds, "peak_bytes": peak}
        row["parameters_per_world"] = stack.num_parameters
        row["cache_bytes_per_token"] = _cache_bytes(model, stack, engine)
        first = rows[0] if rows else row
        row["speed_ratio"] = row["tokens_per_second"] / first["tokens_per_second"]
        row["cache_ratio"] = row["cache_bytes_per_token"] / first["cache_bytes_per_token"]
        rows.append(row)
        del engine, stack
        advance(1)
    return rows


def _cache_bytes(model: Any, stack: AdapterStack, engine: Engine) -> int:
    """Keys and values of one token of one sequence, as an engine plans them."""
    from paclm.engine.loading import planned_trunk
    from paclm.engine.memory import token_bytes

    return token_bytes(model.config, stack.num_rows, engine.head.dtype, planned_trunk(model, stack.trunk))


def _time_steps(lab: Lab, scale: DepthScale, engine: Engine, prompts: list[list[int]]) -> tuple[float, int | None]:
    """Seconds of a decode step (median), and on a GPU the most bytes that the engine used."""
    import torch

    from paclm.engine.memory import peak_memory

    device = engine.head.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    handles = [engine.add(prompt) for prompt in prompts]
    coins = Coins(lab.seed_for("depth", "coins"))
    drawn = np.stack([coins.gumbel(SUPPORT) for _ in handles])
    seconds = []
    for step in range(WARM_UP + scale.steps):
        began = time.perf_counter()
        engine.step(handles, drawn)
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    engine.clear()
    return float(np.median(seconds)), peak_memory(device) if device.type == "cuda" else None
