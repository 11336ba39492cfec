"""Write docs/research/results.md, and the tables and figures it shows, from the result files in docs/results.

    python tools/make_results.py

The words are tools/templates/results.md.j2. Every number in them is an expression over the results, and every verdict
that data could overturn is a block that refuses to be written once it has. A test fails when the page is out of date.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

sys.path.insert(0, str(Path(__file__).parent))

import paper_options
from evaluation import TIGHT, Evaluation
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.regimes import regime_named
from paclm.study.regimes.releases import TARGET
from paclm.study.table import file_name_of, to_csv, to_latex, to_markdown
from paclm.study.tables.tab_capacity import PAPER as PAPER_CAPACITY
from questions import QUESTIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "research" / "results.md"
RESULTS = ROOT / "docs" / "research" / "results"
STUDIES = ("wiki", "cables", "wikitext", "collections", "earlier_wiki", "earlier_cables")
"""Folders of it, which are also what the template calls them: two corpora, another test text for the worlds of the
first, two collections of fewer worlds, and what an earlier training of the same worlds left."""
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "results.md.j2"
ALARM = 0.01
"""All looks at attacks together may raise a false alarm so often."""
PAPER_ACCURACY_ERROR = 0.0036
"""The paper's standard error of an accuracy under Gumbel, from its text; paired differences have none there."""


class Overturned(Exception):
    """The results no longer bear out what the template says of them."""


def holds(condition: bool, caller: Callable[[], str]) -> str:
    """The sentence in the block if it is true; an error if it is not."""
    if not condition:
        raise Overturned(f"The results do not bear this out any more; say what they do: {caller().strip()!r}")
    return caller()


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: QUESTIONS[name] for name in ("told_gap", "agrees_less", "above_chance", "over_public", "other_votes")},
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "points": lambda value, digits=2: f"{100 * value:.{digits}f}".replace("-", "−"),
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "figures": lambda value, digits=3: f"{value:.{digits}g}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
    "hours": lambda seconds, digits=1: f"{seconds / 3600:.{digits}f}",
    "millions": lambda value, digits=2: f"{value / 1e6:.{digits}f}",
    "file_name": file_name_of,
    "exp": math.exp,
    "names": lambda names: ", ".join(f"`{name}`" for name in names),
    "titles": lambda names: ", ".join(f"`{name}` ({regime_named(name).title})" for name in names),
}


def render(folder: Path = RESULTS) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(TEMPLATE).render(
        **{name: Evaluation(folder / name) for name in STUDIES},
        size=paper_options.PAPER,
        stages=paper_options.STAGES,
        **QUESTIONS,
        holds=holds,
        tight_charge=TIGHT,
        paper_accuracy_error=PAPER_ACCURACY_ERROR,
        paper_capacity=PAPER_CAPACITY,
        alarm=ALARM,
        target=TARGET,
    )


def table_files(folder: Path) -> dict[str, str]:
    """Every table that a study allows as Markdown, CSV and LaTeX, by file name."""
    files: dict[str, str] = {}
    for label, data in Evaluation(folder).tables.items():
        name = file_name_of(label)
        files |= {f"{name}.md": to_markdown(data), f"{name}.csv": to_csv(data), f"{name}.tex": to_latex(data, label)}
    return files


def write_tables(folder: Path = RESULTS) -> None:
    """Write those of all studies, and remove those that no result allows any more."""
    for study in STUDIES:
        place = _empty(folder / study / "tables")
        for name, text in table_files(folder / study).items():
            (place / name).write_text(text, encoding="utf-8")


def write_figures(folder: Path = RESULTS) -> None:
    """Draw every figure that the results allow."""
    for study in STUDIES:
        place, results = _empty(folder / study / "figures"), Evaluation(folder / study).results
        for figure in all_figures():
            is_drawing = not figure.regimes  # of no result: one of it is enough
            if all(name in results for name in figure.regimes) and (study == STUDIES[0] or not is_drawing):
                save_figure(figure, results, place)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    write_tables()
    write_figures()
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
