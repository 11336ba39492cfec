"""Find settings for `paclm demo` on made-up hospitals: what worlds agree on, what adapters gain, what a release keeps.

    python tools/tiny/tune_demo.py --hospitals 100 101 --notes 150 --worlds 16 --learning-rate 1e-3 2e-3 --epochs 1 2
    python tools/tiny/tune_demo.py --hospitals 100 --base RUN      # another base model than the shipped one

For every setting of the grid and every hospital it makes a workspace as the demo does, trains it with the product's own
engine, and prints one JSON line; with several hospitals, one more with the means. In single precision on every device,
as the demo on a CPU. Needs torch, transformers, tokenizers, safetensors, numpy and scipy only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from paclm.config import RuntimeConfig, TrainingConfig, parse_budget
from paclm.engine.base_model import load_tokenizer, resolve_base
from paclm.engine.training_job import prepare_training
from paclm.study.decoding import GREEDY
from paclm.study.eval_text import Passage
from paclm.study.lab import Lab
from paclm.study.questions import ALL, Question
from paclm.study.recorded_votes import RecordedVotes
from paclm.study.regimes.knowledge import KnowledgeScale
from paclm.study.regimes.knowledge import run as run_knowledge
from paclm.study.replay import ReplaySettings, replay
from paclm.worlds.blocks import encode_texts
from paclm.worlds.clinic import generate_notes, house_questions
from paclm.worlds.creation import create_workspace
from paclm.worlds.fingerprints import Base
from paclm.worlds.records import Corpus, ReadOptions, SourceRow, collect_records
from paclm.worlds.settings import write_settings
from paclm.worlds.workspace import Workspace

GRID = {"notes": int, "worlds": int, "rank": int, "alpha": float, "learning_rate": float, "weight_decay": float}
GRID |= {"batch_size": int, "epochs": int, "block_tokens": int, "targets": str}
"""Options of which several values can be given; all but the first two are those of [training]."""

DEFAULTS = {"notes": 90, "worlds": 16, "learning_rate": 0.002, "batch_size": 2, "epochs": 1}


def settings_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination of the values given."""
    given = {name: values for name in GRID if (values := getattr(args, name)) is not None}
    for values in itertools.product(*given.values()):
        yield dict(zip(given, values, strict=True))


def notes_of(hospital: int, num_notes: int) -> Corpus:
    """The notes of a hospital as `clinic:N` reads those of the private one."""
    rows = (SourceRow(f"hospital-{hospital}:{note['id']}", dict(note)) for note in generate_notes(num_notes, hospital))
    options = ReadOptions(group_by="patient")
    return collect_records(f"hospital-{hospital}:{num_notes}", rows, options, is_synthetic=True)


def train(folder: Path, base: Base, hospital: int, setting: dict[str, Any], dtype: str) -> Workspace:
    """A workspace with its worlds and the full-corpus adapter trained."""
    training = dict(setting)
    corpus = notes_of(hospital, training.pop("notes"))
    num_worlds = training.pop("worlds")
    workspace = create_workspace(
        folder, corpus=corpus, base=base, tokenizer=load_tokenizer(base), num_worlds=num_worlds, group_by="patient"
    ).workspace
    write_settings(workspace.settings.path, "training", training)
    workspace = Workspace.open(folder)
    for what in ("worlds", "full"):
        workspace, _ = prepare_training(workspace, what, dtype=dtype).run()
    return workspace


def more_notes(hospital: int, num_notes: int, num_more: int, tokenizer: Any) -> list[Passage] | None:
    """Further notes of other patients of this hospital, for figures with less chance in them; None: not wanted."""
    if not num_more:
        return None
    notes = list(generate_notes(num_notes + num_more, hospital))
    known = {note["patient"] for note in notes[:num_notes]}
    texts = [note["text"] for note in notes[num_notes:] if note["patient"] not in known]
    return [Passage.of(tokens) for tokens in encode_texts(tokenizer, texts)]


