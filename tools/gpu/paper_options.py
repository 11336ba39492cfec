"""The command line of tools/gpu/paper_run.py and its checks; the stages and their sizes.

Everything is checked before GPU time is spent. Knows which regimes and sizes exist; runs none.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paclm.study.regimes import regime_named

STAGES = {
    1: (
        *("precision", "accuracy", "census", "flatness", "releases", "forgetting", "tokens_only", "cost"),
        *("content", "temperature"),
    ),
    2: ("sessions", "sweep", "generation", "ablation", "canaries"),
    3: ("pmixed",),
    4: ("worlds", "coupling", "universe", "capacity", "chosen_prompts", "controls"),
    5: ("accuracy", "census", "flatness", "releases"),
    6: ("depth",),
}
LONG = (
    *("precision", "cost", "sessions", "sweep", "generation", "ablation", "canaries"),
    *("pmixed", "coupling", "universe", "capacity", "depth"),
)
"""What size cpu leaves out unless it is named: text that worlds write, more training, times of a GPU."""
TRAINING = ("depth",)  # regimes that train all of their adapters: the worlds of the workspace are not needed


@dataclass(frozen=True)
class Size:
    """How large the worlds are made."""

    records: int
    held_out: int
    canaries: int
    worlds: int
    record_tokens: int


SIZES = {
    "paper": Size(2048, 512, 16, 128, 512),
    "cpu": Size(1024, 512, 16, 64, 128),  # the embedded base on two cores, in hours
    "small": Size(48, 16, 4, 8, 96),  # a rehearsal on two cores, in minutes
}
OTHERS = {6: Size(512, 256, 0, 32, 512)}  # by stage; in a workspace of their own
PAPER_STAGES = {stage: names for stage, names in STAGES.items() if stage not in OTHERS}
WHOLE = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (5, 3), (6, 1))
"""Stages and collections of a corpus, in order, where no stage is named; size cpu has those without long regimes."""
PARTIAL = ("only", "train", "cut", "worlds", "votes", "from_votes", "again", "worlds_per_step")
"""Options that need a stage."""


def size_of(options: argparse.Namespace) -> Size:
    """The size of the worlds that the options ask for."""
    return OTHERS.get(options.stage, SIZES["paper"]) if options.size == "paper" else SIZES[options.size]


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--stage", type=int, choices=sorted(STAGES), help="one of them; default: all, with three collections of worlds"
    )
    parser.add_argument("--corpus", required=True, help="records, as `paclm init --corpus` reads them")
    parser.add_argument("--name", help="name of the corpus in file names; default: from its path")
    parser.add_argument(
        "--collection", type=int, default=1, help="which draw of the worlds; from 2 on into a separate folder"
    )
    parser.add_argument("--base", default="smollm2", help="base model, as `paclm init --base`")
    parser.add_argument(
        "--test-text", type=Path, help="text to score on, into a separate folder; default: held-out records"
    )
    parser.add_argument(
        "--public-text", type=Path, help="text that is no record and is not scored, for searches; default: no search"
    )
    parser.add_argument(
        "--other-text", type=Path, help="records of another source, for controls; default: the rest of the corpus alone"
    )
    parser.add_argument("--work", type=Path, required=True, help="where workspaces are kept between stages")
    parser.add_argument("--out", type=Path, required=True, help="where results go")
    parser.add_argument(
        "--train",
        nargs="*",
        help="what to train first, in this order; default: the worlds, where a regime needs them; with no name nothing",
    )
    parser.add_argument("--worlds-per-step", type=int, help="worlds trained together; default: as many as fit")
    parser.add_argument("--only", nargs="*", help="only these regimes of the stage; with no name: only train")
    parser.add_argument(
        "--cut",
        nargs="*",
        type=parse_cut,
        default=[],
        metavar="NAME=VALUE",
        help="other sizes than the preset's, where time is short: sessions=50; values may be lists: 1,16,64",
    )
    parser.add_argument("--worlds", type=int, help="study only the first N worlds, into a separate folder")
    parser.add_argument("--votes", action="store_true", help="take the votes that these regimes read, and run none")
    parser.add_argument(
        "--from-votes",
        action="store_true",
        help="on any machine: only from votes that were taken elsewhere; --work and --out as they were there",
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="start no regime after this")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="run finished regimes again, ignoring cached parts")
    parser.add_argument(
        "--size",
        default="paper",
        choices=SIZES,
        help="of records and worlds: cpu is for the embedded base on two cores, small a rehearsal at the preset quick",
    )
    options = parser.parse_args()
    options.name = options.name or Path(options.corpus).name.split(".")[0]
    if options.stage is None:
        if reason := refusal_of_whole(options, parser):
            parser.error(reason)
        return options
    if reason := refusal(options):
        parser.error(reason)
    if options.from_votes:
        options.train = []
    elif options.train is None:
        options.train = ["worlds"] if needs_worlds(options) or options.only == [] else []
    size = size_of(options)
    options.workspace = options.name if size in SIZES.values() else f"{options.name}-of-{size.records}"
    if options.collection > 1:
        options.workspace += f"-collection-{options.collection}"
    folder = options.workspace
    if options.test_text is not None:
        folder += f"-on-{options.test_text.name.split('.')[0]}"
    if options.worlds is not None:
        folder += f"-first-{options.worlds}"
    options.out = options.out / folder
    return options


def whole(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Stages and collections of a corpus that have a regime at this size."""
    return [(stage, which) for stage, which in WHOLE if chosen_regimes(replace_stage(options, stage))]


