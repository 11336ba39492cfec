"""Answers held to JSON schemas beside free ones, in turns: how many are valid and right, and what masks cost.

The same prompts are answered twice by the same curator: the 50 schemas of tests/structured, each with its schema in the
prompt, and notes from which three facts are to be read. "mask" is all that a grammar adds in the curator's process for
one token: following the released token and finding the next mask. Worlds have small random adapters: speed does not
depend on training, and what is right is the base model's merit.

Run: python bench/bench_structured.py [--base tiny|smollm2] [--worlds 16] [--streams 16] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from curator.deployments import build_workspace  # noqa: E402
from harness import median, print_table  # noqa: E402
from paclm.curator.curator import Curator  # noqa: E402
from paclm.curator.grammar import GrammarState  # noqa: E402
from paclm.engine.base_model import locate_base  # noqa: E402
from structured.schemas import SCHEMAS  # noqa: E402

SETTINGS = """[mechanism]
per_token = "2^-32"
total = 0.01
charge = "dissent"
[runtime]
device = "cpu"
max_sequences = {streams}
context = 512
"""
WARDS, ILLNESSES = ("north", "south", "east", "west"), ("asthma", "measles", "gout", "anaemia", "bronchitis")
FACTS = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "ward": {"type": "string"}, "illness": {"type": "string"}},
    "required": ["age", "ward", "illness"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """One prompt; `facts` are what a right answer holds."""

    prompt: str
    schema: dict[str, Any]
    facts: dict[str, Any] | None = None


@dataclass
class Outcome:
    """One way to answer, summed over rounds."""

    seconds: list[float] = field(default_factory=list)  # per token, one figure a step of a full batch
    masks: list[float] = field(default_factory=list)  # seconds, one figure a token
    answers: int = 0
    complete: int = 0
    valid: int = 0
    asked_facts: int = 0
    right_facts: int = 0
    tokens: int = 0
    dissent: int = 0


def questions() -> list[Question]:
    """The 50 schemas, then 20 notes."""
    found = [
        Question(
            f"Write one JSON value that this schema accepts.\n{json.dumps(case.schema)[:500]}\nJSON:\n", case.schema
        )
        for case in SCHEMAS
    ]
    for number in range(20):
        facts = {
            "age": 21 + 3 * number,
            "ward": WARDS[number % len(WARDS)],
            "illness": ILLNESSES[number % len(ILLNESSES)],
        }
        note = (
            f"A patient of {facts['age']} years was brought to the {facts['ward']} ward with {facts['illness']}. "
            "Write age, ward and illness as JSON.\n"
        )
        example = '{"age": 7, "ward": "upper", "illness": "mumps"}'
        lead = "A patient of 7 years was brought to the upper ward with mumps. Write age, ward and illness as JSON.\n"
        found.append(Question(f"{lead}{example}\n\n{note}", FACTS, facts))
    return found


@contextmanager
def timed_masks(into: list[float]) -> Iterator[None]:
    """Note how long each call of `GrammarState.advance` takes."""
    plain = GrammarState.advance

    def advance(self: GrammarState, token: int) -> None:
        started = time.perf_counter()
        plain(self, token)
        into.append(time.perf_counter() - started)

    GrammarState.advance = advance  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrammarState.advance = plain  # type: ignore[method-assign]


def answer(curator: Curator, asked: list[Question], is_held: bool, limit: int, batch: int, into: Outcome) -> None:
    """All questions once, as many side by side as the engine has room for."""
    masks: list[float] = []
    with timed_masks(masks):
        streams = [
            curator.submit(curator.request(one.prompt, limit, greedy=True, json_schema=one.schema if is_held else None))
            for one in asked
        ]
        while any(stream.finish_reason is None for stream in streams):
            started = time.perf_counter()
            if len(curator.step()) == batch:  # else prompts were read, or answers have ended
                into.seconds.append((time.perf_counter() - started) / batch)
    into.masks += masks
    into.tokens += sum(len(stream.tokens) for stream in streams)
    for one, stream in zip(asked, streams, strict=True):
        into.answers += 1
        into.dissent += stream.marks.count("disputed")
        into.complete += stream.finish_reason == "stop"
        value = read(stream.text, is_held)
        into.valid += is_valid(value, one.schema)
        if one.facts is not None:
            into.asked_facts += len(one.facts)
            into.right_facts += sum(isinstance(value, dict) and value.get(k) == v for k, v in one.facts.items())
        if is_held and stream.finish_reason == "stop" and not is_valid(value, one.schema):
            print(f"NOT VALID: {json.dumps(one.schema)[:200]} {stream.text[:200]!r}")


def read(text: str, is_held: bool) -> Any:
    """The value of an answer; of a free one the first value in it, whatever follows."""
    try:
        return json.loads(text) if is_held else json.JSONDecoder().raw_decode(text.lstrip())[0]
    except ValueError:
        return _NOTHING


_NOTHING = object()


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    return value is not _NOTHING and jsonschema_rs.is_valid(schema, value, validate_formats=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", default="tiny")
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asked, outcomes = questions(), {"free": Outcome(), "held to the schema": Outcome()}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["PACLM_STATE_DIR"] = temporary
        path = Path(temporary) / "clinic"
        texts = [f"Note {number}: the patient reports a cough of {number % 9} days." for number in range(100)]
        build_workspace(path, texts, locate_base(options.base), options.worlds, spread=0.02)
        (path / "paclm.toml").write_text(SETTINGS.format(streams=options.streams))
        with Curator.open(path) as curator:
            for _ in range(options.rounds):
                for name, outcome in outcomes.items():
                    answer(curator, asked, name != "free", options.tokens, options.streams, outcome)
    rows = []
    for name, one in outcomes.items():
        masks = np.array(one.masks or [0.0]) * 1e3
        rows.append(
            [
                name,
                f"{one.complete}/{one.answers}",
                f"{one.valid}/{one.answers}",
                f"{one.right_facts}/{one.asked_facts}",
                f"{one.dissent / one.tokens:.1%}",
                f"{1e3 * median(one.seconds):.2f}",
                f"{np.median(masks):.4f}",
                f"{masks.mean():.4f}",
                f"{np.quantile(masks, 0.99):.3f}",
                f"{masks.max():.2f}",
            ]
        )
    header = [
        *("answers", "complete", "valid", "facts right", "dissent", "ms a token"),
        *("mask ms, median", "mean", "p99", "worst"),
    ]
    title = f"{options.base}, {options.worlds} worlds, {options.streams} streams, greedy, up to {options.tokens} tokens"
    print_table(title, header, rows)
    if options.json:
        options.json.write_text(json.dumps({"title": title, "header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
