"""Worlds on several worker processes that share one GPU: step times, the same votes, the exchange, a killed worker.

    PYTHONPATH=src python3 tools/gpu/bench_workers.py --out results --base SmolLM2-135M.gguf [--seconds 290]
    PYTHONPATH=src python3 tools/gpu/bench_workers.py --out results --base tiny --device cpu --small    (a rehearsal)

Random adapters of rank 8 in all layers, and in the upper half. Sections: `one` (a single process by worlds, streams and
context), `workers` (the same work on 2 and 4 ranks), `exchange` (ranks that compute nothing), `killed`. Processes take
turns on one GPU, so `workers` shows what sharing costs and that votes agree, never a gain. Writes results.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch

from exchange import exchange_of, idle_group
from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack, find_targets
from paclm.engine.base_model import load_tokenizer, resolve_base
from paclm.engine.engine import Engine
from paclm.engine.kv_cache import PAGES
from paclm.engine.loading import build_step, load_base, load_stack, open_engine, resolve_runtime
from paclm.engine.memory import GIB, token_bytes
from paclm.engine.worker import run_worker
from paclm.engine.workers import WorkerGroup
from paclm.worlds.creation import create_workspace
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.records import ReadOptions, SourceRow, collect_records
from paclm.worlds.workspace import Workspace
from sections import Clock, attempt, run_sections, tidy

SUPPORT, PROMPT, STEPS = 200, 45, 30
SPREAD = 0.02  # of the adapters' B


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    worlds: tuple[int, ...] = (128, 64, 32, 16)
    streams: tuple[int, ...] = (1, 16, 100)
    contexts: tuple[int, ...] = (96, 512)
    workers: tuple[int, ...] = (2, 4)
    ranks: tuple[int, ...] = (2, 4, 8)
    exchanges: int = 400


SMALL = Plan((8, 4), (1, 4), (48, 64), (2, 4), (2,), 50)


@dataclass(frozen=True)
class Bench:
    """Workspaces of the same base, by the layers of their adapters."""

    plan: Plan
    device: str
    workspaces: dict[str, Workspace]
    config: Any  # of the base model

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    def bytes_of_token(self, rows: int, trunk: int) -> int:
        return token_bytes(self.config, rows, getattr(torch, self.dtype), trunk)

    def runtime(self, streams: int, context: int, rows: int, trunk: int) -> RuntimeConfig:
        """Room for so many streams on a rank of so many rows, and no more: several share the GPU."""
        pages = streams * -(-(context + STEPS) // PAGES[self.device]) + 2
        return RuntimeConfig(
            device=self.device,  # type: ignore[arg-type]
            dtype=self.dtype,  # type: ignore[arg-type]
            max_sequences=max(self.plan.streams),
            context=min(2 * max(self.plan.contexts), int(self.config.max_position_embeddings)),
            cache_gib=pages * PAGES[self.device] * self.bytes_of_token(rows, trunk) / GIB,
            threads=1 if self.device == "cpu" else 0,
        )


def make_workspaces(folder: Path, base_name: str, worlds: int) -> dict[str, Workspace]:
    """Random adapters over a few made-up notes."""
    base = resolve_base(base_name)
    rows = (SourceRow(f"n:{i}", {"text": f"Note {i}: a cough of {i % 9} days."}) for i in range(1, 201))
    corpus, found = collect_records("notes", rows, ReadOptions()), {}
    for name, top in (("all", None), ("upper half", 0)):
        made = create_workspace(
            folder / name.replace(" ", "-"),
            corpus=corpus,
            base=base,
            tokenizer=load_tokenizer(base),
            num_worlds=worlds,
            holdout=4,
            num_canaries=0,
        ).workspace
        model = load_base(made, RuntimeConfig(device="cpu"))
        spec = AdapterSpec(top=None if top is None else model.config.num_hidden_layers // 2)
        start = AdapterStack.initial(find_targets(model, spec), spec, worlds, 3, base.fingerprint, coupled=False)
        generator = torch.Generator().manual_seed(5)
        B = {layer: torch.empty_like(b).normal_(0.0, SPREAD, generator=generator) for layer, b in start.B.items()}
        AdapterStack(spec, base.fingerprint, start.A, B).save(made.adapters_path / WORLDS_FILE)
        found[name] = made.with_adapters(WORLDS_FILE)
    return found


# --- one process ------------------------------------------------------------------------------------------------------


def step_times(engine: Engine, streams: int, context: int, is_read: bool = True) -> dict[str, float]:
    """Milliseconds of steps whose context is the one given in the middle; not read: noise in the cache is as good."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, engine.vocabulary, context - STEPS // 2).tolist() for _ in range(streams)]
    handles, coins = [engine.add(prompt, STEPS) for prompt in prompts], generator.gumbel(size=(streams, SUPPORT))
    if not is_read:
        engine._waiting.clear()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step(handles, coins)
        times.append(1e3 * (time.perf_counter() - begun))
        for handle in handles:
            engine.append(handle, 7)
    engine.clear()
    return {"ms": float(np.median(times[3:])), "p90": float(np.quantile(times[3:], 0.9))}


