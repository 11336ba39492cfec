"""How long `paclm init` takes on 50,000 records, step by step, and how much memory it needs.

Run: python bench/bench_init.py [--records 50000] [--worlds 128] [--base tiny]
     python bench/bench_init.py --records 1000000 --characters 1000     1 GB of made-up text instead of clinic notes
     python bench/bench_init.py --records 1000000 --characters 10000    10 GB; needs 40 GB in --folder
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--worlds", type=int, default=128)
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--characters", type=int, help="records of random words of about this length")
    parser.add_argument("--folder", type=Path, help="where everything is written; default: of temporary files")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.base, options.worlds)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        needed = 4 * options.records * (options.characters or 1000)  # the file, the records while read, the workspace
        if (free := shutil.disk_usage(folder).free) < needed:
            raise SystemExit(f"{folder} has {free / 1e9:.0f} GB free and {needed / 1e9:.0f} GB are needed.")
        notes = made_up_notes(options.records, options.characters) if options.characters else None
        num_bytes = write_notes(folder / "notes.jsonl", options.records, notes)
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
    in_all = sum(figures["seconds"].values()) - figures["seconds"]["open again"]
    print(f"  {'records per second':<28} {options.records / in_all:7.0f}")
    print(f"  {'peak memory':<28} {figures['peak_mb']:7.0f} MB (of it {figures['imported_mb']:.0f} MB before reading)")


def write_notes(path: Path, num_records: int, notes: Iterator[dict[str, str]] | None) -> int:
    from paclm.worlds.clinic import generate_notes

    with path.open("w", encoding="utf-8") as file:
        rows = notes or generate_notes(num_records, seed=1)
        file.writelines(json.dumps(note, ensure_ascii=False) + "\n" for note in rows)
    return path.stat().st_size


def made_up_notes(num_records: int, characters: int) -> Iterator[dict[str, str]]:
    """Records of sentences of random words, one patient in two records."""
    draw = random.Random(1)
    syllables = ["ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(5000)]
    sentences = [" ".join(draw.choices(words, k=12)) + ". " for _ in range(100_000)]
    per_record = max(1, round(characters * len(sentences) / sum(map(len, sentences))))
    for number in range(num_records):
        text = f"Note {number}. " + "".join(draw.choices(sentences, k=per_record))
        yield {"id": f"n{number}", "text": text, "patient": f"p{number // 2}"}


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
    corpus = read_corpus(str(folder / "notes.jsonl"), ReadOptions(group_by="patient"), folder=folder)
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
