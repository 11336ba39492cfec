"""What a regime is: a question, the scale it is asked at, and a function from the lab to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paclm.config import format_budget
from paclm.study.cell import make_cell, write_label
from paclm.study.lab import Lab
from paclm.study.results import Result, Row, Value

Preset = Literal["quick", "paper"]


class Findings(NamedTuple):
    """What a regime's function returns."""

    rows: list[Row]
    notes: list[str]  # sentences that a reader of the rows must know: what was cut, what is not comparable


class Headline(NamedTuple):
    """A figure for the summary of a result: what it is called, which value it shows, and of which rows."""

    name: str  # may name fields of the row, as in "unanimity, {decoder}"
    value: str
    style: str  # as in `Column`
    where: Mapping[str, Value]
    largest: str

    def lines(self, result: Result) -> list[str]:
        """One line per row of the first collection that has a value."""
        rows = result.select(collection=1, **self.where)
        rows = [row for row in rows if row.get(self.value.split()[0]) is not None]
        if self.largest:
            most = max((row[self.largest] for row in rows), default=None)
            rows = [row for row in rows if row[self.largest] == most]
        return [f"{write_label(self.name, row)}: {make_cell(row, self.value, self.style).ours()}" for row in rows]


def headline(name: str, value: str, style: str, *, largest: str = "", **where: Value) -> Headline:
    """A headline of the rows that have these values; `largest`: only those with the largest value of that column."""
    return Headline(name, value, style, where, largest)


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One experiment."""

    name: str
    title: str
    question: str  # one plain sentence
    presets: Mapping[Preset, Any]  # the scale of each preset: a frozen dataclass of the regime's own
    run: Callable[[Lab, Any], Findings]
    """Lab and scale in, rows out. A row is flat; its values are text, numbers, booleans or None."""
    headlines: tuple[Headline, ...] = ()  # the main figures
    in_short: Callable[[Result], list[str]] = lambda result: []
    """Sentences in place of headlines, one line each, where a figure says little without the others of its row."""
    verdicts: Callable[[Result], list[str]] = lambda result: []
    """The tests of the regime, one line each; a test that failed starts with ALARM."""
    for_each_collection: bool = True
    """Whether another collection of worlds gives other rows (they then carry a column `collection`)."""
    tables: tuple[Any, ...] = ()
    """Of a plugin, `Table` each; those of built-in regimes are in `tables.py`. Not typed: an edit of how tables are
    written would otherwise count as an edit of every regime."""
    figures: tuple[Any, ...] = ()
    """Of a plugin, `Figure` each; those of built-in regimes are in `figures.py`."""

    def summary(self, result: Result) -> list[str]:
        """Verdicts, sentences, then headlines, one line each."""
        figures = [line for one in self.headlines for line in one.lines(result)]
        return [*self.verdicts(result), *self.in_short(result), *figures]


def scale_in_words(scale: Mapping[str, Any]) -> str:
    """A scale as a short list: positions 2,048, draws 8."""
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in scale.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({scale_in_words(value)})"
    if isinstance(value, list | tuple):
        shown = list(value) if len(value) <= 8 else [*value[:2], "…", value[-1]]
        return " / ".join(_value(inner) for inner in shown) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        written = format_budget(value) if value > 0 else f"{value:g}"
        return written if written.startswith("2^") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
