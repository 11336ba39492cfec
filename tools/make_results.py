"""Write docs/results.md, and the tables and figures it shows, from the result files in docs/results.

    python tools/make_results.py

The words are tools/templates/results.md.j2. Every number in them is an expression over the results, and every verdict
that data could overturn is a block that refuses to be written once it has. A test fails when the page is out of date.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

sys.path.insert(0, str(Path(__file__).parent))

import paper_run
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.regimes import NAMES, regime_named
from paclm.study.results import Result, Row, load_results
from paclm.study.table import Cell, TableData, to_csv, to_latex, to_markdown
from paclm.study.tables import all_tables
from paclm.study.violations import excess_in_errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
STUDY = ROOT / "docs" / "results" / "wiki"
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "results.md.j2"


class Overturned(Exception):
    """The results no longer bear out what the template says of them."""


@dataclass(frozen=True)
class Evaluation:
    """One corpus: `results/*.json`, `stage-*.json`, and the tables and figures made from them."""

    folder: Path

    @cached_property
    def results(self) -> dict[str, Result]:
        """What was run, in the order of the study."""
        found = load_results(self.folder / "results")
        return {name: found[name] for name in NAMES if name in found}

    @cached_property
    def stages(self) -> dict[int, Mapping[str, Any]]:
        """What every stage wrote down about itself."""
        logs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("stage-*.json"))]
        return {log["stage"]: log for log in logs}

    @cached_property
    def training(self) -> Mapping[str, Any]:
        """What it took, from the stage that did it."""
        (figures,) = [log["training"] for log in self.stages.values() if "training" in log]
        return dict(figures)

    @cached_property
    def tables(self) -> dict[str, TableData]:
        """Every table that the results allow."""
        allowed = [table for table in all_tables() if all(name in self.results for name in table.regimes)]
        return {table.label: table.build(self.results) for table in allowed}

    def row(self, regime: str, **wanted: Any) -> Row:
        """The one row of a result that has these values."""
        return self.results[regime].one(collection=1, **wanted)

    def rows(self, regime: str, **wanted: Any) -> list[Row]:
        """All rows that have these values."""
        return self.results[regime].select(collection=1, **wanted)

    def cell(self, label: str, column: str, *first: str) -> Cell:
        """The cell of a table in a column, and in the row that begins with these words."""
        data = self.tables[label]
        (row,) = [row for row in data.rows if tuple(_words(cell) for cell in row[: len(first)]) == first]
        found = row[list(data.columns).index(column)]
        if not isinstance(found, Cell):
            raise KeyError(f"{label}, {column}, {first} is a heading and no value.")
        return found

    def describe(self, regime: str) -> list[str]:
        """What the regime itself says of its rows."""
        return regime_named(regime).describe(self.results[regime])

    def table(self, label: str) -> str:
        """A table as it is committed, under its label."""
        text = (self.folder / "tables" / f"{_file_name(label)}.md").read_text(encoding="utf-8")
        return f"**`{label}`** {text.strip()}"

    def figure(self, label: str) -> str:
        """A drawing with its caption."""
        (caption,) = [figure.caption for figure in all_figures() if figure.label == label]
        return f"![{label}]({self.place}/figures/{_file_name(label)}.svg)\n\n**`{label}`** {caption}"

    def made(self, *regimes: str) -> str:
        """Which files numbers come from, and the commands that made them."""
        files = ", ".join(f"[`{name}.json`]({self.place}/results/{name}.json)" for name in regimes)
        commands = dict.fromkeys(self.command(name) for name in regimes)
        return f"From {files}:\n\n```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```"

    def command(self, regime: str) -> str:
        """What was typed, as it reads in a checkout."""
        words = str(self.results[regime].provenance["command"])
        return f"python tools/{words[words.index('paper_run.py') :]}"

    @property
    def place(self) -> str:
        """The folder as the page links to it."""
        return f"results/{self.folder.name}"

    def minutes_of(self, stage: int) -> str:
        """What a stage's regimes took together, and how many of them there were."""
        regimes = self.stages[stage]["regimes"] if stage in self.stages else {}
        took = [regime["seconds"] for regime in regimes.values() if "seconds" in regime]
        return f"{sum(took) / 60:.1f} ({len(took)} of {len(paper_run.STAGES[stage])})" if took else "not run"

    @cached_property
    def not_run(self) -> list[str]:
        """Regimes that a stage of the script has and that left no result."""
        wanted = dict.fromkeys(name for stage in paper_run.STAGES.values() for name in stage)
        return [name for name in wanted if name not in self.results]

    @cached_property
    def released(self) -> dict[str, int]:
        """Tokens by regime; budgets, rules and coin draws each release their own."""
        scale = {name: result.scale for name, result in self.results.items()}
        played = {name: scale[name]["sessions"] * scale[name]["tokens"] for name in ("releases", "tokens_only")}
        longest = max(scale["forgetting"]["horizons"])
        forced = [row for part in ("forced", "out-of-support") for row in self.rows("canaries", part=part)]
        return {
            "sessions": self.num_sessions * scale["sessions"]["queries"] * scale["sessions"]["tokens"],
            "ablation": len(self.rows("ablation")) * scale["ablation"]["trials"] * scale["ablation"]["length"],
            "accuracy": sum(row["positions"] for row in self.rows("accuracy") if row["per_token_nats"]),
            "flatness": sum(row["positions"] for row in self.rows("flatness") if row["per_token_nats"]),
            **{name: len(self.rows(name)) * tokens for name, tokens in played.items()},
            "forgetting": len(self.rows("forgetting", tokens=longest)) * scale["forgetting"]["sessions"] * longest,
            "canaries": sum(row["trials"] for row in forced if row["per_token_nats"]),
        }

    @cached_property
    def num_sessions(self) -> int:
        """Of the persistent-secret sessions, all budgets together."""
        scale = self.results["sessions"].scale
        return int(scale["sessions"] * len(scale["budgets"]))

    @cached_property
    def canary_share(self) -> float:
        """What part of the texts a world trains on is copies of canaries."""
        origin = self.results["canaries"].provenance
        copies = sum(row["repetitions"] for row in self.rows("canaries", part="organic"))
        return float(copies / (copies + origin["records"] - origin["arguments"]["canaries"]))


