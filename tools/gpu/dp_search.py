"""Search of the settings of DP training on public text, for tools/gpu/dp_run.py.

Goes from one choice to the next, most telling first, each with the best so far. Draws have a seed, so that runs differ
by their settings alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dp_common import SEED, Clock, Row, noise_for
from paclm.config import DpConfig, TrainingConfig
from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import load_model, load_tokenizer, resolve_base
from paclm.engine.dp_training import train_dp
from paclm.engine.loading import pick_device
from paclm.engine.loss import batch_loss, make_batch
from paclm.engine.training import make_schedule, train_worlds
from paclm.engine.training_forward import make_forward
from paclm.engine.training_order import Blocks, make_blocks
from paclm.engine.weights import output_layer
from paclm.study.results import plain
from paclm.worlds.blocks import block_length, encode_texts
from paclm.worlds.fingerprints import Base
from paclm.worlds.readers import read_corpus
from paclm.worlds.storage import write_private_json

PASS_TOKENS = {"cpu": 1024, "cuda": 2**15}  # of scoring


@dataclass(frozen=True)
class Trial:
    """Settings of one run of the search."""

    epsilon: float
    dp: DpConfig

    @property
    def key(self) -> Row:
        return {"epsilon": self.epsilon, **asdict(self.dp)}


class SeededDraws:
    """The same draws in every run."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def sample(self, num_units: int, rate: float) -> Any:
        return self._rng.random(num_units) < rate

    def normals(self, size: int) -> Any:
        return self._rng.standard_normal(size)


