"""The paper's evaluation at full scale on one GPU, in stages that fit a short lease.

    python tools/paper_run.py --stage 1 --corpus wikipedia.jsonl.xz --base smollm2 --work ~/paper --out results

Every stage stands alone: it makes the workspace and trains the worlds unless `--work` holds them already, runs its
regimes at the preset `paper`, and writes small result files (JSON; no weights, no text) into a folder of `--out` that
is named after the corpus and laid out as `paclm study report` reads it. A stage that was stopped goes on where it was,
with the same code.
A regime that does not fit into `--minutes` any more is left out, and the stage file says so. Needs torch, transformers,
numpy, scipy and safetensors only. `--small` is a rehearsal for a CPU, in minutes.

| stage | corpus | what |
|---|---|---|
| 1, 2 | first, second | census, accuracy, flatness, sessions, releases; 1 also arithmetic, forgetting and cost |
| 3 | first | sweep, generation, ablation, canaries |
| 4 | first | PMixED and its neighbours |
| 5 | first | second collection, coupled against uncoupled training, universe audit, token-only attacker, capacity |
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from paclm.config import RuntimeConfig
from paclm.engine.base import base_of, load_tokenizer, resolve_base
from paclm.engine.loading import pick_device
from paclm.engine.training import Progress
from paclm.engine.training_job import prepare_training
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Advance, Lab
from paclm.study.regime import Preset
from paclm.study.regimes import regime_named
from paclm.study.run import device_name, run_regime
from paclm.worlds.creation import create_workspace
from paclm.worlds.layout import adapters_file
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions
from paclm.worlds.workspace import Workspace

STAGES = {
    1: ("precision", "census", "accuracy", "flatness", "sessions", "releases", "forgetting", "cost"),
    2: ("census", "accuracy", "flatness", "sessions", "releases"),
    3: ("sweep", "generation", "ablation", "canaries"),
    4: ("pmixed",),
    5: ("accuracy", "coupling", "universe", "tokens_only", "capacity"),
}
TWO_COLLECTIONS = {5: ("accuracy",)}
FIXTURE_POSITIONS = 4096


@dataclass(frozen=True)
class Size:
    """How large the worlds are made."""

    records: int
    held_out: int
    canaries: int
    worlds: int
    record_tokens: int


PAPER = Size(2048, 512, 16, 128, 512)
SMALL = Size(48, 16, 4, 8, 96)


def main() -> None:
    """Run one stage."""
    options = parse_arguments()
    clock = Clock(options.minutes)
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    size = SMALL if options.small else PAPER
    workspace = make_workspace(options, size)
    say(clock, f"workspace of {size.records} records, {size.worlds} worlds, base {workspace.base.name}")
    facts: dict[str, Any] = {}
    for name in options.train:
        workspace, training = train(workspace, name, options.worlds_per_step, clock)
        if name == "worlds" and training is not None:
            facts["training"] = training
    lab = make_lab(workspace, options, clock)
    write_log(options, {"device": device_name(lab), **facts})
    for name in chosen_regimes(options):
        write_log(options, regimes={name: attempt(lab, name, options, clock)})
    if options.stage in (1, 2) and options.only != [] and options.test_text is None:
        save_fixture(lab, options)
    say(clock, "done")


def parse_arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), required=True)
    parser.add_argument("--corpus", required=True, help="records, one JSON object a line; as `paclm init --corpus`")
    parser.add_argument("--name", help="of the corpus in file names; else from its path")
    parser.add_argument("--base", default="smollm2", help="base model, as `paclm init --base`")
    parser.add_argument(
        "--test-text", type=Path, help="text to score on, into a folder of its own; else held-out records"
    )
    parser.add_argument("--work", type=Path, required=True, help="where workspaces are kept between stages")
    parser.add_argument("--out", type=Path, required=True, help="where results go")
    parser.add_argument(
        "--train", nargs="*", default=["worlds"], help="what to train beforehand, in this order; else the worlds"
    )
    parser.add_argument("--worlds-per-step", type=int, help="of what is trained so; else as many as fit and are quick")
    parser.add_argument("--only", nargs="*", help="these regimes of the stage only; with no name: train and no more")
    parser.add_argument(
        "--cut",
        nargs="*",
        type=parse_cut,
        default=[],
        metavar="NAME=VALUE",
        help="other sizes than the preset's, where a lease is too short: sessions=50; values may be lists: 1,16,64",
    )
    parser.add_argument("--worlds", type=int, help="study the first so many alone, into a folder of its own")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no regime after this")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a rehearsal at the preset quick")
    options = parser.parse_args()
    refuse_unknown_cuts(parser, options)
    options.name = options.name or Path(options.corpus).name.split(".")[0]
    folder = options.name
    if options.test_text is not None:
        folder += f"-on-{options.test_text.name.split('.')[0]}"
    if options.worlds is not None:
        folder += f"-first-{options.worlds}"
    options.out = options.out / folder
    return options


def parse_cut(text: str) -> tuple[str, Any]:
    """`sessions=50`, `repetitions=1,16,64`"""
    name, _, value = text.partition("=")
    try:
        numbers = [json.loads(number) for number in value.split(",")]
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} should read like sessions=50.") from None
    return name, tuple(numbers) if "," in value else numbers[0]


def chosen_regimes(options: argparse.Namespace) -> list[str]:
    """What is run, in order."""
    return list(STAGES[options.stage]) if options.only is None else list(options.only)


def refuse_unknown_cuts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A misspelt cut would be no cut, and cost the lease."""
    scales = [regime_named(name).presets["paper"] for name in chosen_regimes(options)]
    for field, _ in options.cut:
        if not any(hasattr(scale, field) for scale in scales):
            parser.error(f"none of these regimes has a size called {field}")


