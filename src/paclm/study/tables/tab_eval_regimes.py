"""`tab:eval-regimes`: what was run, at which scale, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paclm.config import format_budget
from paclm.study.regimes import NAMES, regime_named
from paclm.study.results import Result
from paclm.study.table import Table, TableData

_MOST = 8
"""Longer lists are shown by their ends."""


def build(results: Mapping[str, Result]) -> TableData:
    """One line per regime that was run."""
    lines = []
    for name in NAMES:
        if name not in results:
            continue
        regime, result = regime_named(name), results[name]
        taken = f"{result.seconds:,.0f} s"
        lines.append((regime.title, scale_in_words(result.scale), _paper_scale(regime.presets), taken, regime.question))
    return TableData(
        "Regimes that were run. Trials draw a fresh realized world and fresh noise.",
        ["regime", "scale here", "scale of the preset paper", "time", "question"],
        lines,
    )


def scale_in_words(scale: Mapping[str, Any]) -> str:
    """A scale as a short list: positions 2,048, draws 8."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in scale.items() if value is not None)


def _paper_scale(presets: Mapping[Any, Any]) -> str:
    return scale_in_words(asdict(presets["paper"]))


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = list(value) if len(value) <= _MOST else [*value[:2], "…", value[-1]]
        return " / ".join(_value(inner) for inner in shown)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        written = format_budget(value) if value > 0 else f"{value:g}"
        return written if written.startswith("2^") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


TABLE = Table("tab:eval-regimes", (), build)
