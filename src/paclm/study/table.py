"""Tables: cells with our value, its error and the paper's, written as Markdown, CSV and LaTeX. Knows no regime."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paclm.study.results import Result, Value


@dataclass(frozen=True, slots=True)
class Cell:
    """One value, its standard error, and what the paper has in its place."""

    value: Value
    stderr: float | None = None
    paper: Value = None
    style: str = ".4g"
    """How numbers are written: a format such as .1% or .4f, used for all three."""
    mark: str = ""
    """A sign after the value, explained in the notes: † …"""

    def ours(self) -> str:
        """Our value with its error."""
        text = _written(self.value, self.style) + self.mark
        if self.stderr is None or not math.isfinite(self.stderr):
            return text
        return f"{text} ± {_written(self.stderr, self.style)}"

    def theirs(self) -> str:
        """The paper's value, or nothing."""
        return "" if self.paper is None else _written(self.paper, self.style)


@dataclass(frozen=True, slots=True)
class TableData:
    """A table that is ready to be written."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True, slots=True)
class Table:
    """A table by the paper's label (`tab:census`), the regimes it needs, and how it is made from their results."""

    label: str
    regimes: tuple[str, ...]
    build: Callable[[Mapping[str, Result]], TableData]

    @property
    def file_name(self) -> str:
        """The label as a file name."""
        return file_name_of(self.label)


def file_name_of(label: str) -> str:
    """A label of the paper (`tab:census`) as a file name."""
    return label.replace(":", "_").replace("-", "_")


def to_markdown(data: TableData) -> str:
    """A table for people: the paper's values in brackets beside ours."""
    lines = [_line([_escape(column) for column in data.columns]), _line(["---"] * len(data.columns))]
    lines += [_line([_escape(_both(cell)) for cell in row]) for row in data.rows]
    notes = "".join(f"\n{note}\n" for note in data.notes)
    return f"{data.caption}\n\n" + "\n".join(lines) + f"\n{notes}"


def to_csv(data: TableData) -> str:
    """A table for programs: value, error and paper's value in columns of their own, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    wide = [i for i in range(len(data.columns)) if any(isinstance(row[i], Cell) for row in data.rows)]
    writer.writerow(
        [
            name
            for i, c in enumerate(data.columns)
            for name in ([c, f"{c} (error)", f"{c} (paper)"] if i in wide else [c])
        ]
    )
    for row in data.rows:
        fields: list[Value] = []
        for i, cell in enumerate(row):
            if isinstance(cell, Cell):
                fields += [cell.value, cell.stderr, cell.paper]
            else:
                fields += [cell, None, None] if i in wide else [cell]
        writer.writerow(fields)
    return out.getvalue()


def to_latex(data: TableData, label: str) -> str:
    """A table for a paper (booktabs)."""
    body = "\n".join("  " + " & ".join(_tex(_both(cell)) for cell in row) + r" \\" for row in data.rows)
    head = " & ".join(_tex(column) for column in data.columns)
    return (
        "\\begin{table}[t]\n\\centering\n"
        f"\\caption{{{_tex(data.caption)}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{{'l' * len(data.columns)}}}\n\\toprule\n{head} \\\\\n\\midrule\n{body}\n"
        "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
    )


def _both(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell.ours()} [{cell.theirs()}]" if cell.theirs() else cell.ours()


def _written(value: Value, style: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not style.endswith("%"):
        return f"{value:,}"
    return value if isinstance(value, str) else format(value, style)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


_TEX = (
    {sign: f"\\{sign}" for sign in "%&_#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "–": "--", "“": "``", "”": "''", "’": "'", "é": r"\'e"}
    | {
        sign: f"${formula}$"
        for sign, formula in {
            "±": r"\pm", "×": r"\times", "÷": r"\div", "·": r"\cdot", "†": r"^\dagger", "‡": r"^\ddagger",
            "∞": r"\infty", "√": r"\surd", "²": "^2", "³": "^3", "…": r"\dots", "∅": r"\varnothing",
            "α": r"\alpha", "β": r"\beta", "δ": r"\delta", "ε": r"\varepsilon", "λ": r"\lambda", "π": r"\pi",
            "σ": r"\sigma", "τ": r"\tau", "Δ": r"\Delta", "Λ": r"\Lambda", "Σ": r"\Sigma", "Φ": r"\Phi",
            "ā": r"\bar{a}", "−": "-", "≤": r"\le", "≥": r"\ge", "<": "<", ">": ">", "≈": r"\approx", "∝": r"\propto",
            "→": r"\to", "|": r"\mid", "~": r"\sim",
        }.items()
    }
)  # fmt: skip
_POWER = re.compile(r"(\d[\d.]*)(?:\^(-?\d+)|e([+-])0*(\d+))")


def _tex(text: str) -> str:
    """Text as LaTeX reads it; 2^-16 and 1.3e+05 become powers."""
    written, done = "", 0
    for match in _POWER.finditer(text):
        base, power, sign, exponent = match.groups()
        formula = f"{base}^{{{power}}}" if power else f"{base}\\times10^{{{'-' if sign == '-' else ''}{exponent}}}"
        written += _letters(text[done : match.start()]) + f"${formula}$"
        done = match.end()
    return written + _letters(text[done:])


def _letters(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