class Clock:
    """Minutes since the start, and how many there are."""

    def __init__(self, minutes: float) -> None:
        self.began, self.minutes = time.monotonic(), minutes

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether nothing more should begin."""
        return self.seconds > 60.0 * self.minutes


def say(clock: Clock, sentence: str) -> None:
    """One line with the time."""
    print(f"[{clock.seconds:7.1f} s] {sentence}", flush=True)


def make_workspace(options: argparse.Namespace, size: Size) -> Workspace:
    """The workspace of the paper's setup: records from the front of the corpus, held-out ones among them."""
    corpus = read_corpus(options.corpus, ReadOptions())
    wanted = size.records + size.held_out
    if len(corpus.records) < wanted:
        raise SystemExit(f"{options.corpus} holds {len(corpus.records):,} records; {wanted:,} are needed.")
    corpus = replace(corpus, records=corpus.records[:wanted])
    base = resolve_base(options.base)
    created = create_workspace(
        options.work / options.name,
        corpus=corpus,
        base=base,
        tokenizer=load_tokenizer(base),
        num_worlds=size.worlds,
        seed=101,
        holdout=size.held_out,
        num_canaries=size.canaries,
        max_record_tokens=size.record_tokens,
    )
    return created.workspace


def train(
    workspace: Workspace, name: str, worlds_per_step: int | None, clock: Clock
) -> tuple[Workspace, dict[str, Any] | None]:
    """Adapters of this name, as `paclm train --what`, unless they are there."""
    if adapters_file(name) in workspace.manifest.adapters:
        say(clock, f"{name}: trained already")
        return workspace, None
    job = prepare_training(workspace, name)
    said = clock.seconds

    def show(now: Progress) -> None:
        nonlocal said
        if clock.seconds - said > 20.0:
            said = clock.seconds
            say(clock, f"step {now.step} of {now.num_steps}, loss {now.loss:.3f}")

    began = clock.seconds
    workspace, trained = job.run(worlds_per_step, resume=job.is_unfinished, on_progress=show)
    seconds = clock.seconds - began
    tokens = int(job.schedule.num_tokens.sum())
    say(clock, f"{name}: trained {tokens:,} tokens in {seconds:.0f} s: {tokens / seconds:,.0f} tokens/s")
    figures = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "parameters_per_world": trained.stack.num_parameters,
        "loss_public": float(trained.improvement.public.mean()),
        "loss_trained": float(trained.improvement.trained.mean()),
    }
    return workspace, figures


