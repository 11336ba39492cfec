"""What a regime is: a question, the scale it is asked at, and a function from the lab to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paclm.study.lab import Lab
from paclm.study.results import Result, Row

Preset = Literal["quick", "paper"]


class Findings(NamedTuple):
    """What a regime's function returns."""

    rows: list[Row]
    notes: list[str]
    """Sentences that a reader of the rows must know: what was cut, what is not comparable."""


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One experiment."""

    name: str
    title: str
    question: str
    """One plain sentence."""
    presets: Mapping[Preset, Any]
    """The scale of each preset: a frozen dataclass of the regime's own."""
    run: Callable[[Lab, Any], Findings]
    """Lab and scale in, rows out. A row is flat; its values are text, numbers, booleans or None."""
    describe: Callable[[Result], list[str]]
    """What the numbers show, in plain sentences made from the rows."""
    for_each_collection: bool = True
    """Whether another collection of worlds gives other rows (they then carry a column `collection`)."""
