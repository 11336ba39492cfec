"""Training of 32 worlds by one process and by two that share the groups, with one core each.

    one process     rank 0 alone                       its core
    two workers     rank 0 and `paclm worker`          a core each

Both begin when all processes have loaded their models: starting takes as long for any corpus. The adapters must be the
same, bit for bit. Contenders take turns, medians are compared. The clock needs an idle machine, whose load is printed.
On a busy one compare the CPU time of the busiest process: what the clock shows where each has a core for itself.

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
        self.pids = [os.getpid()]
        self.groups: dict[str, int] = {}
        self._here = threading.local()
        self._take, self._finish = GroupQueue.take, GroupQueue.finish

    def _begin(self) -> None:
        self.began, self.cpu_before = time.perf_counter(), [cpu_seconds(pid) for pid in self.pids]

    def take(self, queue: GroupQueue) -> int | None:
        if not getattr(self._here, "began", False):
            self._here.began = True
            self.ready.wait(300)
        return self._take(queue)

    def finish(self, queue: GroupQueue, number: int, done: object) -> None:
        name = "rank 0" if threading.current_thread() is threading.main_thread() else "worker"
        self.groups[name] = self.groups.get(name, 0) + 1
        self.seconds = time.perf_counter() - self.began
        after = [cpu_seconds(pid) for pid in self.pids]
        self.busiest = max(now - before for now, before in zip(after, self.cpu_before, strict=True))
        self._finish(queue, number, done)  # type: ignore[arg-type]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def train(workspace: Path, workers: int) -> Clock:
    """Train, and measure it."""
    clock = Clock(workers)
    methods = {"take": lambda queue: clock.take(queue), "finish": lambda *given: clock.finish(*given)}
    with patch.multiple(GroupQueue, **methods):
        job = prepare_training(Workspace.open(workspace), dtype="float32", workers=workers, processes=workers)
        if workers == 1:
            job.run(2)
        else:
            with start_workers(workspace, workers, timeout=60.0) as group:
                group.start()
                clock.pids += [process.pid for process in group._processes.values()]
                job.run(2, group=group)
    return clock


def make_workspace(folder: Path, worlds: int, records: int) -> Path:
    path = folder / "clinic"
    command = [sys.executable, "-m", "paclm", "init", str(path), "--corpus", f"clinic:{records}", "--base", "tiny"]
    subprocess.run([*command, "--worlds", str(worlds)], check=True, capture_output=True)
    settings = path / "paclm.toml"
    for name, value in {
        "epochs": "1",
        "learning_rate": "0.002",
        "block_tokens": "64",
        "max_record_tokens": "64",
    }.items():
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
    busiest: dict[str, list[float]] = {"one process": [], "two workers": []}
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
                clock = train(path, workers)
                seconds[name].append(clock.seconds)
                busiest[name].append(clock.busiest)
                stacks.append(AdapterStack.load(path / "adapters" / "worlds.safetensors").hashes())
                print(f"  {name}: {clock.seconds:.1f} s, CPU {clock.busiest:.1f} s, groups {clock.groups}", flush=True)
            if stacks[0] != stacks[1]:
                raise SystemExit("Two workers trained other adapters than one process.")
    rows = [[name, f"{median(seconds[name]):.1f} s", f"{median(busiest[name]):.1f} s"] for name in busiest]
    title = f"Training of {options.worlds} worlds on {options.records} records, one thread each"
    print_table(title, ["way", "wall", "CPU of the busiest"], rows)
    for what, found in (("by the clock", seconds), ("by CPU time", busiest)):
        ratios = [one / two for one, two in zip(found["one process"], found["two workers"], strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"  {median(ratios):.2f} times as fast with two {what} (goal {GOAL}); rounds {shown}")
    print(f"  the same adapters, bit for bit; control spread {spread(seconds['control'])}")
    print(f"  load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores after")


if __name__ == "__main__":
    main()
