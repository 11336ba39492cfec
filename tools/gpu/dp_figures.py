"""Accuracy of DP adapters at full scale, for tools/gpu/dp_run.py: trains, scores, writes `NAME/dp.json`."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dp_common import SEED, Clock, Row, noise_for
from paclm.config import DpConfig, RuntimeConfig
from paclm.engine.adapters import AdapterStack
from paclm.engine.base_model import base_of, context_of, load_model, load_tokenizer, resolve_base
from paclm.engine.dp_training import DpProgress, train_dp
from paclm.engine.loading import pick_device
from paclm.engine.memory import release_memory
from paclm.engine.training_job import prepare_training
from paclm.engine.training_order import Blocks, make_blocks
from paclm.privacy.randomness import DpRandomness
from paclm.study.adapter_scores import ScoredAdapters
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.regimes.dp import REGIME, score
from paclm.study.results import Result, plain, provenance
from paclm.study.run import device_name
from paclm.worlds.assignment import units_of
from paclm.worlds.blocks import block_length, encode_texts
from paclm.worlds.creation import create_workspace
from paclm.worlds.layout import adapters_file
from paclm.worlds.readers import read_corpus
from paclm.worlds.storage import write_private_json
from paclm.worlds.workspace import Workspace

EPSILONS = (8.0, 2.0, 4.0, 1.0)
CANARIES = 16  # as paper_run.py


def figures(options: argparse.Namespace) -> None:
    """All corpora at every ε, then repetitions as time permits; results are written after the first round, too."""
    clock = Clock(options.minutes)
    dp = replace(DpConfig(), **dict(options.set))
    if options.small:
        dp = replace(dp, steps=min(dp.steps, 2))
    studies = [Study(options, clock, dp, *corpus) for corpus in options.corpus]
    for study in studies:
        study.ensure_full()
    device = pick_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = load_model(resolve_base(options.base), dtype).to(device)
    slowest, scoring = 0.0, 0.0
    for repeat in range(options.repeats):
        for epsilon, study in itertools.product(EPSILONS, studies):
            if clock.has(slowest + scoring):
                slowest = max(slowest, study.ensure(model, epsilon, repeat))
        began = clock.seconds
        if repeat in (0, options.repeats - 1) or not clock.has(slowest + scoring):
            for study in studies:
                study.report()
            scoring = clock.seconds - began
        if not clock.has(slowest + scoring):
            break
    clock.say("done")


class Study:
    """One corpus: its workspace, adapters and result."""

    def __init__(
        self, options: argparse.Namespace, clock: Clock, dp: DpConfig, name: str, train: str, held_out: str
    ) -> None:
        self.options, self.clock, self.dp, self.name = options, clock, dp, name
        self.began = time.perf_counter()
        self.workspace = make_workspace(options, name, train)
        is_gpu = pick_device("auto").type == "cuda"
        runtime = RuntimeConfig(dtype="bfloat16" if is_gpu else "float32", prefill_chunk=512 if is_gpu else 128)
        most = 16 if options.small else None
        texts = [record.text for record in read_corpus(held_out).records][:most]
        limit = self.workspace.training.max_record_tokens
        tokens = encode_texts(load_tokenizer(base_of(self.workspace)), texts)
        passages = [Passage.of(ids[:limit]) for ids in tokens]  # as the held-out records of a workspace
        self.lab = Lab(self.workspace, runtime=runtime, test_text=passages, start_task=self.start_task)
        self.folder = options.work / f"{name}-dp"
        self.folder.mkdir(parents=True, exist_ok=True)

    def start_task(self, what: str, total: int) -> Callable[[int], None]:
        self.clock.say(f"  {self.name}: {what}" + (f" ({total:,})" if total else ""))
        return lambda _: None

    def ensure_full(self) -> None:
        """Train the plain full-corpus adapter unless it exists."""
        if adapters_file("full") not in self.lab.workspace.manifest.adapters:
            began = self.clock.seconds
            self.lab.workspace = prepare_training(self.workspace, "full").run(1)[0]
            write_private_json(self.folder / "full.json", {"seconds": self.clock.seconds - began})
            self.clock.say(f"{self.name}: full corpus, {self.clock.seconds - began:.0f} s")

    @cached_property
    def blocks(self) -> Blocks:
        """Every record once, canaries too."""
        workspace = self.lab.workspace
        base, settings = base_of(workspace), workspace.training
        encoded = encode_texts(load_tokenizer(base), [record.text for record in workspace.members()])
        return make_blocks(encoded, block_length(settings, context_of(base)), settings.max_record_tokens)

    def ensure(self, model: Any, epsilon: float, repeat: int) -> float:
        """Train an adapter unless it exists; returns the seconds it took."""
        path, workspace = self.path(epsilon, repeat), self.lab.workspace
        if path.is_file():
            return 0.0
        began = time.monotonic()
        stack = train_dp(
            model,
            self.blocks,
            units_of(workspace.members()),
            workspace.training,
            self.dp,
            num_units=self.num_units,
            noise_multiplier=self.noise(epsilon)["noise_multiplier"],
            draws=DpRandomness(),
            base=workspace.base.fingerprint,
            seed=SEED,
            on_progress=self.show,
        )
        seconds = time.monotonic() - began
        write_private_json(path.with_suffix(".json"), {"seconds": seconds})
        stack.save(path)
        self.clock.say(f"{self.name}: ε = {epsilon:g}, training {repeat + 1}, {seconds:.0f} s")
        return seconds

    def show(self, now: DpProgress) -> None:
        if now.step == 1 or now.step == now.num_steps:
            self.clock.say(f"  {self.name}: step {now.step} of {now.num_steps}")

    def path(self, epsilon: float, repeat: int) -> Path:
        """Named after everything that decides the adapter but its draws."""
        settings = "-".join(
            f"{value:g}" if isinstance(value, float) else str(value) for value in asdict(self.dp).values()
        )
        return self.folder / f"dp-{epsilon:g}-{settings}-{repeat}.safetensors"

    @property
    def num_units(self) -> int:
        return len(set(units_of(self.workspace.members())))

    def noise(self, epsilon: float) -> Row:
        return noise_for(self.options, self.num_units, epsilon, self.dp.sampling_rate, self.dp.steps)

    def report(self) -> None:
        """Score what is trained, write dp.json, and compare with what is recorded."""
        release_memory()
        trained = []
        for epsilon in sorted(EPSILONS):
            paths = [path for i in range(self.options.repeats) if (path := self.path(epsilon, i)).is_file()]
            if paths:
                seconds = [json.loads(path.with_suffix(".json").read_text())["seconds"] for path in paths]
                facts = {
                    **self.noise(epsilon),
                    **asdict(self.dp),
                    "unit": "record",
                    "training_seconds": np.mean(seconds),
                }
                trained.append(ScoredAdapters(facts, [AdapterStack.load(path) for path in paths]))
        if not trained:
            return
        scale = REGIME.presets["quick" if self.options.small else "paper"]
        rows = [{"collection": 1, **row} for row in score(self.lab, scale, trained)]
        full = self.folder / "full.json"
        for row in rows:
            row["full_training_seconds"] = json.loads(full.read_text())["seconds"] if full.is_file() else None
        result = Result(
            regime="dp",
            preset="quick" if self.options.small else "paper",
            seed=self.lab.seed,
            scale=asdict(scale),
            rows=plain(rows),
            seconds=time.perf_counter() - self.began,
            provenance=provenance(self.lab.workspace, device_name(self.lab)),
        )
        (self.options.out / self.name).mkdir(parents=True, exist_ok=True)
        result.save(self.options.out / self.name)
        for row in rows:
            self.clock.say(
                f"{self.name}, {row['decoder']}, ε = {row['epsilon']:g}: {row['accuracy']:.2%} (public "
                f"{row['accuracy_public']:.2%}, full {row['accuracy_full']:.2%}), kept "
                + (f"{row['retained_gain']:.1%} ± {row['retained_gain_stderr']:.1%}" if row["retained_gain"] else "–")
                + f", loss {row['loss']:.4f} ({row['loss_public']:.4f}, {row['loss_full']:.4f})"
            )
        self.compare(rows)

    def compare(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the recorded accuracy of the public model and the full-corpus adapter beside this run's."""
        path = Path(__file__).resolve().parents[2] / "docs/research/results" / self.name / "results" / "accuracy.json"
        if not path.is_file():
            return
        recorded = Result.load(path)
        for decoder in ("greedy", "gumbel"):
            now, before = (next(row for row in of if row["decoder"] == decoder) for of in (rows, recorded.rows))
            for name in ("accuracy_public", "accuracy_full"):
                self.clock.say(f"{self.name}, {decoder}: {name} {now[name]:.4f}, recorded {before[name]:.4f}")


def make_workspace(options: argparse.Namespace, name: str, train: str) -> Workspace:
    """All records of the file, none held out, as paper_run.py makes its workspaces; two worlds, which are not used."""
    corpus = read_corpus(train)
    if options.small:
        corpus = replace(corpus, records=corpus.records[:96])
    base = resolve_base(options.base)
    return create_workspace(
        options.work / name,
        corpus=corpus,
        base=base,
        tokenizer=load_tokenizer(base),
        num_worlds=2,
        seed=SEED,
        holdout=0,
        num_canaries=CANARIES,
        max_record_tokens=32 if options.small else 512,
    ).workspace
