"""How soon `paclm generate` prints its first token and how much memory it takes, beside torch alone and `--help`.

The real commands, each in a process of its own, with default settings and as many worlds as the demo has; the adapters
are random. Medians; nothing else should run meanwhile.

Run: python bench/bench_start.py [--worlds 32 --times 3] [--workspace DIR, which pays for the tokens]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from harness import median, print_table, spread  # noqa: E402

PACLM = (sys.executable, "-m", "paclm")
UNIT = 1 if sys.platform == "darwin" else 1024


class Run(NamedTuple):
    """What one command took."""

    first: float  # seconds to its first byte of output
    whole: float
    megabytes: float  # most memory at one time


def measure(command: tuple[str, ...]) -> Run:
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout as output:
        output.read(1)
        first = time.perf_counter() - started
        output.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}.")
    return Run(first, time.perf_counter() - started, used.ru_maxrss * UNIT / 1e6)


def make_workspace(path: Path, num_worlds: int) -> None:
    from curator.deployments import build_workspace
    from paclm.engine.base_model import TINY_FOLDER

    texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(100)]
    build_workspace(path, texts, TINY_FOLDER, num_worlds, spread=0.02)
    (path / "paclm.toml").write_text('[mechanism]\nper_token = "2^-32"\ntotal = "2^-10"\n')


def main() -> None:
    """One row per command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_workspace(options.make, options.worlds)
        return
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PACLM_STATE_DIR"] = temporary
        path = options.workspace or Path(temporary) / "clinic"
        if options.workspace is None:  # in a process of its own: a command starts with the memory of who starts it
            make = [sys.executable, __file__, "--make", str(path), "--worlds", str(options.worlds)]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        request = ("--prompt", "The patient", "--max-tokens", "16")
        commands = {
            "paclm generate, 16 tokens": (*PACLM, "generate", str(path), *request),
            "python, importing torch": (sys.executable, "-c", "import torch; print(torch)"),
            "paclm --help": (*PACLM, "--help"),
        }
        rows = []
        for name, command in commands.items():
            runs = [measure(command) for _ in range(options.times)]
            first, whole, megabytes = map(list, zip(*runs, strict=True))
            figures = (f"{median(first):.2f}", spread(first), f"{median(whole):.2f}", f"{median(megabytes):.0f}")
            rows.append([name, *figures])
    print_table(
        f"Start, median of {options.times}", ["command", "first output, s", "spread", "end, s", "peak memory, MB"], rows
    )


if __name__ == "__main__":
    main()