def figures_of(recorded: RecordedVotes, per_token: float) -> dict[str, Any]:
    """What the demo prints about accuracy."""

    def run(release: str) -> dict[str, Any]:
        return replay(recorded, ReplaySettings(release=release, per_token=per_token, protocol="fresh", sessions=8))

    private, plurality = run("gaussian"), run("plurality")
    names = ("positions", "unanimity", "accuracy_public", "accuracy_full", "accuracy_noiseless", "accuracy")
    return {
        **{name: private[name] for name in names},
        "accuracy_plurality": plurality["accuracy"],
        "gain_points": 100 * (private["accuracy_full"] - private["accuracy_public"]),
        "retained_gain": private["retained_gain"],
    }


def recall_of(lab: Lab, num_questions: int, per_token: float) -> dict[str, Any]:
    """Exact match of house knowledge."""
    rows = run_knowledge(lab, KnowledgeScale(num_questions, 16, budgets=(per_token,), examples=0)).rows
    overall = [row for row in rows if row["part"] == "score" and row["kind"] == ALL]
    wanted = ("public", "gaussian", "plurality", "full")
    return {f"recall_{row['release']}": row["exact_match"] for row in overall if row["release"] in wanted}


def measure(base: Base, hospital: int, setting: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one setting on one hospital."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        workspace = train(Path(folder) / "workspace", base, hospital, setting, args.dtype)
        trained = time.monotonic()
        test_text = more_notes(hospital, setting["notes"], args.more_notes, load_tokenizer(base))
        questions = [Question(**one) for one in house_questions(hospital)]
        lab = Lab(workspace, runtime=RuntimeConfig(dtype="float32"), test_text=test_text, questions=questions)
        recorded = lab.text_votes(args.held_out_tokens, (GREEDY,))[GREEDY.name]
        found = figures_of(recorded, parse_budget(args.per_token))
        if args.questions:
            found |= recall_of(lab, args.questions, parse_budget(args.per_token))
        lab.release_engine()
    seconds = {"training_seconds": trained - began, "voting_seconds": time.monotonic() - trained}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in (found | seconds).items()}


def mean_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure; what is retained is the share of the mean gain."""
    found = {name: round(mean(row[name] for row in rows), 4) for name in rows[0] if name != "retained_gain"}
    gain = found["accuracy_full"] - found["accuracy_public"]
    kept = (found["accuracy"] - found["accuracy_public"]) / gain if gain > 0 else None
    return found | {"retained_gain": None if kept is None else round(kept, 4)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hospitals", type=int, nargs="+", default=[100], help="seeds; 100 to 199 are for tuning")
    parser.add_argument("--held-out-tokens", type=int, default=2000)
    parser.add_argument("--more-notes", type=int, default=0, help="score these instead of the ones held out")
    parser.add_argument("--questions", type=int, default=0, help="also measure recall of house knowledge")
    parser.add_argument("--dtype", default="float32", help="of training; a CPU trains faster in bfloat16")
    parser.add_argument("--per-token", default="2^-16")
    parser.add_argument("--base", default="tiny", help="or a folder, such as that of a training run")
    for name, kind in GRID.items():
        default = [DEFAULTS[name]] if name in DEFAULTS else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+", default=default)
    return parser.parse_args()


def main() -> None:
    """Measure every setting on every hospital, one JSON line each."""
    args = parse_args()
    base = resolve_base(args.base)
    for setting in settings_of(args):
        TrainingConfig(**{name: value for name, value in setting.items() if name not in ("notes", "worlds")})
    for setting in settings_of(args):
        rows = []
        for hospital in args.hospitals:
            rows.append(measure(base, hospital, setting, args))
            print(json.dumps({"hospital": hospital, **setting, **rows[-1]}), flush=True)
        if len(rows) > 1:
            print(json.dumps({"hospital": "mean", **setting, **mean_of(rows)}), flush=True)


if __name__ == "__main__":
    main()
