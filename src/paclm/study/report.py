"""The report: every table and figure that the results allow, as files, and one HTML page that needs no network.

Reads results and nothing else of the workspace. matplotlib and jinja2 are imported only here and in figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paclm.config import format_duration, in_shell
from paclm.errors import InvalidInput, PluginError
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
    """The files of a report."""

    page: Path
    tables: list[Path]  # Markdown; CSV and LaTeX are beside them
    figures: list[Path]  # SVG; PDF is beside them
    left_out: list[str]  # results whose plugin is missing or broken, a sentence each


def write_report(study_folder: Path) -> Written:
    """Write tables, figures and report.html from `results/` of a study folder."""
    every = load_results(study_folder / "results")
    regimes, left_out = _regimes_of(every)
    results = {name: every[name] for name in regimes}
    if not results:
        raise InvalidInput(
            f"There are no results in {study_folder / 'results'}. Make some: paclm study run "
            f"{in_shell(study_folder.parent)} all"
        )
    table_folder, figure_folder = (make_private_folder(study_folder / name) for name in ("tables", "figures"))
    every_table = [*all_tables(), *(table for regime in regimes.values() for table in regime.tables)]
    found = {table: table.build(results) for table in every_table if all(name in results for name in table.regimes)}
    tables = {table: data for table, data in found.items() if data.rows or data.notes}
    for table, data in tables.items():
        texts = {"md": to_markdown(data), "csv": to_csv(data), "tex": to_latex(data, table.label)}
        for suffix, text in texts.items():
            write_private(table_folder / f"{table.file_name}.{suffix}", text.encode())
    figures: dict[Figure, str] = {}
    for figure in (*all_figures(), *(figure for regime in regimes.values() for figure in regime.figures)):
        if all(name in results for name in figure.regimes):
            svg, _ = save_figure(figure, results, figure_folder)
            figures[figure] = inline_svg(svg.read_text(encoding="utf-8"), figure.file_name, figure.caption)
    page = study_folder / "report.html"
    write_private(page, _render(regimes, results, tables, figures, left_out).encode())
    return Written(
        page,
        [table_folder / f"{table.file_name}.md" for table in tables],
        [figure_folder / f"{figure.file_name}.svg" for figure in figures],
        left_out,
    )


def _regimes_of(results: Mapping[str, Result]) -> tuple[dict[str, Regime], list[str]]:
    """The regimes that have results, built-in ones first, and why those of missing or broken plugins are left out."""
    regimes = {name: regime_named(name) for name in NAMES if name in results}
    labels = {table.label for table in all_tables()} | {figure.label for figure in all_figures()}
    left_out = []
    for name, result in results.items():
        if name in NAMES:
            continue
        try:
            regime = regime_named(name)
            if taken := labels.intersection(one.label for one in (*regime.tables, *regime.figures)):
                raise PluginError(f"Its label {min(taken)!r} is taken: the plugin has to choose another.")
        except (PluginError, InvalidInput) as error:
            made_by = "; ".join(map(_plugin_in_words, result.provenance.get("plugins", ()))) or "no plugin"
            left_out.append(f"The results of {name} (run with {made_by}) are not in this report. {error}")
        else:
            regimes[name] = regime
            labels.update(one.label for one in (*regime.tables, *regime.figures))
    return regimes, left_out


def _plugin_in_words(plugin: Mapping[str, Any]) -> str:
    """A plugin as a result records it: its name, package and version, and the beginning of its code's digest."""
    origin = f"{plugin['package']} {plugin['version']}" if plugin["package"] else plugin["target"]
    return f"{plugin['group'][:-1]} {plugin['name']} of {origin} (code {plugin['code'][:12]})"


def inline_svg(svg: str, prefix: str, description: str) -> str:
    """An SVG file for use inside a page: without prologue and fixed size, with unique ids and an accessible name."""
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


def _render(
    regimes: Mapping[str, Regime],
    results: Mapping[str, Result],
    tables: Mapping[Table, TableData],
    figures: Mapping[Figure, str],
    left_out: Sequence[str],
) -> str:
    import jinja2
    from markupsafe import Markup

    def shown(regimes: tuple[str, ...]) -> dict[str, Any]:
        """Tables and figures whose first regime is this one; of none at all: the general ones."""
        return {
            "tables": [(table.label, data) for table, data in tables.items() if table.regimes[:1] == regimes],
            "figures": [(f.label, f.caption, Markup(svg)) for f, svg in figures.items() if f.regimes[:1] == regimes],
        }

    sections = []
    for name, result in results.items():
        regime, own = regimes[name], shown((name,))
        in_tables = {note for _, data in own["tables"] for note in data.notes}
        sections.append(
            {
                "regime": regime,
                "result": result,
                "scale": scale_in_words(result.scale),
                "headlines": [line for headline in regime.headlines for line in headline.lines(result)],
                "in_short": regime.in_short(result),
                "verdicts": regime.verdicts(result),
                "plugins": [_plugin_in_words(one) for one in result.provenance.get("plugins", ())],
                "notes": [note for note in result.notes if note not in in_tables],
                **own,
            }
        )
    general = shown(())
    general["tables"].sort(key=lambda labelled: labelled[0] != "tab:setup")
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
        left_out=left_out,
        num_collections=max(int(row.get("collection", 1)) for r in results.values() for row in r.rows),
        **_origin(results),
    )


def _origin(results: Mapping[str, Result]) -> dict[str, Any]:
    """What all results have in common, and whether they are of different runs."""
    every = list(results.values())
    origin = every[0].provenance

    def seen(values: Sequence[Any]) -> str:
        return "; ".join(dict.fromkeys(str(value) for value in values))

    worlds = [str(result.provenance.get("adapters", {}).get(WORLDS_FILE)) for result in every]
    return {
        "provenance": origin,
        "presets": seen([result.preset for result in every]),
        "seeds": seen([result.seed for result in every]),
        "machines": seen([result.provenance.get("machine") for result in every]),
        "commits": seen([result.provenance.get("commit") or "not a checkout" for result in every]),
        "duration": format_duration(sum(result.seconds for result in every)),
        "is_mixed": len({(r.preset, r.seed, own) for r, own in zip(every, worlds, strict=True)}) > 1,
    }
