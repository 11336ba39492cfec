"""The paper's evaluation at full scale on one GPU, in stages of at most 25 minutes.

    python tools/gpu/paper_run.py --corpus wikipedia.jsonl.xz --base smollm2 --work ~/paper --out results
    python tools/gpu/paper_run.py --stage 1 --corpus wikipedia.jsonl.xz --base smollm2 --work ~/paper --out results

The first command runs all stages of a corpus, each in a process of its own; after a stop, repeat it. Stages are
independent: each makes the workspace and trains the worlds unless `--work` holds them already, runs its regimes at the
preset `paper`, and writes small result files (JSON; no weights, no text) into a folder of `--out` that is named after
the corpus and laid out as `paclm study report` reads it. A stopped stage continues with the same command and the same
code. Finished regimes are kept, unless `--again`. A regime that would start `--minutes` after the start of its stage is
left out, and the stage file says so. Needs torch, transformers, numpy, scipy and safetensors only. On two cores
`--size small` is a rehearsal in minutes, and `--size cpu --base tiny` an evaluation of the embedded base in hours.

Votes need a GPU; most figures are computed from votes. `--votes` takes them and stops, and `--from-votes` computes,
where `--work` and `--out` were copied to without the adapters, what needs nothing but votes.

| stage | what |
|---|---|
| 1 | arithmetic, accuracy, census, flatness, releases, forgetting, tokens-only attacker, cost, quorum, temperature |
| 2 | sessions, sweep, generation, ablation, canaries |
| 3 | PMixED and its neighbours |
| 4 | number of worlds, coupled against uncoupled training, universe audit, capacity, chosen prompts, other text |
| 5 | with `--collection 2`, `3` …: the same records in other worlds, drawn and trained anew |
| 6 | adapted layers and rank: fewer records and worlds, in a workspace of their own; minutes |
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np

from paclm.config import RuntimeConfig
from paclm.engine.base_model import base_of, load_tokenizer, resolve_base
from paclm.engine.loading import pick_device
from paclm.engine.training_job import membership_of, prepare_training
from paclm.engine.training_queue import Progress
from paclm.errors import InvalidInput, PaclmError
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.lab import Advance, Lab
from paclm.study.parts import Kept
from paclm.study.regime import Preset
from paclm.study.regimes import regime_named
from paclm.study.regimes.temperature import LADDER, decoding_at
from paclm.study.results import Result
from paclm.study.run import device_name, run_regime
from paclm.worlds.creation import create_workspace
from paclm.worlds.layout import adapters_file
from paclm.worlds.manifest import verify_files
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions
from paclm.worlds.storage import write_private_arrays, write_private_json
from paclm.worlds.workspace import Workspace
from paper_options import Size, chosen_regimes, needs_worlds, parse_arguments, size_of, whole

FIXTURE_POSITIONS = 4096


def main() -> None:
    """Run one stage; report an error of paclm as one line."""
    options = parse_arguments(__doc__)
    if options.stage is None:
        run_all(options)
        return
    try:
        failed = run_stage(options)
    except PaclmError as error:
        sys.exit(f"Error: {error}")
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        sys.exit(f"Error: {what}. Fix that and repeat the command: the stage continues where it stopped.")
    if failed:
        sys.exit(f"Not finished: {', '.join(failed)}. Repeat the command to run them.")


def run_all(options: argparse.Namespace) -> None:
    """Every stage in a process of its own; ends with the minutes of each, and with an error if any is unfinished."""
    lines, unfinished = [], []
    for stage, collection in whole(options):
        name = f"stage {stage}" + (f", collection {collection}" if collection > 1 else "")
        print(f"== {name}", flush=True)
        own = ["--stage", str(stage), "--collection", str(collection)]
        began = time.monotonic()
        status = subprocess.run([sys.executable, __file__, *sys.argv[1:], *own], check=False).returncode
        if status:
            unfinished.append(name)
        lines.append(f"{name}: {(time.monotonic() - began) / 60:.1f} minutes{', not finished' if status else ''}")
    print("\n".join(lines))
    if unfinished:
        sys.exit(f"Not finished: {'; '.join(unfinished)}. Repeat the command: it continues where it stopped.")


def run_stage(options: argparse.Namespace) -> list[str]:
    """Train what is missing, run the regimes, and return the names of those that failed."""
    clock = Clock(options.minutes)
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    size = size_of(options)
    if options.size == "paper" and pick_device("auto").type != "cuda":
        say(clock, "There is no GPU: at this size a stage takes days on a CPU. For two cores: --size cpu --base tiny")
    if options.from_votes:
        workspace = Workspace.open_for_worker(options.work / options.workspace)  # without adapters
        verify_files(workspace.path, workspace.manifest)
    else:
        workspace = make_workspace(options, size)
        refuse_training(workspace, options.train, runs=needs_worlds(options))
    say(clock, f"workspace of {size.records} records, {size.worlds} worlds, base {workspace.base.name}")
    facts: dict[str, Any] = {}
    for name in options.train:
        workspace, training = train(workspace, name, options.worlds_per_step, clock)
        if name == "worlds" and training is not None:
            facts["training"] = training
    lab = make_lab(workspace, options, clock)
    write_log(options, {"device": device_name(lab), **facts})
    if options.votes:
        take_votes(lab, options)
        say(clock, "done")
        return []
    tried = {}
    for name in chosen_regimes(options):
        tried[name] = attempt(lab, name, options, clock)
        write_log(options, regimes={name: tried[name]})
    if options.stage == 1 and options.only != [] and options.test_text is None and not options.from_votes:
        save_fixture(lab, options)
    failed = [name for name, what in tried.items() if not {"failed", "left_out"}.isdisjoint(what)]
    say(clock, "ended" if failed else "done")
    return failed


def refuse_training(workspace: Workspace, names: Sequence[str], *, runs: bool) -> None:
    """Refuse, before hours of work, names that cannot be trained and regimes whose worlds would be missing."""
    for name in names:
        membership_of(workspace, name)
    if runs and "worlds" not in names and adapters_file("worlds") not in workspace.manifest.adapters:
        raise InvalidInput(f"{workspace.path} holds no trained worlds. Leave out --train, or name worlds after it.")


class Clock:
    """Minutes since the start, and the limit."""

    def __init__(self, minutes: float) -> None:
        self.began, self.minutes = time.monotonic(), minutes

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return self.seconds > 60.0 * self.minutes


def say(clock: Clock, sentence: str) -> None:
    """Print one line with the time."""
    print(f"[{clock.seconds:7.1f} s] {sentence}", flush=True)


def make_workspace(options: argparse.Namespace, size: Size) -> Workspace:
    """The workspace of the paper's setup: records from the front of the corpus, held-out ones included."""
    corpus = read_corpus(options.corpus, ReadOptions())
    wanted = size.records + size.held_out
    if len(corpus.records) < wanted:
        raise SystemExit(f"{options.corpus} holds {len(corpus.records):,} records; {wanted:,} are needed.")
    corpus = replace(corpus, records=corpus.records[:wanted])
    base = resolve_base(options.base)
    created = create_workspace(
        options.work / options.workspace,
        corpus=corpus,
        base=base,
        tokenizer=load_tokenizer(base),
        num_worlds=size.worlds,
        seed=100 + options.collection,
        holdout=size.held_out,
        num_canaries=size.canaries,
        max_record_tokens=size.record_tokens,
    )
    return created.workspace


