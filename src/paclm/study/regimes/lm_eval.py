"""Tasks of lm-eval: what `lm_eval --model paclm --output_path WORKSPACE/study/lm-eval` has measured, as rows.

Reads lm-eval's result files and computes nothing: scores and standard errors are lm-eval's own, over the documents of
a task. Needs no lm-eval. A result that belongs to other worlds than those of the workspace is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paclm.config import format_budget, in_shell
from paclm.errors import InvalidInput
from paclm.study.lab import Lab
from paclm.study.regime import Findings, Regime, headline
from paclm.study.results import Row
from paclm.worlds.layout import WORLDS_FILE

FOLDER = "lm-eval"
"""Of the study's folder: where the result files are looked for, at any depth."""
_SETTINGS = ("temperature", "protocol", "seed")


@dataclass(frozen=True, slots=True)
class LmEvalScale:
    """Nothing to set: the scale is that of the runs of lm_eval."""


def run(lab: Lab, scale: LmEvalScale) -> Findings:
    """One row for each task, metric, filter and source; of equal ones the latest run."""
    folder = lab.folder / FOLDER
    files = sorted(folder.rglob("results_*.json"))
    own = lab.workspace.manifest.adapters[WORLDS_FILE]["sha256"]
    found = [one for one in map(_read, files) if one["config"]["paclm"]["adapters"] == own]
    if not found:
        where = in_shell(folder)
        raise InvalidInput(
            f"There are no results of lm-eval for these worlds in {folder}. Make some, one source at a time: lm_eval "
            f"--model paclm --model_args workspace={in_shell(lab.workspace.path)},release=public --tasks TASK "
            f"--output_path {where}"
        )
    latest: dict[tuple[Any, ...], Row] = {}
    for one in sorted(found, key=lambda one: float(one["date"])):
        for row in _rows(one):
            key = ("task", "metric", "filter", "shots", "source", "per_token_nats", *_SETTINGS)
            latest[tuple(row[name] for name in key)] = row
    notes = ["Standard errors are lm-eval's, over documents. One run is one draw of secrets, noise and coins."]
    if len(found) < len(files):
        notes.append(f"Result files that belong to other worlds and were left out: {len(files) - len(found)}.")
    if limited := sorted({row["source"] for row in latest.values() if row["impossible"]}):
        notes.append(
            f"Some continuations have probability 0 under {', '.join(limited)}, so lm-eval saw log-likelihoods of "
            "−inf; where all choices of a question do, lm-eval takes the first."
        )
    return Findings(sorted(latest.values(), key=lambda row: (row["task"], row["metric"])), notes)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["config"]["paclm"]["adapters"], str) or not isinstance(found["results"], dict):
            raise TypeError
        return found
    except (OSError, ValueError, KeyError, TypeError):
        raise InvalidInput(
            f"{path} is not a result of `lm_eval --model paclm`. Remove it, or run lm_eval again."
        ) from None


def _rows(found: Mapping[str, Any]) -> list[Row]:
    """The rows of one result file."""
    source = found["config"]["paclm"]
    budget = source["per_token_nats"]
    rows: list[Row] = []
    for task, scores in found["results"].items():
        for name, value in scores.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = scores.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": filtered,
                    "source": source["release"],
                    "per_token_nats": budget,
                    "budget": None if budget is None else format_budget(budget),
                    **{setting: source[setting] for setting in _SETTINGS},
                    "shots": found["n-shot"].get(task),
                    "documents": found["n-samples"].get(task, {}).get("effective"),
                    "score": value,
                    "score_stderr": stderr if isinstance(stderr, int | float) else None,
                    "impossible": source.get("impossible_continuations", 0),
                    "continuations": source.get("continuations", 0),
                }
            )
    return rows


REGIME = Regime(
    name="lm_eval",
    title="Tasks of lm-eval",
    question="What do the public model, each release and the full-corpus adapter score on the tasks of lm-eval?",
    presets={"quick": LmEvalScale(), "paper": LmEvalScale()},
    run=run,
    headlines=(headline("{task}, {metric}, {source}, {budget}", "score ±", ".3f"),),
    for_each_collection=False,
)
