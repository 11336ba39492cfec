"""The report: every table and figure that the results allow, as files, and one HTML page that opens offline.

Reads results and nothing else of the workspace. matplotlib and jinja2 are imported only here and in figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paclm.config import format_duration, in_shell
from paclm.errors import InvalidInput
from paclm.study.figure import Figure, save_figure
from paclm.study.figures import all_figures
from paclm.study.regime import Regime, scale_in_words
from paclm.study.regimes import NAMES, regime_named
from paclm.study.results import Result, load_results
from paclm.study.table import Table, TableData, to_csv, to_latex, to_markdown
from paclm.study.tables import all_tables
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.storage import make_private_folder, write_private

TEMPLATES = Path(__file__).parent / "templates"


class Written(NamedTuple):
    """What a report consists of."""

    page: Path
    tables: list[Path]
    """The Markdown files; CSV and LaTeX lie beside them."""
    figures: list[Path]
    """The SVG files; PDF lies beside them."""


@dataclass(frozen=True)
class ShownTable:
    """A table on the page."""

    label: str
    data: TableData


@dataclass(frozen=True)
class ShownFigure:
    """A figure on the page."""

    label: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A regime on the page."""

    regime: Regime
    result: Result
    tables: Sequence[ShownTable]
    figures: Sequence[ShownFigure]

    @property
    def verdicts(self) -> list[str]:
        """The tests of the regime."""
        return self.regime.verdicts(self.result)

    @property
    def headlines(self) -> list[str]:
        """Its main figures."""
        return [line for headline in self.regime.headlines for line in headline.lines(self.result)]

    @property
    def scale(self) -> str:
        """How much was measured."""
        return scale_in_words(self.result.scale)

    @property
    def notes(self) -> list[str]:
        """What a reader must know and no table of the section says already."""
        said = {note for shown in self.tables for note in shown.data.notes}
        return [note for note in self.result.notes if note not in said]


def write_report(study_folder: Path) -> Written:
    """Write tables, figures and report.html from `results/` of a study folder."""
    results = load_results(study_folder / "results")
    results = {name: results[name] for name in NAMES if name in results}
    if not results:
        raise InvalidInput(
            f"There are no results in {study_folder / 'results'}. Make some: paclm study run "
            f"{in_shell(study_folder.parent)} all"
        )
    tables = _write_tables(results, make_private_folder(study_folder / "tables"))
    figures = _write_figures(results, make_private_folder(study_folder / "figures"))
    page = study_folder / "report.html"
    write_private(page, _render(results, tables, figures).encode())
    return Written(
        page,
        [study_folder / "tables" / f"{table.file_name}.md" for table in tables],
        [study_folder / "figures" / f"{figure.file_name}.svg" for figure in figures],
    )


def _write_tables(results: Mapping[str, Result], folder: Path) -> dict[Table, TableData]:
    written = {}
    for table in all_tables():
        if all(name in results for name in table.regimes):
            data = written[table] = table.build(results)
            for suffix, text in (
                ("md", to_markdown(data)),
                ("csv", to_csv(data)),
                ("tex", to_latex(data, table.label)),
            ):
                write_private(folder / f"{table.file_name}.{suffix}", text.encode())
    return written


def _write_figures(results: Mapping[str, Result], folder: Path) -> dict[Figure, str]:
    """Every figure that can be drawn, and its SVG for the page."""
    written = {}
    for figure in all_figures():
        if all(name in results for name in figure.regimes):
            save_figure(figure, results, folder)
            svg = (folder / f"{figure.file_name}.svg").read_text(encoding="utf-8")
            written[figure] = inline_svg(svg, figure.file_name, figure.caption)
    return written


def inline_svg(svg: str, prefix: str, description: str) -> str:
    """An SVG file as a part of a page: no prologue, no fixed size, ids that no other figure has, and a name."""
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{escape(description, quote=True)}">{rest}'


def typeset(text: object) -> Any:
    """Text for the page: 2^-16 and 3e+04 as powers, and minus signs before numbers."""
    from markupsafe import Markup, escape

    html = str(escape(str(text))).replace("± ", "±\N{NO-BREAK SPACE}")
    html = re.sub(r"(?<=\d)e([+-])0*(\d+)", lambda m: f"×10^{'-' if m[1] == '-' else ''}{m[2]}", html)
    html = re.sub(r"(?<=\d)\^(-?\d+)", r"<sup>\1</sup>", html)
    return Markup(re.sub(r"(?<![\w.])-(?=\d)", "−", html))


def _render(results: Mapping[str, Result], tables: Mapping[Table, TableData], figures: Mapping[Figure, str]) -> str:
    import jinja2
    from markupsafe import Markup

    general = [ShownTable(table.label, data) for table, data in tables.items() if not table.regimes]
    general.sort(key=lambda shown: shown.label != "tab:setup")  # first what there is, then what was done with it
    drawings = [ShownFigure(f.label, f.caption, Markup(svg)) for f, svg in figures.items() if not f.regimes]
    sections = []
    for name, result in results.items():
        regime = regime_named(name)
        own_tables = [ShownTable(t.label, data) for t, data in tables.items() if t.regimes[:1] == (name,)]
        own_figures = [
            ShownFigure(f.label, f.caption, Markup(svg)) for f, svg in figures.items() if f.regimes[:1] == (name,)
        ]
        sections.append(Section(regime, result, own_tables, own_figures))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["typeset"] = typeset
    return environment.get_template("report.html").render(
        sections=sections,
        general=general,
        drawings=drawings,
        num_collections=max(int(row.get("collection", 1)) for r in results.values() for row in r.rows),
        **_origin(results),
    )


def _origin(results: Mapping[str, Result]) -> dict[str, Any]:
    """What all results have in common, and where they differ: a page of mixed runs says so."""
    every = list(results.values())
    origin = every[0].provenance

    def seen(values: Sequence[Any]) -> str:
        return "; ".join(dict.fromkeys(str(value) for value in values))

    return {
        "provenance": origin,
        "presets": seen([result.preset for result in every]),
        "seeds": seen([result.seed for result in every]),
        "machines": seen([result.provenance.get("machine") for result in every]),
        "commits": seen([result.provenance.get("commit") or "not a checkout" for result in every]),
        "duration": format_duration(sum(result.seconds for result in every)),
        "is_mixed": len({(r.preset, r.seed, _worlds_hash(r)) for r in every}) > 1,
    }


def _worlds_hash(result: Result) -> str:
    return str(result.provenance.get("adapters", {}).get(WORLDS_FILE))