def train(
    workspace: Workspace, name: str, worlds_per_step: int | None, clock: Clock
) -> tuple[Workspace, dict[str, Any] | None]:
    """Train adapters of this name, as `paclm train --what`, unless they exist."""
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
    """The lab, with the chosen dtype and the test text, if any."""
    is_gpu = pick_device("auto").type == "cuda"
    runtime = RuntimeConfig(dtype=options.dtype if is_gpu else "float32", prefill_chunk=512 if is_gpu else 128)

    def start(what: str, total: int) -> Advance:
        say(clock, f"  {what}" + (f" ({total:,})" if total else ""))
        return lambda _: None

    from paclm.study.eval_text import read_test_text

    paths = {"test_text": options.test_text, "public_text": options.public_text}
    given = {name: path for name, path in paths.items() if path is not None}
    tokenizer = load_tokenizer(base_of(workspace)) if given else None
    texts = {name: read_test_text(path, tokenizer) for name, path in given.items()}
    return Lab(
        workspace,
        seed=options.seed,
        start_task=start,
        runtime=runtime,
        **texts,
        first_worlds=options.worlds,
        kept=Kept(options.again),
        votes_from=device_of_votes(options) if options.from_votes else None,
    )


def device_of_votes(options: argparse.Namespace) -> str:
    """Where the votes of this stage were taken."""
    if "device" not in (log := read_log(options)):
        raise InvalidInput(f"{options.out} has no log of stage {options.stage}. Take its votes first, with --votes.")
    return str(log["device"])


def take_votes(lab: Lab, options: argparse.Namespace) -> None:
    """Votes of both decoders and the temperatures between them at as many positions as the chosen regimes score.

    They are megabytes, and on any machine `--from-votes` computes from them what would keep a GPU waiting.
    """
    scales = [scale_of(name, options) for name in chosen_regimes(options)]
    positions = max(getattr(scale, "positions", 0) for scale in scales)
    draws = max(getattr(scale, "gumbel_draws", 1) for scale in scales)
    lab.text_votes(positions, [decoding_at(temperature).times(draws) for temperature in LADDER])
    lab.text_votes(positions, (GREEDY, GUMBEL.times(draws)))  # other votes only if positions are drawn several times