def largest_gap(rows: Sequence[Row]) -> float:
    """By how many standard errors leak ÷ charged and dissent part, at most."""
    return max(float(abs(row["gap"]) / row["gap_stderr"]) for row in rows)


def largest_parting(rows: Sequence[Row]) -> float:
    """By how many standard errors the two estimators of the leak part, at most."""
    return max(float(abs(row["estimators_parting"]) / row["estimators_parting_stderr"]) for row in rows)


def largest_excess(rows: Sequence[Row]) -> float:
    """By how many standard errors an attack beats its bound, at most; negative where none does."""
    return max(excess_in_errors(row, attack) for row in rows for attack in ("membership", "world"))


def holds(condition: bool, caller: Callable[[], str]) -> str:
    """The sentence in the block if it is true; an error if it is not."""
    if not condition:
        raise Overturned(f"The results do not bear this out any more; say what they do: {caller().strip()!r}")
    return caller()


FILTERS: dict[str, Callable[..., str]] = {
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "points": lambda value, digits=2: f"{100 * value:.{digits}f}".replace("-", "−"),
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "figures": lambda value, digits=3: f"{value:.{digits}g}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
    "hours": lambda seconds, digits=1: f"{seconds / 3600:.{digits}f}",
    "millions": lambda value, digits=2: f"{value / 1e6:.{digits}f}",
    "names": lambda names: ", ".join(f"`{name}`" for name in names),
}


def render(folder: Path = STUDY) -> str:
    """The page."""
    evaluation = Evaluation(folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # Markdown
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    # Worlds, seed, base and machine: all results have them in common.
    origin = next(iter(evaluation.results.values())).provenance
    return environment.get_template(TEMPLATE).render(
        e=evaluation,
        origin=origin,
        size=paper_run.PAPER,
        stages=paper_run.STAGES,
        holds=holds,
        largest_gap=largest_gap,
        largest_parting=largest_parting,
        largest_excess=largest_excess,
        seconds=sum(result.seconds for result in evaluation.results.values()),
    )


def table_files(folder: Path = STUDY) -> dict[str, str]:
    """Every table as Markdown, CSV and LaTeX, by file name."""
    files: dict[str, str] = {}
    for label, data in Evaluation(folder).tables.items():
        name = _file_name(label)
        files |= {f"{name}.md": to_markdown(data), f"{name}.csv": to_csv(data), f"{name}.tex": to_latex(data, label)}
    return files


def write_tables(folder: Path = STUDY) -> None:
    """Write them, and remove those that no result allows any more."""
    place = _empty(folder / "tables")
    for name, text in table_files(folder).items():
        (place / name).write_text(text, encoding="utf-8")


def write_figures(folder: Path = STUDY) -> None:
    """Draw every figure that the results allow."""
    place, results = _empty(folder / "figures"), Evaluation(folder).results
    for figure in all_figures():
        if all(name in results for name in figure.regimes):
            save_figure(figure, results, place)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _words(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.ours()


def _file_name(label: str) -> str:
    return label.replace(":", "_").replace("-", "_")


if __name__ == "__main__":
    write_tables()
    write_figures()
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
