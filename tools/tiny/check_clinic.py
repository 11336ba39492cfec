"""Measure what the synthetic notes teach `tiny`: gain of a full-corpus adapter and dissent, on held-out notes.

    python tools/tiny/check_clinic.py --notes 800 --held-out 200 --worlds 32  # a minute on a GPU, half an hour on a CPU

Trains with the product's own engine and settings. Needs torch, transformers, tokenizers, safetensors and numpy only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paclm.engine.base_model import load_tokenizer, resolve_base
from paclm.engine.loading import load_stack, open_engine
from paclm.engine.training_job import prepare_training
from paclm.worlds.blocks import encode_texts
from paclm.worlds.creation import create_workspace
from paclm.worlds.readers import read_corpus
from paclm.worlds.records import ReadOptions
from paclm.worlds.workspace import Workspace


def trained_workspace(folder: Path, args: argparse.Namespace) -> Workspace:
    """A workspace over the notes with its worlds and the full-corpus adapter trained."""
    base = resolve_base("tiny")
    workspace = create_workspace(
        folder,
        corpus=read_corpus(f"clinic:{args.notes}", ReadOptions()),
        base=base,
        tokenizer=load_tokenizer(base),
        num_worlds=args.worlds,
        holdout=args.held_out,
    ).workspace
    for what in ("worlds", "full"):
        began = time.monotonic()
        workspace, _ = prepare_training(workspace, what).run()
        print(f"trained {what} in {time.monotonic() - began:.0f} s", flush=True)
    return workspace


def held_out_figures(workspace: Workspace, device: str) -> dict[str, float]:
    """Greedy next-token accuracy and dissent on every position of the held-out notes."""
    runtime = replace(workspace.runtime, device=device, max_sequences=1)
    engine = open_engine(workspace, 200, runtime, load_stack(workspace, with_full=True))
    texts = [record.text for record in workspace.records("heldout")]
    truth, public, votes = [], [], []
    for tokens in encode_texts(load_tokenizer(workspace.base), texts):
        for ballot in engine.teacher_forced(tokens, engine.context):
            public.append(ballot.public)
            votes.append(ballot.votes)
        truth.append(tokens[1:])
    every, wanted = np.concatenate(votes), np.concatenate([np.asarray(tokens) for tokens in truth])
    worlds, full = every[:, :-1], every[:, -1]
    accuracy_public = float((np.concatenate(public) == wanted).mean())
    accuracy_full = float((full == wanted).mean())
    return {
        "positions": int(wanted.size),
        "accuracy_public": accuracy_public,
        "accuracy_full": accuracy_full,
        "accuracy_world": float((worlds == wanted[:, None]).mean()),
        "gain_points": 100 * (accuracy_full - accuracy_public),
        "dissent": float((worlds != worlds[:, :1]).any(axis=1).mean()),
    }


def main() -> None:
    """Train, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=800, help="including the held-out ones")
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--vote-device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = held_out_figures(trained_workspace(Path(folder) / "workspace", args), args.vote_device)
    print(json.dumps({"notes": args.notes - args.held_out, "worlds": args.worlds, **figures}, indent=1))


if __name__ == "__main__":
    main()