def replace_stage(options: argparse.Namespace, stage: int) -> argparse.Namespace:
    """The same options for a stage."""
    return argparse.Namespace(**vars(options) | {"stage": stage})


def refusal_of_whole(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str | None:
    """Why these options cannot be run for all stages, or None."""
    for name in (*PARTIAL, "collection"):
        if getattr(options, name) != parser.get_default(name):
            return f"--{name.replace('_', '-')} is for one stage: name it with --stage"
    return refusal(replace_stage(options, WHOLE[0][0]))


def parse_cut(text: str) -> tuple[str, Any]:
    """`sessions=50`, `repetitions=1,16,64`, `designs=` for none"""
    name, equals, value = text.partition("=")
    if equals and not value:
        return name, ()
    try:
        numbers = [json.loads(number) for number in value.split(",")]
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} must look like sessions=50.") from None
    return name, tuple(numbers) if "," in value else numbers[0]


def chosen_regimes(options: argparse.Namespace) -> list[str]:
    """The regimes to run, in order."""
    if options.only is not None:
        return list(options.only)
    return [name for name in STAGES[options.stage] if options.size != "cpu" or name not in LONG]


def needs_worlds(options: argparse.Namespace) -> bool:
    """Whether a chosen regime reads the worlds of the workspace."""
    return any(name not in TRAINING for name in chosen_regimes(options))


def refusal(options: argparse.Namespace) -> str | None:
    """Why these options cannot be run, or None."""
    worlds, per_step, text, own = options.worlds, options.worlds_per_step, options.test_text, STAGES[options.stage]
    public, other = options.public_text, options.other_text
    strangers = [name for name in chosen_regimes(options) if name not in own]
    most = size_of(options).worlds
    rules = [
        (not strangers, f"stage {options.stage} has {', '.join(own)}, and no {', '.join(strangers)}"),
        (re.fullmatch(r"\w[\w .+-]*", options.name), f"--name must be a folder name, not {options.name!r}"),
        (options.collection >= 1, f"--collection must be 1 or more, not {options.collection}"),
        (worlds is None or 2 <= worlds <= most, f"--worlds must be from 2 to {most}, not {worlds}"),
        (per_step is None or per_step >= 1, f"--worlds-per-step must be 1 or more, not {per_step}"),
        (options.minutes >= 0.0, f"--minutes must be 0 or more, not {options.minutes}"),
        (text is None or text.is_file(), f"--test-text {text}: no such file"),
        (not (options.votes and options.from_votes), "--votes takes what --from-votes needs: give one of them"),
        (not (options.train and options.from_votes), "--train needs the machine that took the votes"),
        (public is None or public.is_file(), f"--public-text {public}: no such file"),
        (other is None or other.is_file(), f"--other-text {other}: no such file"),
    ]
    reasons = [reason for is_kept, reason in rules if not is_kept]
    if not reasons:
        scales = [regime_named(name).presets["paper"] for name in chosen_regimes(options)]
        reasons = [reason for cut in options.cut if (reason := refusal_of_cut(scales, *cut))]
    return reasons[0] if reasons else None


def refusal_of_cut(scales: Sequence[Any], field: str, value: Any) -> str | None:
    """Why a cut does not fit these sizes, or None."""
    usual = [getattr(scale, field) for scale in scales if hasattr(scale, field)]
    if not usual:
        return f"--cut {field}: none of these regimes has a size of that name"
    example, is_list = usual[0], isinstance(usual[0], tuple)
    kind = type(example[0] if is_list else example)
    allowed = (int, float) if kind is float else (kind,)
    values = value if isinstance(value, tuple) else (value,)
    if all(type(one) in allowed and (kind is bool or one > 0) for one in values) and (is_list or len(values) == 1):
        return None
    usually = ",".join(map(json.dumps, example if is_list else (example,)))
    return f"--cut {field} must look like {field}={usually}"
