"""DP-SGD at full scale on one GPU: settings searched on public text, then accuracy at ε = 1, 2, 4, 8.

    python tools/gpu/dp_run.py noise --units 2048 2064 --out noise.json
    python tools/gpu/dp_run.py search --noise noise.json --train train.jsonl.xz --held-out heldout.jsonl.xz \
        --base smollm2 --out search.json --minutes 9
    python tools/gpu/dp_run.py figures --noise noise.json --corpus wiki wiki/train.jsonl.xz wiki/heldout.jsonl.xz \
        --base smollm2 --work ~/dp --out results --minutes 7 --set learning_rate=0.003 steps=20

`noise` computes σ and what it promises and needs dp_accounting; the other two read its file and need torch,
transformers, numpy, scipy and safetensors only. Both write after every training, stop before `--minutes`, and continue
with the same command. `search` goes from one choice to the next, most telling first, with the best so far; its draws
have a seed, so that runs differ by their settings alone. `figures` trains on all records of a file (and 16 canaries),
scores on the held-out file at the positions of `accuracy`, prints how the public and the full-corpus accuracy compare
with those recorded in docs/research/results, and writes `NAME/dp.json`. `--small` is a rehearsal for a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import dp_figures
import dp_search
from dp_common import make_noise
from paclm.config import DpConfig
from paclm.errors import PaclmError

RATES, STEPS, EPSILONS = (0.5,), (20,), (8.0, 4.0, 2.0, 1.0)


def main() -> None:
    """Run the chosen part; report an error of paclm as one line."""
    options = parse_arguments()
    try:
        {"noise": make_noise, "search": dp_search.search, "figures": dp_figures.figures}[options.part](options)
    except PaclmError as error:
        sys.exit(f"Error: {error}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    noise, trial, final = (parts.add_parser(name) for name in ("noise", "search", "figures"))
    noise.add_argument("--units", type=int, nargs="+", required=True, help="n of the corpora")
    noise.add_argument("--rates", type=float, nargs="+", default=RATES)
    noise.add_argument("--steps", type=int, nargs="+", default=STEPS)
    noise.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    for part in (noise, trial, final):
        part.add_argument("--out", type=Path, required=True)
    for part in (trial, final):
        part.add_argument("--noise", type=Path, required=True, help="what `noise` wrote")
        part.add_argument("--base", default="smollm2", help="base model, as `paclm init --base`")
        part.add_argument("--minutes", type=float, default=9.0, help="start no training that would end after this")
        part.add_argument("--small", action="store_true", help="a rehearsal: few records, short, few steps")
    trial.add_argument("--train", type=Path, required=True, help="public records")
    trial.add_argument("--held-out", type=Path, required=True, help="other public records")
    trial.add_argument("--tokens", type=int, default=256, help="of each record")
    final.add_argument("--corpus", nargs=3, action="append", required=True, metavar=("NAME", "TRAIN", "HELD-OUT"))
    final.add_argument("--work", type=Path, required=True, help="where workspaces and adapters are kept")
    final.add_argument("--repeats", type=int, default=1, help="trainings per ε, as time permits")
    final.add_argument("--set", nargs="*", default=[], type=parse_setting, metavar="NAME=VALUE", help="of [dp]")
    return parser.parse_args()


def parse_setting(text: str) -> tuple[str, Any]:
    """`steps=20`, `factors=B`"""
    name, _, value = text.partition("=")
    if name not in DpConfig.__dataclass_fields__:
        raise argparse.ArgumentTypeError(f"{name} is no setting of [dp]: {', '.join(DpConfig.__dataclass_fields__)}.")
    return name, value if name == "factors" else json.loads(value)


if __name__ == "__main__":
    main()
