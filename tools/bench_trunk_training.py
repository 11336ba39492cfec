"""Wall and CPU time of `paclm train` by which layers carry adapters, with and without stored states of the trunk.

    python tools/bench_trunk_training.py [--layers top:4] [--rounds 3] [--threads 1]

`tiny`, 16 worlds on 230 synthetic clinic notes with the settings of the demo, bfloat16. Every training is a process of
its own, loading included; the ways take turns. On a busy machine compare CPU times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAIN = "from paclm.cli.main import main; main()"
UNSTORED = f"""
from paclm.engine import training, training_plan
training.choose_place = training_plan.choose_place = lambda *_: None
{PLAIN}
"""
SETTINGS = {"learning_rate": "0.002", "batch_size": "2", "epochs": "1"}


def paclm(code: str, *arguments: object) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"paclm {arguments[0]} failed.")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


def configure(path: Path, **settings: object) -> None:
    lines = (path / "paclm.toml").read_text().splitlines()
    section = ""
    for i, line in enumerate(lines):
        section = line if line.startswith("[") else section
        name = line.removeprefix("# ").partition(" = ")[0]
        if name in settings and section == ("[runtime]" if name == "threads" else "[training]"):
            lines[i] = f"{name} = {settings[name]}"
    (path / "paclm.toml").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", default="top:4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--notes", type=int, default=230)
    options = parser.parse_args()
    ways = {"all": ("all", PLAIN), options.layers: (options.layers, PLAIN)}
    ways[f"{options.layers}, trunk computed in every step"] = (options.layers, UNSTORED)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes"
        init = ("--corpus", f"clinic:{options.notes}", "--base", "tiny", "--worlds", 16, "--group-by", "patient")
        paclm(PLAIN, "init", path, *init)
        for number in range(options.rounds):
            for name, (layers, code) in ways.items():
                configure(path, **SETTINGS, layers=f'"{layers}"', threads=options.threads)
                seconds[name].append(paclm(code, "train", path, "--again", "--dtype", "bfloat16"))
                wall, cpu = seconds[name][-1]
                print(f"round {number + 1}: {name:<40} {wall:7.1f} s wall {cpu:7.1f} s CPU", flush=True)
    base = statistics.median(cpu for _, cpu in seconds["all"])
    print("\n| layers | wall | CPU | against all |\n|---|---:|---:|---:|")
    for name, times in seconds.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"| {name} | {wall:.0f} s | {cpu:.0f} s | {base / cpu:.2f} × |")


if __name__ == "__main__":
    main()