def prompt_ms(engine: Engine, device: str) -> float:
    """Milliseconds to read one prompt; the first times record and compile."""
    times = []
    for seed in range(8):
        handle = engine.add(np.random.default_rng(seed).integers(0, engine.vocabulary, PROMPT).tolist(), 1)
        begun = time.perf_counter()
        while not engine.is_ready(handle):
            engine.prefill()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
        engine.remove(handle)
    return float(np.median(times[3:]))


def all_times(bench: Bench, engine: Engine, clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {f"prompt of {PROMPT}, ms": attempt(prompt_ms, engine, bench.device)}
    for context in bench.plan.contexts:
        for wanted in bench.plan.streams:
            streams = min(wanted, engine.num_together(context + STEPS))
            label = f"{streams} streams, context {context}"
            is_out = clock.is_out(5)
            found[label] = "skipped: out of time" if is_out else attempt(step_times, engine, streams, context, False)
    return found


def section_one(bench: Bench, clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, workspace in bench.workspaces.items():
        whole = load_stack(workspace)
        for worlds in bench.plan.worlds:
            tidy()
            if clock.is_out(15):
                found[f"{name}, m = {worlds}"] = "skipped: out of time"
                continue
            engine = attempt(one_engine, bench, workspace, whole, worlds)
            done = engine if isinstance(engine, str) else all_times(bench, engine, clock)
            found[f"{name}, m = {worlds}"] = done
            print(name, worlds, done, flush=True)
            del engine
    return found


def one_engine(bench: Bench, workspace: Workspace, whole: AdapterStack, worlds: int) -> Engine:
    """Room for all streams at the long context, or as many as the GPU holds; the cache is full of noise."""
    stack = whole.worlds(slice(worlds))
    free = torch.cuda.mem_get_info()[0] if bench.device == "cuda" else 4 * GIB
    longest = max(bench.plan.contexts)
    of_stream = bench.bytes_of_token(stack.num_rows, stack.trunk) * (longest + STEPS + PAGES[bench.device])
    streams = max(1, min(max(bench.plan.streams), int(0.85 * free / of_stream)))
    runtime = bench.runtime(streams, longest, stack.num_rows, stack.trunk)
    runtime = resolve_runtime(runtime, bench.config.max_position_embeddings)
    model, step, plan = build_step(load_base(workspace, runtime), stack, runtime, SUPPORT)
    for tensor in (*model.cache.keys, *model.cache.values):  # type: ignore[attr-defined]
        tensor.normal_(0.0, 0.5)
    return Engine(model, SUPPORT, runtime.prefill_chunk, step, runtime.max_sequences, plan)


# --- workers ----------------------------------------------------------------------------------------------------------


@contextmanager
def group_of(workspace: Workspace, count: int, timeout: float = 30.0) -> Iterator[WorkerGroup]:
    """Workers by this script: `paclm worker` needs more packages than a GPU's machine may have."""

    def start(rank: int, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--worker", str(workspace.path), "--rank", str(rank), "--address", address]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    announce: Callable[[Any], None] = lambda news: print(news, flush=True)  # noqa: E731
    with WorkerGroup(count, start=start, timeout=timeout, announce=announce) as group:
        yield group


def work(path: Path, rank: int, address: str) -> None:
    host, _, port = address.rpartition(":")
    run_worker(Workspace.open(path), rank, host, int(port))


VOTE_STEPS = 20


def votes_of(engine: Engine, forced: Any = None, with_logits: bool = False) -> dict[str, Any]:
    """Votes on prompts that are really read; forced: the tokens to go on with, so that runs stay on one text."""
    generator = np.random.default_rng(0)
    streams = min(8, engine.max_sequences)
    prompts = [generator.integers(0, engine.vocabulary, 24).tolist() for _ in range(streams)]
    handles = [engine.add(prompt, VOTE_STEPS) for prompt in prompts]
    votes, public, logits, supports, drawn = [], [], [], [], []
    for step in range(VOTE_STEPS):
        coins = generator.gumbel(size=(streams, SUPPORT))
        ballot = engine.step(handles, coins)
        votes.append(ballot.votes)
        public.append(ballot.public)
        if with_logits:
            support, scores = engine.scores(handles)
            supports.append(support.cpu().numpy())
            logits.append(scores.float().cpu().numpy()[:, :-1])
            drawn.append(coins)
        for handle, token in zip(handles, (public if forced is None else forced)[step], strict=True):
            engine.append(handle, int(token))
    engine.clear()
    found = {"votes": np.stack(votes), "public": np.stack(public)}
    return found | ({"logits": logits, "supports": supports, "coins": drawn} if with_logits else {})


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Votes that differ, and by how much the single process preferred its own: near ties are far below 1."""
    gaps = []
    for step, row, world in np.argwhere(one["votes"] != other["votes"]):
        scores = one["logits"][step][row, world] + one["coins"][step][row]
        place = {int(token): number for number, token in enumerate(one["supports"][step][row])}
        pair = [place.get(int(found["votes"][step, row, world])) for found in (one, other)]
        gaps.append(float("inf") if None in pair else float(scores[pair[0]] - scores[pair[1]]))
    return {
        "votes": int(one["votes"].size),
        "differing": len(gaps),
        "public votes differing": int((one["public"] != other["public"]).sum()),
        "preference of one process": {"median": float(np.median(gaps)), "largest": max(gaps)} if gaps else {},
        "not near ties (above 0.1)": sum(gap > 0.1 for gap in gaps),
    }


def shared_runtime(bench: Bench, workspace: Workspace, ranks: int) -> RuntimeConfig:
    """For each of so many ranks on one GPU: the short context of all streams."""
    stack = load_stack(workspace)
    rows = -(-stack.num_worlds // ranks) + 1
    return bench.runtime(max(bench.plan.streams), min(bench.plan.contexts), rows, stack.trunk)


def section_workers(bench: Bench, clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, workspace in bench.workspaces.items():
        tidy()
        engine = open_engine(workspace, SUPPORT, shared_runtime(bench, workspace, 1))
        one = votes_of(engine, with_logits=True)
        found[f"{name}, 1 process"] = times_at(bench, engine)
        again = votes_of(engine, one["public"])
        found[f"{name}, 1 process"]["again, differing votes"] = int((again["votes"] != one["votes"]).sum())
        del engine
        for count in bench.plan.workers:
            tidy()
            label = f"{name}, {count} workers"
            is_out = clock.is_out(25)
            found[label] = "skipped: out of time" if is_out else attempt(with_workers, bench, workspace, count, one)
            print(label, found[label], flush=True)
    return found


def times_at(bench: Bench, engine: Engine) -> dict[str, Any]:
    context = min(bench.plan.contexts)
    return {f"{n} streams, context {context}": attempt(step_times, engine, n, context) for n in bench.plan.streams}


def with_workers(bench: Bench, workspace: Workspace, count: int, one: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    with group_of(workspace, count) as group:
        engine = open_engine(workspace, SUPPORT, shared_runtime(bench, workspace, count), workers=group)
        opened = time.perf_counter() - begun
        return {
            "opened, s": opened,
            **differences(one, votes_of(engine, one["public"])),
            **times_at(bench, engine),
            "cache of a rank, GiB": shared_runtime(bench, workspace, count).cache_gib,
        }


def section_exchange(bench: Bench, clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {"load": os.getloadavg()}
    for ranks in bench.plan.ranks:
        if clock.is_out(8):
            break
        with idle_group(ranks, 128, SUPPORT) as step:
            for streams in bench.plan.streams:
                run = exchange_of(step, streams, SUPPORT, 96)
                times = [_seconds(run) for _ in range(bench.plan.exchanges)][20:]
                found[f"{ranks} ranks, {streams} streams"] = {
                    "ms": 1e3 * float(np.median(times)),
                    "p90": 1e3 * float(np.quantile(times, 0.9)),
                }
    return found


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


# --- a killed worker --------------------------------------------------------------------------------------------------


def section_killed(bench: Bench, clock: Clock) -> dict[str, Any]:
    """kill -9 while a step is in flight, twice; seconds until it is noticed, loaded again, read again."""
    workspace, count = bench.workspaces["all"], bench.plan.workers[0]
    streams, context = bench.plan.streams[1], min(bench.plan.contexts)
    found: dict[str, Any] = {"streams": streams, "context": context}
    with group_of(workspace, count) as group:
        engine = open_engine(workspace, SUPPORT, shared_runtime(bench, workspace, count), workers=group)
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, engine.vocabulary, context - 8).tolist() for _ in range(streams)]
        handles = [engine.add(prompt, 16) for prompt in prompts]
        coins = generator.gumbel(size=(streams, SUPPORT))
        for turn in (1, 2):
            before = engine.step(handles, coins)
            found[f"turn {turn}"] = killed_step(engine, group, handles, coins) | {
                "differing votes": int((engine.step(handles, coins).votes != before.votes).sum())
            }
    return found


def killed_step(engine: Engine, group: WorkerGroup, handles: list[int], coins: Any) -> dict[str, float]:
    marks: dict[str, float] = {}
    kept = {name: getattr(group, name) for name in ("restore", "_connect")}

    def restore() -> None:
        marks["noticed"] = time.perf_counter()
        kept["restore"]()
        marks["back"] = time.perf_counter()

    def connect(ranks: Any) -> None:
        kept["_connect"](ranks)
        marks["come"] = time.perf_counter()

    group.restore, group._connect = restore, connect  # type: ignore[method-assign]
    try:
        engine.launch(handles, coins)
        os.kill(group._processes[1].pid, signal.SIGKILL)
        begun = time.perf_counter()
        engine.collect()
        ended = time.perf_counter()
    finally:
        group.restore, group._connect = kept["restore"], kept["_connect"]  # type: ignore[method-assign]
    return {
        "noticed, s": marks["noticed"] - begun,
        "process started, s": marks["come"] - marks["noticed"],
        "loaded and proved, s": marks["back"] - marks["come"],
        "read again and the step, s": ended - marks["back"],
        "in all, s": ended - begun,
    }


def main() -> None:
    """Run the sections asked for, in order, until the time is up."""
    sections = {"one": section_one, "workers": section_workers, "exchange": section_exchange, "killed": section_killed}
    parser = argparse.ArgumentParser(description="Worlds on several worker processes that share one GPU.")
    parser.add_argument("--out", type=Path, help="folder for results.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench-workers"), help="folder for two workspaces")
    parser.add_argument("--base", default="smollm2", help=".gguf file, folder or name of the base model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="few worlds and streams: a rehearsal")
    parser.add_argument("--sections", default="exchange,one,workers,killed", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=290.0, help="stop starting things after this long")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.rank, options.address)
        return
    if options.out is None:
        parser.error("--out is needed")
    clock = Clock(time.monotonic() + options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PACLM_STATE_DIR"] = str(options.work / "state")
    plan = SMALL if options.small else Plan()
    begun = time.monotonic()
    workspaces = make_workspaces(options.work, options.base, max(plan.worlds))
    config = load_base(workspaces["all"], RuntimeConfig(device="cpu")).config
    bench = Bench(plan, options.device, workspaces, config)
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "base": options.base,
        "workspaces made, s": time.monotonic() - begun,
    }
    chosen = options.sections.split(",")
    run_sections(
        {name: lambda clock, run=run: run(bench, clock) for name, run in sections.items()},
        chosen,
        clock,
        options.out,
        facts,
    )


if __name__ == "__main__":
    main()