def make_lab(workspace: Workspace, options: argparse.Namespace, clock: Clock) -> Lab:
    """The lab, with the arithmetic that was asked for and test text if there is any."""
    is_gpu = pick_device("auto").type == "cuda"
    runtime = RuntimeConfig(dtype=options.dtype if is_gpu else "float32", prefill_chunk=512 if is_gpu else 128)

    def start(what: str, total: int) -> Advance:
        say(clock, f"  {what}" + (f" ({total:,})" if total else ""))
        return lambda _: None

    passages = None
    if options.test_text is not None:
        from paclm.study.scored_text import read_test_text

        passages = read_test_text(options.test_text, load_tokenizer(base_of(workspace)))
    return Lab(
        workspace,
        seed=options.seed,
        start_task=start,
        runtime=runtime,
        test_text=passages,
        first_worlds=options.worlds,
    )


def attempt(lab: Lab, name: str, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Run a regime; one that fails or has no time left is named, and the others go on."""
    if clock.is_over:
        say(clock, f"{name}: left out, no time")
        return {"left_out": "no time"}
    say(clock, f"{name} ...")
    collections = 2 if name in TWO_COLLECTIONS.get(options.stage, ()) else 1
    regime = regime_named(name)
    preset: Preset = "quick" if options.small else "paper"
    scale = regime.presets[preset]
    scale = replace(scale, **{field: value for field, value in options.cut if hasattr(scale, field)})
    try:
        result = run_regime(lab, regime, preset, collections, scale)
        folder = options.out / "results"
        folder.mkdir(parents=True, exist_ok=True)  # again: a machine that is lent may have emptied it meanwhile
        result.save(folder)
        sentences = regime.describe(result)
    except Exception as error:  # a lease is short: whatever failed, the rest must still run
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    for sentence in sentences:
        say(clock, f"  {sentence}")
    return {"seconds": result.seconds, "rows": len(result.rows)}


def save_fixture(lab: Lab, options: argparse.Namespace) -> None:
    """A few thousand positions of real votes, renamed to small integers, for tests of mechanisms; once."""
    if (options.out / "votes-greedy.npz").is_file():
        return
    votes = lab.text_votes(FIXTURE_POSITIONS, (GREEDY, GUMBEL))
    for decoder, found in votes.items():
        columns = {name: getattr(found.recorded, name) for name in ("votes", "truth", "public", "full")}
        _, index = np.unique(np.concatenate([column.ravel() for column in columns.values()]), return_inverse=True)
        ends = np.cumsum([column.size for column in columns.values()])
        parts = np.split(index.astype(np.uint16), ends[:-1])
        arrays = {name: part.reshape(columns[name].shape) for name, part in zip(columns, parts, strict=True)}
        np.savez_compressed(options.out / f"votes-{decoder}.npz", allow_pickle=False, **arrays)


def write_log(options: argparse.Namespace, facts: Mapping[str, Any] = {}, regimes: Mapping[str, Any] = {}) -> None:
    """What ran, how long, and what did not; adds to what other goes of this stage, also at the same time, have left."""
    with (options.out / f"stage-{options.stage}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        log: dict[str, Any] = json.loads(file.read() or "null") or {
            "stage": options.stage,
            "corpus": options.name,
            "regimes": {},
        }
        log |= facts
        log["regimes"] |= regimes
        file.truncate(0)
        file.write(json.dumps(log, indent=2) + "\n")


if __name__ == "__main__":
    main()