def attempt(lab: Lab, name: str, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Run a regime unless it is done; a failure or lack of time is recorded, and the others still run."""
    regime, folder = regime_named(name), options.out / "results"
    preset, scale = preset_of(options), scale_of(name, options)
    give_controls(lab, name, options)
    made_from = lab.parts(name, [asdict(scale), preset]).key
    before = read_log(options)["regimes"].get(name, {})
    if before.get("made_from") == made_from and is_of(folder / f"{name}.json", before) and not options.again:
        say(clock, f"{name}: done already")
        return dict(before)
    if clock.is_over:
        say(clock, f"{name}: left out, no time")
        return {"left_out": "no time"}
    say(clock, f"{name} ...")
    try:
        result = run_regime(lab, regime, preset, 1, scale)
        folder.mkdir(parents=True, exist_ok=True)  # again: a rented machine may have emptied it meanwhile
        result.save(folder)
        summary = regime.summary(result)
    except OSError:
        raise  # results cannot be kept: computing more would be wasted
    except Exception as error:  # GPU time is short: the other regimes must still run
        if isinstance(error, PaclmError):
            say(clock, f"{name}: failed. {error}")
        else:
            traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    for line in summary:
        say(clock, f"  {line}")
    return {"seconds": result.seconds, "rows": len(result.rows), "made_from": made_from}


def give_controls(lab: Lab, name: str, options: argparse.Namespace) -> None:
    """Text to train controls on: records of the corpus that the workspace does not hold, and those of --other-text.

    Other regimes get none: what they keep would depend on it.
    """
    lab.spare_text = lab.other_text = None
    if name == "controls":
        size = size_of(options)
        rest = read_corpus(options.corpus, ReadOptions()).records[size.records + size.held_out :]
        lab.spare_text = [record.text for record in rest[: size.records]]
        if options.other_text is not None:
            lab.other_text = [record.text for record in read_corpus(str(options.other_text), ReadOptions()).records]


def is_of(path: Path, logged: Mapping[str, Any]) -> bool:
    """Whether this is the logged result: another stage may have replaced it."""
    try:
        return path.is_file() and Result.load(path).seconds == logged["seconds"]
    except InvalidInput:
        return False


def preset_of(options: argparse.Namespace) -> Preset:
    """The sizes that cuts are made from."""
    return "quick" if options.size == "small" else "paper"


def scale_of(name: str, options: argparse.Namespace) -> Any:
    """The sizes of a regime."""
    return cut_scale(regime_named(name).presets[preset_of(options)], options.cut)


def cut_scale(scale: Any, cuts: Sequence[tuple[str, Any]]) -> Any:
    """The sizes of a preset with the cuts applied; one number for a list is a list of one."""
    sizes = {field: value for field, value in cuts if hasattr(scale, field)}
    lists = {field: (value,) for field, value in sizes.items() if isinstance(getattr(scale, field), tuple)}
    return replace(scale, **{f: lists[f] if f in lists and not isinstance(v, tuple) else v for f, v in sizes.items()})


def save_fixture(lab: Lab, options: argparse.Namespace) -> None:
    """A few thousand positions of real votes, renamed to small integers, for tests of mechanisms; once."""
    decodings = (GREEDY, GUMBEL)
    if all((options.out / f"votes-{decoding.name}.npz").is_file() for decoding in decodings):
        return
    votes = lab.text_votes(FIXTURE_POSITIONS, decodings)
    for decoder, found in votes.items():
        columns = {name: getattr(found, name) for name in ("votes", "truth", "public", "full")}
        _, index = np.unique(np.concatenate([column.ravel() for column in columns.values()]), return_inverse=True)
        ends = np.cumsum([column.size for column in columns.values()])
        parts = np.split(index.astype(np.uint16), ends[:-1])
        arrays = {name: part.reshape(columns[name].shape) for name, part in zip(columns, parts, strict=True)}
        write_private_arrays(options.out / f"votes-{decoder}.npz", **arrays)


def read_log(options: argparse.Namespace) -> dict[str, Any]:
    """The log of earlier runs of this stage."""
    path = options.out / f"stage-{options.stage}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8") or "null") if path.is_file() else None
    return found or {"stage": options.stage, "corpus": options.name, "regimes": {}}


def write_log(options: argparse.Namespace, facts: Mapping[str, Any] = {}, regimes: Mapping[str, Any] = {}) -> None:
    """Record what ran, for how long, and what did not; merges with concurrent runs of this stage."""
    with (options.out / ".stages.lock").open("a") as lock:  # the log is replaced atomically
        fcntl.flock(lock, fcntl.LOCK_EX)
        log = {**read_log(options), **facts}
        log["regimes"] |= regimes
        write_private_json(options.out / f"stage-{options.stage}.json", log)


if __name__ == "__main__":
    main()
