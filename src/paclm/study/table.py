"""Tables: cells with our value, its error and the paper's, written as Markdown, CSV and LaTeX. Knows no regime."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paclm.privacy.bounds import round_up
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
    is_bound: bool = False
    """An upper bound on an attack: ours is never written as less than it is (style .3f or the like). It gets a decimal
    more than the paper's, which is as printed there: rounded up, a bound just above even odds would look like 0.501."""

    def ours(self) -> str:
        """Our value with its error."""
        text = (_rounded_up(self.value, self.style) if self.is_bound else _written(self.value, self.style)) + self.mark
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
    """A table for a paper (booktabs); what its signs mean stands below it."""
    body = "".join("  " + " & ".join(_tex(_both(cell)) for cell in row) + " \\\\\n" for row in data.rows)
    head = " & ".join(_tex(column) for column in data.columns)
    notes = "\\par\n".join(_tex(note) for note in data.notes)
    below = f"\\begin{{flushleft}}\n\\footnotesize\n{notes}\n\\end{{flushleft}}\n" if notes else ""
    return (
        "\\begin{table}[t]\n\\centering\n"
        f"\\caption{{{_tex(data.caption)}}}\n\\label{{{label}}}\n"
        f"\\begin{{tabular}}{{{'l' * len(data.columns)}}}\n\\toprule\n{head} \\\\\n\\midrule\n{body}"
        f"\\bottomrule\n\\end{{tabular}}\n{below}\\end{{table}}\n"
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


def _rounded_up(value: Value, style: str) -> str:
    return round_up(value, int(style[1:-1]) + 1) if isinstance(value, float) else _written(value, style)


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
            "∞": r"\infty", "√": r"\surd", "²": "^2", "³": "^3", "…": r"\dots", "∅": r"\emptyset",
            "α": r"\alpha", "β": r"\beta", "δ": r"\delta", "ε": r"\varepsilon", "λ": r"\lambda", "π": r"\pi",
            "σ": r"\sigma", "τ": r"\tau", "Δ": r"\Delta", "Λ": r"\Lambda", "Σ": r"\Sigma", "Φ": r"\Phi",
            "ā": r"\bar{a}", "−": "-", "≤": r"\le", "≥": r"\ge", "<": "<", ">": ">", "≈": r"\approx", "∝": r"\propto",
            "→": r"\to", "|": r"\mid", "~": r"\sim",
        }.items()
    }
)  # fmt: skip
_SPECIAL = re.compile(
    r"(?P<base>\d[\d.]*)(?:\^(?P<power>-?\d+)|e(?P<sign>[+-])0*(?P<exponent>\d+))"
    r"|(?P<minus>(?<!\w)-(?=\d))|`(?P<code>[^`]*)`|\"(?P<quoted>[^\"]*)\""
)


def _tex(text: str) -> str:
    """Text as LaTeX reads it; 2^-16 and 1.3e+05 become powers, -0.5 gets a minus, `names` a typewriter."""
    written, done = "", 0
    for match in _SPECIAL.finditer(text):
        written += _letters(text[done : match.start()]) + _special(match)
        done = match.end()
    return written + _letters(text[done:])


def _special(match: re.Match[str]) -> str:
    found = match.groupdict()
    if found["minus"]:
        return "$-$"
    if found["code"] is not None:
        return f"\\texttt{{{_letters(found['code'])}}}"
    if found["quoted"] is not None:
        return f"``{_letters(found['quoted'])}''"
    if found["power"]:
        return f"${found['base']}^{{{found['power']}}}$"
    return f"${found['base']}\\times10^{{{'-' if found['sign'] == '-' else ''}{found['exponent']}}}$"


def _letters(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
