"""One figure of a result row as text: value, standard error, and the paper's value beside it. Knows no regime."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from paclm.privacy.bounds import round_up
from paclm.study.results import Row, Value


@dataclass(frozen=True, slots=True)
class Cell:
    """One value, its standard error, and the paper's value for the same quantity."""

    value: Value
    stderr: float | None = None
    paper: Value = None
    style: str = ".4g"  # number format such as .1% or .4f, used for all three
    mark: str = ""  # a sign after the value, explained in the notes: † …
    is_bound: bool = False
    """An upper bound on an attack. Ours is rounded up and has one decimal more than the paper's, which stays as
    printed: with the same decimals a bound just above 0.5 would read 0.501."""

    def ours(self) -> str:
        """Our value with its error."""
        if self.is_bound and isinstance(self.value, float):
            text = round_up(self.value, int(self.style[1:-1]) + 1) + self.mark
        else:
            text = _written(self.value, self.style) + self.mark
        if self.stderr is None or not math.isfinite(self.stderr):
            return text
        return f"{text} ± {_written(self.stderr, self.style.lstrip('+'))}"

    def theirs(self) -> str:
        """The paper's value, or nothing."""
        return "" if self.paper is None else _written(self.paper, self.style)


class Column(NamedTuple):
    """A column of a table, or a line of a table of quantities: its heading and which values of a row it shows."""

    heading: str
    value: str
    """`name`, `name ± error`, or `name ±` where the error is called `name_stderr`. A text with fields, such as
    "{budget}, {decoder}", is filled in from the row and becomes a label; `{of_collection}` names the second and
    later collections of worlds."""
    style: str = ".4g"
    is_bound: bool = False
    mark: str = ""  # a sign, and the column that decides whether it is shown: "† is_stopped"

    def cell(self, row: Row, paper: Row | None = None) -> Cell | str:
        """The cell of a row, with the paper's values for that row."""
        if "{" in self.value:
            return write_label(self.value, row)
        sign, _, flag = self.mark.partition(" ")
        mark = sign if row.get(flag) else ""
        return replace(make_cell(row, self.value, self.style, paper), mark=mark, is_bound=self.is_bound)


def write_label(text: str, row: Row) -> str:
    """A text with its fields filled in from a row; what the row does not have is a dash."""
    number = row.get("collection", 1)
    fields = {name: "–" if value is None else value for name, value in row.items()}
    return text.format_map(fields | {"of_collection": f", collection {number}" if number != 1 else ""})


def make_cell(row: Row, value: str, style: str, paper: Row | None = None) -> Cell:
    """A value of a row with its error, `value` as in `Column`, and the paper's."""
    name, has_error, error = (part.strip() for part in value.partition("±"))
    stderr = row.get(error or f"{name}_stderr") if has_error else None
    return Cell(row.get(name), stderr, (paper or {}).get(name), style)


def _written(value: Value, style: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not style.endswith("%"):
        return f"{value:,}"
    return value if isinstance(value, str) else format(value, style)