def search(options: argparse.Namespace) -> None:
    """Plain training for comparison, then trial after trial; every one is written at once."""
    clock = Clock(options.minutes)
    tokens, first = (24, Trial(8.0, DpConfig(sampling_rate=0.5, steps=2))) if options.small else (options.tokens, FIRST)
    device = pick_device("auto")
    base = resolve_base(options.base)
    model: Any = load_model(base, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    settings = TrainingConfig(max_record_tokens=tokens)
    train, held_out = (
        read_blocks(path, base, model, settings, 96 if options.small else None)
        for path in (options.train, options.held_out)
    )
    num_units = int(train.records.max()) + 1
    clock.say(f"{num_units:,} records, {int(train.lengths.sum()):,} tokens; {len(held_out):,} held out")
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {"rows": []}
    found |= {"base": Path(base.name).name, "units": num_units, "tokens": tokens, "held_out": len(held_out)}
    found["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    if "full" not in found:
        found["public"] = measure(model, None, held_out)
        began = time.monotonic()
        schedule = make_schedule(train, np.ones((num_units, 1), dtype=np.bool_), settings, SEED)
        plainly = train_worlds(
            model, schedule, settings, base=base.fingerprint, worlds_per_step=1, must_improve=False
        ).stack
        seconds = time.monotonic() - began
        found["full"] = {**measure(model, plainly, held_out), "seconds": seconds}
        write_private_json(options.out, plain(found))
        clock.say(f"public {describe(found['public'])}; plain {describe(found['full'])}, {seconds:.0f} s")
    for trial in iter(lambda: next_trial(found["rows"], first), None):
        seconds = expected_seconds(found["rows"], trial)
        if not clock.has(seconds):
            clock.say(f"no time for {trial.key}, {seconds:.0f} s")
            break
        noise = noise_for(options, num_units, trial.epsilon, trial.dp.sampling_rate, trial.dp.steps)
        began = time.monotonic()
        stack = train_dp(
            model,
            train,
            np.arange(num_units),
            settings,
            trial.dp,
            num_units=num_units,
            noise_multiplier=noise["noise_multiplier"],
            draws=SeededDraws(SEED),
            base=base.fingerprint,
            seed=SEED,
        )
        seconds = time.monotonic() - began
        row = {**trial.key, "noise_multiplier": noise["noise_multiplier"], "delta": noise["delta"], "seconds": seconds}
        row |= measure(model, stack, held_out)
        for name in ("accuracy", "loss"):
            row[f"kept_{name}"] = (row[name] - found["public"][name]) / (found["full"][name] - found["public"][name])
        found["rows"].append(row)
        write_private_json(options.out, plain(found))
        clock.say(
            f"ε {trial.epsilon:g} {trial.dp.factors:4} lr {trial.dp.learning_rate:.2g} C {trial.dp.clip_norm:g} "
            f"q {trial.dp.sampling_rate:g} T {trial.dp.steps}: {describe(row)}, kept {row['kept_accuracy']:.1%} "
            f"({row['kept_loss']:.1%} of the loss), {seconds:.0f} s"
        )
    clock.say("done")


FIRST = Trial(8.0, DpConfig(sampling_rate=0.5, steps=20, clip_norm=0.3, learning_rate=3e-3, factors="B"))


def next_trial(rows: Sequence[Row], first: Trial) -> Trial | None:
    """The next run: factors and learning rate, steps at equal compute, clipping, then other ε and more compute."""
    done = [{name: row[name] for name in first.key} for row in rows]
    return next((trial for trial in candidates(rows, first) if trial.key not in done), None)


def candidates(rows: Sequence[Row], first: Trial) -> Iterator[Trial]:
    """Runs in their order. Each group varies the best of the runs before it: a continued search takes the same way."""

    def best(count: int, epsilon: float = first.epsilon) -> Trial:
        own = [row for row in rows[:count] if row["epsilon"] == epsilon]
        found = min(own, key=lambda row: float(row["loss"]))
        return Trial(epsilon, DpConfig(**{name: found[name] for name in asdict(first.dp)}))

    def vary(trial: Trial, factor: float = 1.0, **changes: Any) -> Trial:
        """Other settings, and the learning rate times a factor."""
        rate = float(f"{trial.dp.learning_rate * factor:.1e}")
        return replace(trial, dp=replace(trial.dp, **{"learning_rate": rate, **changes}))

    for factors, rate in (("B", 3e-3), ("both", 3e-3), ("B", 1e-2), ("both", 1e-3), ("B", 1e-3)):
        yield vary(first, factors=factors, learning_rate=rate)
    if len(rows) < 5:
        return
    yield from (vary(best(5), factor) for factor in (1.8, 1 / 1.8))
    if len(rows) < 7:
        return
    start = best(7)
    for factor in (2, 0.5, 4):  # q · T, the compute, stays
        shape = {"sampling_rate": start.dp.sampling_rate / factor, "steps": round(start.dp.steps * factor)}
        yield vary(start, factor**-0.5, **shape)
    if len(rows) < 10:
        return
    yield from (vary(best(10), clip_norm=clip_norm) for clip_norm in (0.1, 1.0))
    if len(rows) < 12:
        return
    start = best(12)
    yield from (vary(replace(start, epsilon=2.0), factor) for factor in (1.0, 0.5))
    if len(rows) < 14:
        return
    lower = best(14, 2.0)
    yield vary(lower, 2**0.5, steps=max(1, lower.dp.steps // 2))
    yield vary(start, 2**-0.5, steps=2 * start.dp.steps)
    yield vary(lower, factors="both" if lower.dp.factors == "B" else "B")


def expected_seconds(rows: Sequence[Row], trial: Trial) -> float:
    """By the work of the run before."""
    if not rows:
        return 0.0
    work = [row["seconds"] / (row["sampling_rate"] * row["steps"]) for row in rows]
    return float(np.median(work)) * trial.dp.sampling_rate * trial.dp.steps


def read_blocks(path: Path, base: Base, model: Any, settings: TrainingConfig, most: int | None) -> Blocks:
    """One block per record, cut to the longest that is trained on."""
    texts = [record.text for record in read_corpus(str(path)).records][:most]
    encoded = encode_texts(load_tokenizer(base), texts)
    context = int(model.config.max_position_embeddings)
    return make_blocks(encoded, block_length(settings, context), settings.max_record_tokens)


@torch.no_grad()
def measure(model: Any, stack: AdapterStack | None, blocks: Blocks) -> Row:
    """Accuracy and loss of an adapter, or of the public model, over the whole vocabulary."""
    head, forward = output_layer(model), make_forward(model)
    device = head.weight.device
    stack = stack.to(device) if stack is not None else None
    A, B, scale = ({}, {}, 1.0) if stack is None else (stack.A, stack.B, stack.spec.scale)
    order = np.argsort(blocks.lengths, kind="stable")
    rows = max(1, PASS_TOKENS[device.type] // int(blocks.lengths.max()))
    hits, losses = [], []
    try:
        for first in range(0, len(order), rows):
            batch = make_batch(blocks, order[first : first + rows][None], device)
            hidden = forward(batch.ids, A, B, scale)
            losses.append(batch_loss(hidden, head, batch)[1])
            for part in torch.split(torch.arange(len(batch.where), device=device), 4096):
                logits = functional.linear(hidden[batch.where[part]], head.weight, head.bias)
                hits.append(logits.argmax(-1) == batch.targets[part])
    finally:
        forward.close()
    return {"accuracy": float(torch.cat(hits).double().mean()), "loss": float(torch.cat(losses).double().mean())}


def describe(row: Row) -> str:
    return f"{row['accuracy']:.2%} / {row['loss']:.4f}"
