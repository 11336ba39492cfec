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
from paclm.privacy.calibration import pair_variance
from paclm.study.expectation import IN_EXPECTATION
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.paper_numbers import PAPER
from paclm.study.regimes import NAMES, regime_named
from paclm.study.table import file_name_of, to_csv, to_latex, to_markdown
from results_page import claims, layout, pooling
from results_page.evaluation import CORPORA, MAIN, TITLES, Evaluation, known_name, pool_collections
from results_page.headlines import added, changes, reasons

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "research" / "results.md"
TABLES = PAGE.with_name("tables.md")
RESULTS = PAGE.with_name("results")
TEMPLATES = Path(__file__).parent / "results_page"
MOST_LINES = 12
"""Of the summary of a regime without a section of its own."""
COMMANDS = (
    "Commands as they were typed at that commit, where a regime may have belonged to another stage. `--train` without "
    "a name trains nothing: leave it out where `--work` holds no worlds."
)

FILTERS: dict[str, Callable[..., Any]] = {
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "bound": lambda value, digits: round_up(value, digits),
    "inverse": lambda value: 1.0 / value,
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
}


def find_studies(folder: Path = RESULTS) -> list[Evaluation]:
    """Every evaluation of the folder, the main ones first, then in the order of TITLES."""
    order = {name: place for place, name in enumerate(TITLES)}
    names = {path.parent.parent.name for path in folder.glob("*/results/*.json")}
    names_of_others = names.difference(MAIN)
    others = sorted(names_of_others, key=lambda name: (order.get(known_name(name), len(order)), name))
    return [Evaluation(folder / name) for name in (*(name for name in MAIN if name in names), *others)]


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
    corpora = [study for study in studies if study.folder.name in CORPORA]
    elsewhere = [claim for claim in claims.CLAIMS if not any(claim.check(study) for study in corpora)]
    earlier = json.loads((folder / "earlier.json").read_text(encoding="utf-8"))
    changed = changes(mains, earlier)
    text = (
        templates()
        .get_template("results.md.j2")
        .render(
            studies=studies,
            mains=mains,
            corpora=corpora,
            claims_of={
                "the paper": [one for one in claims.CLAIMS if not one.is_new and one not in elsewhere],
                "new": [one for one in claims.CLAIMS if one.is_new and one not in elsewhere],
                "elsewhere": elsewhere,
            },
            sections=sections(studies),
            written=written(),
            changed=changed,
            reasons=reasons(changed, mains, earlier),
            added=added(studies),
            search=json.loads((folder / "dp-search.json").read_text(encoding="utf-8")),
            section_of=lambda regime: f"sections/{regime}.md.j2",
            title_of=lambda regime: regime_named(regime).title,
            question_of=lambda regime: regime_named(regime).question,
            by_guessing=lambda study: 1.0 / study.origin["worlds"],
            forgetful_step=lambda study: forgetful_step(study.origin["worlds"]),
            broken_promises=claims.broken_promises,
            paper_capacity=PAPER["tab:capacity"].rows,
            paper_cost=PAPER["tab:cost"].rows[(1,)],
            drawn=drawn(studies),
            text_dissent=[
                f"{row['tokens_until_dissent']:,} ({study.title})"
                for study in corpora
                for row in study.rows("releases", release="gaussian", budget="2^-32")
            ],
            pooled=[pooled for study in studies if (pooled := pool_collections(study, studies))],
            alarm=claims.ALARM,
            confidence=pooling.CONFIDENCE,
            most_lines=MOST_LINES,
            **{name: getattr(layout, name) for name in layout.__all__},
        )
    )
    return squeeze(text)


def sections(studies: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation], list[Evaluation]]]:
    """Every regime with a result, the evaluations that its section shows (the corpora if they have it), and all."""
    found = []
    for name in NAMES:
        all_having = [study for study in studies if name in study.results]
        having = [study for study in all_having if study.folder.name in CORPORA] or all_having
        if having:
            found.append((name, having, all_having))
    return found


def forgetful_step(num_worlds: int) -> float:
    """To first order, by what factor a step's bound can exceed its charge if the noise is for the uniform prior.

    One world votes otherwise and the belief in it is one half: the noise variances that both need, divided.
    """
    rare = 1.0 / num_worlds
    return pair_variance(0.5, 0.5, 1.0) / pair_variance(rare, 1.0 - rare, 1.0)


def drawn(studies: Sequence[Evaluation]) -> list[str]:
    """Evaluations whose accuracy is of one draw of secret and noise, and no expectation."""
    having = [study for study in studies if "accuracy" in study.results]
    return [study.title for study in having if IN_EXPECTATION not in study.results["accuracy"].notes]


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
    studies = find_studies(folder)
    lines = ["# All tables", "", "Behind [the results](results.md). Written by `tools/make_results.py`.", ""]
    for study in studies:
        for label, data in study.tables.items():
            lines += [f"## {study.folder.name}: `{label}`", "", to_markdown(data).strip(), ""]
    search = json.loads((folder / "dp-search.json").read_text(encoding="utf-8"))
    lines += ["## The search for settings of DP-SGD", "", layout.search_table(search), ""]
    lines += ["## Sizes that differ from the preset", "", layout.cuts_table(studies), ""]
    return "\n".join([*lines, "## Commits and commands", "", COMMANDS, "", layout.command_table(studies), ""])


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
