"""Write docs/research/results.md, tables.md beside it and the figures they show, from docs/research/results/*/*.json.

    python tools/make_results.py              # the two pages and the figures
    python tools/make_results.py --all DIR    # every table as Markdown, CSV and LaTeX, every figure as SVG and PDF

The text is tools/results_page/results.md.j2. Every number in it is an expression over the results, and every claim that
data could contradict is a block that raises `Overturned` once the data do. A test fails when a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import paper_options
from paclm.privacy.bounds import round_up
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.paper_numbers import ACCURACY_STDERR, PAPER
from paclm.study.regimes.releases import TARGET
from paclm.study.table import file_name_of, to_csv, to_latex, to_markdown
from results_page.evaluation import TIGHT, Evaluation
from results_page.questions import QUESTIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "research" / "results.md"
TABLES = PAGE.with_name("tables.md")
RESULTS = PAGE.with_name("results")
STUDIES = ("wiki", "cables", "wikitext", "collections", "earlier_wiki", "earlier_cables")
"""Folders of it, which are also their names in the template: two corpora, another test text for the worlds of the
first, two collections of fewer worlds, and an earlier training of the same worlds."""
TEMPLATE = Path(__file__).parent / "results_page" / "results.md.j2"
ALARM = 0.01
"""Probability of a false alarm over all tests of attacks together."""


class Overturned(Exception):
    """The results contradict a claim of the template."""


def holds(condition: bool, caller: Callable[[], str]) -> str:
    """The block's text if the condition is true; else an error."""
    if not condition:
        raise Overturned(f"The results contradict this block of {TEMPLATE.name}; rewrite it: {caller().strip()!r}")
    return caller()


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: QUESTIONS[name] for name in ("leak_gap", "agrees_less", "above_chance", "over_public", "other_votes")},
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "bound": lambda value, digits: round_up(value, digits),
    "percent_up": lambda value, digits=0: f"{round_up(100 * value, digits)}%",
    "inverse": lambda value: 1.0 / value,
    "points": lambda value, digits=2: f"{100 * value:.{digits}f}".replace("-", "−"),
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "figures": lambda value, digits=3: f"{value:.{digits}g}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
    "hours": lambda seconds, digits=1: f"{seconds / 3600:.{digits}f}",
    "millions": lambda value, digits=2: f"{value / 1e6:.{digits}f}",
    "exp": math.exp,
    "names": lambda names: ", ".join(f"`{name}`" for name in names),
}


@cache
def template() -> jinja2.Template:
    """The page, compiled once."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=False,  # Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(TEMPLATE.name)


def render(folder: Path = RESULTS) -> str:
    """The page of results."""
    return template().render(
        **{name: Evaluation(folder / name) for name in STUDIES},
        search=json.loads((folder / "dp-search.json").read_text(encoding="utf-8")),
        size=paper_options.PAPER,
        stages=paper_options.PAPER_STAGES,
        **QUESTIONS,
        holds=holds,
        tight_charge=TIGHT,
        paper_accuracy_error=ACCURACY_STDERR,
        paper_capacity={key[-1]: numbers for key, numbers in PAPER["tab:capacity"].rows.items()},
        alarm=ALARM,
        target=TARGET,
    )


def render_tables(page: str, folder: Path = RESULTS) -> str:
    """The tables that the page links to without showing them."""
    lines = [
        "# More tables",
        "",
        "Tables that [the results](results.md) link to. Written by `tools/make_results.py`.",
        "",
    ]
    for name in STUDIES:
        study = Evaluation(folder / name)
        for label in study.tables:
            if study.link(label) in page:
                lines += [f"## {name}: `{label}`", "", to_markdown(study.tables[label]).strip(), ""]
    return "\n".join(lines)


def write_figures(page: str, folder: Path = RESULTS) -> None:
    """Draw the figures that the page shows, and remove the others."""
    for name in STUDIES:
        shutil.rmtree(folder / name / "figures", ignore_errors=True)
        results = Evaluation(folder / name).results
        for figure in all_figures():
            target = folder / name / "figures" / f"{figure.file_name}.svg"
            if f"]({target.relative_to(folder.parent)})" in page:
                target.parent.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory() as drawn:
                    save_figure(figure, results, Path(drawn))
                    target.write_bytes(Path(drawn, target.name).read_bytes())


def write_everything(out: Path, folder: Path = RESULTS) -> None:
    """Every table and figure that the results allow, in every format."""
    for name in STUDIES:
        study, place = Evaluation(folder / name), out / name
        place.mkdir(parents=True, exist_ok=True)
        for label, data in study.tables.items():
            texts = {"md": to_markdown(data), "csv": to_csv(data), "tex": to_latex(data, label)}
            for suffix, text in texts.items():
                (place / f"{file_name_of(label)}.{suffix}").write_text(text, encoding="utf-8")
        for figure in all_figures():
            if all(regime in study.results for regime in figure.regimes):
                save_figure(figure, study.results, place)


def main() -> None:
    """Write the pages, or everything into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="DIR", help="write every table and figure there, and no page")
    options = parser.parse_args()
    if options.all is not None:
        write_everything(options.all)
        return
    page = render()
    PAGE.write_text(page, encoding="utf-8")
    TABLES.write_text(render_tables(page), encoding="utf-8")
    write_figures(page)
    print(f"{PAGE.relative_to(ROOT)}, {TABLES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
