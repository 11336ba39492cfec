"""Training of 32 worlds by one process and by two that share the groups, with one core each.

    one process     rank 0 alone                       its core
    two workers     rank 0 and `paclm worker`          a core each

Both begin when all processes have loaded their models: starting takes as long for any corpus. The adapters must be the
same, bit for bit. Contenders take turns, medians are compared; run it on an idle machine, whose load is printed.

Run: python bench/bench_training_workers.py [--worlds 32] [--records 32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parent)]

from harness import control, median, print_table, spread  # noqa: E402
from paclm.engine.adapters import AdapterStack  # noqa: E402
from paclm.engine.launch import start_workers  # noqa: E402
from paclm.engine.training_job import prepare_training  # noqa: E402
from paclm.engine.training_queue import GroupQueue  # noqa: E402
from paclm.worlds.workspace import Workspace  # noqa: E402

GOAL = 1.7


class Clock:
    """Lets all ranks take their first group at the same time, and measures from there to the last."""

    def __init__(self, ranks: int) -> None:
        self.ready = threading.Barrier(ranks, action=self._begin)
        self.began = self.ended = 0.0
        self.groups: dict[str, int] = {}
        self._here = threading.local()
        self._take, self._finish = GroupQueue.take, GroupQueue.finish

    def _begin(self) -> None:
        self.began = time.perf_counter()

    def take(self, queue: GroupQueue) -> int | None:
        if not getattr(self._here, "began", False):
            self._here.began = True
            self.ready.wait(300)
        return self._take(queue)

    def finish(self, queue: GroupQueue, number: int, done: object) -> None:
        self._finish(queue, number, done)  # type: ignore[arg-type]
        self.ended = time.perf_counter()
        name = "rank 0" if threading.current_thread() is threading.main_thread() else "worker"
        self.groups[name] = self.groups.get(name, 0) + 1


def train(workspace: Path, workers: int) -> tuple[float, float, dict[str, int]]:
    """Seconds from the first group to the last, seconds in all, and how many groups each rank trained."""
    began, clock = time.perf_counter(), Clock(workers)
    methods = {"take": lambda queue: clock.take(queue), "finish": lambda *given: clock.finish(*given)}
    with patch.multiple(GroupQueue, **methods):
        job = prepare_training(Workspace.open(workspace), dtype="float32", workers=workers, processes=workers)
        if workers == 1:
            job.run(2)
        else:
            with start_workers(workspace, workers, timeout=60.0) as group:
                job.run(2, group=group)
    return clock.ended - clock.began, time.perf_counter() - began, clock.groups


def make_workspace(folder: Path, worlds: int, records: int) -> Path:
    path = folder / "clinic"
    command = [sys.executable, "-m", "paclm", "init", str(path), "--corpus", f"clinic:{records}", "--base", "tiny"]
    subprocess.run([*command, "--worlds", str(worlds)], check=True, capture_output=True)
    settings = path / "paclm.toml"
    for name, value in {"epochs": "1", "learning_rate": "0.002"}.items():
        settings.write_text(re.sub(rf"(?m)^#? *{name} = .*$", f"{name} = {value}", settings.read_text(), count=1))
    assert Workspace.open(path).training.epochs == 1
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before")
    seconds: dict[str, list[float]] = {"control": [], "one process": [], "two workers": []}
    whole: dict[str, list[float]] = {"one process": [], "two workers": []}
    with tempfile.TemporaryDirectory() as folder:
        template = make_workspace(Path(folder), options.worlds, options.records)
        for number in range(options.rounds):
            stacks = []
            for workers, name in ((1, "one process"), (2, "two workers")):
                path = Path(folder) / f"{number}-{workers}"
                shutil.copytree(template, path)
                began = time.perf_counter()
                control()
                seconds["control"].append(time.perf_counter() - began)
                inside, in_all, groups = train(path, workers)
                seconds[name].append(inside)
                whole[name].append(in_all)
                stacks.append(AdapterStack.load(path / "adapters" / "worlds.safetensors").hashes())
                print(
                    f"  round {number + 1}, {name}: {inside:.1f} s, in all {in_all:.1f} s, groups {groups}, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
            if stacks[0] != stacks[1]:
                raise SystemExit("Two workers trained other adapters than one process.")
    rows = [
        [name, f"{median(seconds[name]):.1f} s", spread(seconds[name]), f"{median(whole[name]):.1f} s"]
        for name in whole
    ]
    title = f"Training of {options.worlds} worlds on {options.records} records, one thread each"
    print_table(title, ["way", "training", "spread", "with start"], rows)
    ratios = [one / two for one, two in zip(seconds["one process"], seconds["two workers"], strict=True)]
    rounds = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"  {median(ratios):.2f} times as fast with two (goal {GOAL}); rounds {rounds}")
    print(f"  the same adapters, bit for bit; control spread {spread(seconds['control'])}")


if __name__ == "__main__":
    main()
