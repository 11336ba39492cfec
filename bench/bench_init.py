"""How long `paclm init` takes on 50,000 records, step by step, and how much memory it needs.

Run: python bench/bench_init.py [--records 50000] [--worlds 128] [--base tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--worlds", type=int, default=128)
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.base, options.worlds)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        num_bytes = write_notes(folder / "notes.jsonl", options.records)
        # A process of its own: the generator's memory must not count.
        command = [sys.executable, __file__, "--measure", temporary, "--base", options.base]
        own_state = {**os.environ, "PACLM_STATE_DIR": str(folder / "state")}
        done = subprocess.run(
            [*command, "--worlds", str(options.worlds)], env=own_state, check=True, stdout=subprocess.PIPE, text=True
        )
    figures = json.loads(done.stdout)
    print(f"paclm init: {options.records:,} records, {num_bytes / 1e6:.0f} MB of JSONL, {options.worlds} worlds")
    for name, seconds in figures["seconds"].items():
        print(f"  {name:<28} {seconds:7.2f} s")
    print(f"  {'init in all':<28} {sum(figures['seconds'].values()) - figures['seconds']['open again']:7.2f} s")
    print(f"  {'peak memory':<28} {figures['peak_mb']:7.0f} MB (of it {figures['imported_mb']:.0f} MB before reading)")


def write_notes(path: Path, num_records: int) -> int:
    from paclm.worlds.clinic import generate_notes

    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(note, ensure_ascii=False) + "\n" for note in generate_notes(num_records, seed=1))
    return path.stat().st_size


def measure(folder: Path, base_name: str, num_worlds: int) -> dict[str, object]:
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name], clock = now - clock, now

    from paclm.engine.base_model import load_tokenizer, resolve_base
    from paclm.worlds.creation import create_workspace
    from paclm.worlds.readers import read_corpus
    from paclm.worlds.records import ReadOptions
    from paclm.worlds.workspace import Workspace

    base = resolve_base(base_name)
    tokenizer = load_tokenizer(base)
    lap("imports, base, tokenizer")
    imported = peak_mb()
    corpus = read_corpus(str(folder / "notes.jsonl"), ReadOptions(group_by="patient"))
    lap("read")
    create_workspace(
        folder / "clinic",
        corpus=corpus,
        base=base,
        tokenizer=tokenizer,
        num_worlds=num_worlds,
        group_by="patient",
    )
    lap("tokenize, assign, write")
    Workspace.open(folder / "clinic").membership.sum()
    lap("open again")
    return {"seconds": seconds, "peak_mb": peak_mb(), "imported_mb": imported}


def peak_mb() -> float:
    per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * per_unit / 1e6


if __name__ == "__main__":
    main()
