"""Write docs/research/results.md, tables.md beside it and the figures they show, from docs/research/results/*/*.json.

    python tools/make_results.py              # the two pages and the figures
    python tools/make_results.py --all DIR    # every table as Markdown, CSV and LaTeX, every figure as SVG and PDF

The text is tools/results_page/results.md.j2 and, of regimes, tools/results_page/sections. A regime without a section
there is shown by its own summary; one without a result is left out. Every number is an expression over the results. A
test fails when a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from paclm.privacy.bounds import round_up
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.paper_numbers import PAPER
from paclm.study.regimes import NAMES, regime_named
from paclm.study.table import file_name_of, to_csv, to_latex, to_markdown
from results_page import claims, layout
from results_page.evaluation import CORPORA, MAIN, Evaluation, pool_collections
from results_page.headlines import changes, reasons

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "research" / "results.md"
TABLES = PAGE.with_name("tables.md")
RESULTS = PAGE.with_name("results")
TEMPLATES = Path(__file__).parent / "results_page"
MOST_LINES = 12
"""Of the summary of a regime without a section of its own."""

FILTERS: dict[str, Callable[..., Any]] = {
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "bound": lambda value, digits: round_up(value, digits),
    "inverse": lambda value: 1.0 / value,
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
}


def find_studies(folder: Path = RESULTS) -> list[Evaluation]:
    """Every evaluation of the folder, the main ones first."""
    names = {path.parent.parent.name for path in folder.glob("*/results/*.json")}
    others = sorted(names.difference(MAIN), key=lambda name: (MAIN[0] not in name, name))
    ordered = [*(name for name in MAIN if name in names), *others]
    return [Evaluation(folder / name) for name in ordered]


@cache
def templates() -> jinja2.Environment:
    """The page and its sections, compiled once."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment


def render(folder: Path = RESULTS) -> str:
    """The page of results."""
    studies = find_studies(folder)
    mains = [study for study in studies if study.folder.name in MAIN]
    earlier = json.loads((folder / "earlier.json").read_text(encoding="utf-8"))
    changed = changes(mains, earlier)
    text = (
        templates()
        .get_template("results.md.j2")
        .render(
            studies=studies,
            mains=mains,
            sections=sections(studies),
            written=written(),
            changed=changed,
            reasons=reasons(changed, mains, earlier),
            search=json.loads((folder / "dp-search.json").read_text(encoding="utf-8")),
            section_of=lambda regime: f"sections/{regime}.md.j2",
            title_of=lambda regime: regime_named(regime).title,
            question_of=lambda regime: regime_named(regime).question,
            by_guessing=lambda study: 1.0 / study.origin["worlds"],
            broken_promises=claims.broken_promises,
            paper_capacity=PAPER["tab:capacity"].rows,
            paper_cost=PAPER["tab:cost"].rows[(1,)],
            cuts=layout.cuts_table(studies),
            pooled=[pooled for study in studies if (pooled := pool_collections(study, studies))],
            alarm=claims.ALARM,
            most_lines=MOST_LINES,
            **{name: getattr(layout, name) for name in layout.__all__},
        )
    )
    return squeeze(text)


def sections(studies: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation]]]:
    """Every regime with a result, and the evaluations that its section shows: the two corpora if they have it."""
    found = []
    for name in NAMES:
        all_having = [study for study in studies if name in study.results]
        having = [study for study in all_having if study.folder.name in CORPORA] or all_having
        if having:
            found.append((name, having))
    return found


def written() -> list[str]:
    """The regimes that have a section of their own; others are shown by their summaries."""
    return sorted(path.name.split(".")[0] for path in (TEMPLATES / "sections").iterdir())


def squeeze(text: str) -> str:
    """Without trailing spaces and runs of empty lines, which absent parts leave."""
    lines: list[str] = []
    for line in map(str.rstrip, text.split("\n")):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).rstrip("\n") + "\n"


def render_tables(folder: Path = RESULTS) -> str:
    """All tables of all evaluations."""
    lines = ["# All tables", "", "Behind [the results](results.md). Written by `tools/make_results.py`.", ""]
    for study in find_studies(folder):
        for label, data in study.tables.items():
            lines += [f"## {study.folder.name}: `{label}`", "", to_markdown(data).strip(), ""]
    search = json.loads((folder / "dp-search.json").read_text(encoding="utf-8"))
    lines += ["## The search for settings of DP-SGD", "", layout.search_table(search), ""]
    return "\n".join([*lines, "## The commands in full", "", layout.command_list(find_studies(folder)), ""])


def write_figures(page: str, folder: Path = RESULTS) -> None:
    """Draw the figures that the page shows, and remove the others."""
    for study in find_studies(folder):
        shutil.rmtree(study.folder / "figures", ignore_errors=True)
        for figure in all_figures():
            target = study.folder / "figures" / f"{figure.file_name}.svg"
            if f"]({target.relative_to(folder.parent)})" in page:
                target.parent.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory() as drawn:
                    save_figure(figure, study.results, Path(drawn))
                    target.write_bytes(Path(drawn, target.name).read_bytes())


def write_everything(out: Path, folder: Path = RESULTS) -> None:
    """Every table and figure that the results allow, in every format."""
    for study in find_studies(folder):
        place = out / study.folder.name
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
    TABLES.write_text(render_tables(), encoding="utf-8")
    write_figures(page)
    print(f"{PAGE.relative_to(ROOT)}, {TABLES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
