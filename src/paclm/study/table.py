"""What a table is, how one is made from columns of result rows, and how it is written: Markdown, CSV and LaTeX.

Knows no regime. The tables themselves are in `tables.py`, the paper's numbers in `paper_numbers.py`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paclm.study.cell import Cell, Column
from paclm.study.paper_numbers import NOTHING, PAPER
from paclm.study.results import Result, Row, Value


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
        return file_name_of(self.label)


Notes = Sequence[str] | Callable[[Result], Sequence[str]]
Layout = tuple[Sequence[Row], Sequence[str], Sequence[Sequence[Cell | str]]]  # rows shown, headings, lines


def rows_table(
    label: str,
    regime: str,
    caption: str,
    columns: Sequence[Column],
    rows: Callable[[Result], Sequence[Row]] = lambda result: result.rows,
    notes: Notes = (),
    extend: Callable[[Mapping[str, Result]], Result] | None = None,
) -> Table:
    """A table with one line per row of a result. `rows` selects rows and may add columns to them.

    The caption may name fields of the first row, and `{scale[name]}`. The paper's numbers are looked up by label.
    `extend` may add rows from the other results that were found.
    """
    paper = PAPER.get(label, NOTHING)

    def lay_out(result: Result) -> Layout:
        found = rows(result)
        lines = [[column.cell(row, paper.beside(row)) for column in columns] for row in found]
        return found, [column.heading for column in columns], lines

    return _table(label, regime, caption, lay_out, notes, extend)


def quantities_table(
    label: str,
    regime: str,
    caption: str,
    lines: Sequence[Column],
    across: Callable[[Result], Mapping[str, Row]],
    notes: Notes = (),
) -> Table:
    """A table with one line per quantity and one column per row; `across` gives the rows by heading."""
    paper = PAPER.get(label, NOTHING)

    def lay_out(result: Result) -> Layout:
        found = across(result)
        cells = [[line.heading, *(line.cell(row, paper.beside(row)) for row in found.values())] for line in lines]
        return list(found.values()), ["", *found], cells

    return _table(label, regime, caption, lay_out, notes)


def file_name_of(label: str) -> str:
    """A label of the paper (`tab:census`) as a file name."""
    return label.replace(":", "_").replace("-", "_")


def _table(
    label: str,
    regime: str,
    caption: str,
    lay_out: Callable[[Result], Layout],
    notes: Notes,
    extend: Callable[[Mapping[str, Result]], Result] | None = None,
) -> Table:
    def build(results: Mapping[str, Result]) -> TableData:
        result = results[regime] if extend is None else extend(results)
        rows, columns, lines = lay_out(result)
        fields = {**(rows[0] if rows else {}), "scale": result.scale, "machine": result.provenance.get("machine")}
        return TableData(caption.format_map(fields), columns, lines, notes(result) if callable(notes) else notes)

    return Table(label, (regime,), build)


def to_markdown(data: TableData) -> str:
    """Markdown, with the paper's values in brackets beside ours."""
    rows = (data.columns, ["---"] * len(data.columns), *data.rows)
    cells = ([_both(cell).replace("|", "\\|") for cell in row] for row in rows)
    lines = [f"| {' | '.join(row)} |" for row in cells]
    notes = "".join(f"\n{note}\n" for note in data.notes)
    return f"{data.caption}\n\n" + "\n".join(lines) + f"\n{notes}"


def to_csv(data: TableData) -> str:
    """CSV: value, error and the paper's value in separate columns, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    is_wide = [any(isinstance(cell, Cell) for cell in cells) for cells in zip(*data.rows, strict=True)]
    is_wide = is_wide or [False] * len(data.columns)  # no rows
    heads: list[str] = []
    for column, wide in zip(data.columns, is_wide, strict=True):
        heads += [column, f"{column} (error)", f"{column} (paper)"] if wide else [column]
    writer.writerow(heads)
    for row in data.rows:
        fields: list[Value] = []
        for cell, wide in zip(row, is_wide, strict=True):
            own = (cell.value, cell.stderr, cell.paper) if isinstance(cell, Cell) else (cell, None, None)
            fields += own if wide else own[:1]
        writer.writerow(fields)
    return out.getvalue()


def to_latex(data: TableData, label: str) -> str:
    """LaTeX (booktabs), with the notes below the table."""
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
    """Text escaped for LaTeX; 2^-16 and 1.3e+05 become powers, -0.5 gets a minus sign, `names` a typewriter font."""
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
