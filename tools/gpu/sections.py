"""Sections of a benchmark, one after another within a time limit, and their results as JSON."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Clock:
    """A time limit: no section starts after it."""

    deadline: float

    def is_out(self, needed: float = 0.0) -> bool:
        return time.monotonic() + needed > self.deadline


def attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """The figure, or the error in its place, so that a table shows failures too."""
    try:
        return run(*arguments)
    except Exception as error:
        with suppress(Exception):  # after a fault in a kernel every call fails, this one too
            torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:300]}"


def tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run_sections(
    sections: Mapping[str, Callable[[Clock], Any]], names: Sequence[str], clock: Clock, out: Path, facts: dict[str, Any]
) -> None:
    """Run these sections in order until the time is up; results.json is written after each."""
    results = dict(facts)
    for name in names:
        begun = time.monotonic()
        try:
            tidy()
            results[name] = "skipped: out of time" if clock.is_out() else sections[name](clock)
        except Exception:  # the next section must run; the failure is in the results
            results[name] = traceback.format_exc()
        results[f"{name}, seconds"] = round(time.monotonic() - begun, 1)
        (out / "results.json").write_text(json.dumps(results, indent=1, default=str, ensure_ascii=False))
        print(f"== {name} ({results[f'{name}, seconds']} s)", flush=True)
        print(json.dumps(rounded(results[name]), indent=1, default=str, ensure_ascii=False), flush=True)


def rounded(found: Any) -> Any:
    """Round every number to four significant digits."""
    if isinstance(found, dict):
        return {key: rounded(value) for key, value in found.items()}
    return float(f"{found:.4g}") if isinstance(found, float) else found
