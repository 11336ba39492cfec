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
from scipy.stats import binom, norm

sys.path.insert(0, str(Path(__file__).parent))

import paper_run
from paclm.privacy.bounds import success_bound
from paclm.study.figure import save_figure
from paclm.study.figures import all_figures
from paclm.study.regimes import NAMES, regime_named
from paclm.study.regimes.releases import TARGET
from paclm.study.results import Result, Row, load_results
from paclm.study.table import Cell, TableData, file_name_of, to_csv, to_latex, to_markdown
from paclm.study.tables import all_tables
from paclm.study.violations import excess_in_errors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "docs" / "results"
STUDIES = ("wiki", "cables", "first")
"""Folders of it, which are also what the template calls them: two corpora, and what an earlier run left."""
TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "results.md.j2"
TIGHT = 2.0
"""Nats: a charge far below log m, where the leak is not held down by how much there is to tell."""
ALARM = 0.01
"""All looks at attacks together may raise a false alarm so often."""


class Overturned(Exception):
    """The results no longer bear out what the template says of them."""


@dataclass(frozen=True)
class Evaluation:
    """One corpus, scored on one text: `results/*.json`, `stage-*.json`, and the tables and figures made from them."""

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

    @property
    def origin(self) -> Mapping[str, Any]:
        """Worlds, seed, base and machine: all results of a folder have them in common."""
        return next(iter(self.results.values())).provenance

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
        text = (self.folder / "tables" / f"{file_name_of(label)}.md").read_text(encoding="utf-8")
        return f"**`{label}`** {self._warning}{text.strip()}"

    def figure(self, label: str) -> str:
        """A drawing with its caption."""
        (caption,) = [figure.caption for figure in all_figures() if figure.label == label]
        return f"![{label}]({self.place}/figures/{file_name_of(label)}.svg)\n\n**`{label}`** {self._warning}{caption}"

    @property
    def _warning(self) -> str:
        return "**Earlier run, faulty training.** " if self.folder.name == "first" else ""

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

    def never_run(self, *others: Evaluation) -> list[str]:
        """Regimes that a stage of the script has and that left no result here, nor in the others."""
        wanted = dict.fromkeys(name for stage in paper_run.STAGES.values() for name in stage)
        return [name for name in wanted if not any(name in study.results for study in (self, *others))]

    @cached_property
    def released(self) -> dict[str, int]:
        """Tokens by regime that released any; budgets, rules and coin draws each release their own."""
        counted = {name: self._count(name, result.scale) for name, result in self.results.items()}
        return {name: count for name, count in counted.items() if count}

    @property
    def tokens_released(self) -> int:
        """By all regimes together."""
        return sum(self.released.values())

    @property
    def seconds(self) -> float:
        """Of all regimes, added up."""
        return sum(result.seconds for result in self.results.values())

    @property
    def passages(self) -> int:
        """Of the text that accuracy is measured on: its errors are over these."""
        return int(self.rows("accuracy")[0]["passages"])

    @property
    def tracked(self) -> list[Row]:
        """Sessions of the paper's release on recorded votes, each budget with secrets of its own, charged little."""
        cells = self.rows("forgetting", curator="tracking")
        return [row for row in cells if row["charged_nats"] < TIGHT]

    @property
    def forgetful(self) -> Row:
        """The cell where forgetting names the world most often beyond tracking."""
        cells = self.rows("forgetting", curator="forgetting")
        return max(cells, key=lambda row: row["world_id_rate"] - self._twin(row)["world_id_rate"])

    @property
    def tracking_twin(self) -> Row:
        """The tracking curator in the same cell."""
        return self._twin(self.forgetful)

    def _twin(self, cell: Row) -> Row:
        return self.row("forgetting", curator="tracking", budget=cell["budget"], tokens=cell["tokens"])

    def _count(self, regime: str, scale: Mapping[str, Any]) -> int:
        rows = self.rows(regime)
        if regime == "sessions":
            return self.num_sessions * int(scale["queries"] * scale["tokens"])
        if regime == "ablation":
            return len(rows) * int(scale["trials"] * scale["length"])
        if regime in ("accuracy", "flatness"):
            return sum(row["positions"] for row in rows if row["per_token_nats"])
        if regime in ("releases", "tokens_only"):
            return len(rows) * int(scale["sessions"] * scale["tokens"])
        if regime == "forgetting":
            longest = max(scale["horizons"])
            return len(self.rows(regime, tokens=longest)) * int(scale["sessions"] * longest)
        if regime == "canaries":
            forced = [row for part in ("forced", "out-of-support") for row in self.rows(regime, part=part)]
            return sum(row["trials"] for row in forced if row["per_token_nats"])
        return 0

    @cached_property
    def num_sessions(self) -> int:
        """Of the persistent-secret sessions, all budgets together."""
        scale = self.results["sessions"].scale
        return int(scale["sessions"] * len(scale["budgets"]))

    @cached_property
    def canary_share(self) -> float:
        """What part of the texts a world trains on is copies of canaries."""
        origin = self.origin
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


def told_gap(row: Row) -> float:
    """By how many standard errors the leak and the charge of disputed tokens part, in sessions on recorded votes."""
    charged = row["charged_dissent_nats"] if "charged_dissent_nats" in row else row["charged_dissent"]
    return float(abs(row["leaked_nats"] - charged) / row["leaked_stderr"])


def share_told(row: Row) -> str:
    """Leaked ÷ charged with its error."""
    return " ± ".join(f"{row[name] / row['charged_every_token']:.1%}" for name in ("leaked_nats", "leaked_stderr"))


def gain_gap(row: Row, theirs: float) -> float:
    """By how many standard errors a retained gain differs from another."""
    return float(abs(row["retained_gain"] - theirs) / row["retained_gain_stderr"])


def times_disputed(unanimity: float, theirs: float) -> float:
    """How many times as many positions are disputed as there."""
    return (1.0 - unanimity) / (1.0 - theirs)


def leads(study: Evaluation) -> bool:
    """Whether plurality and mixture tell nothing and are ahead of the paper's release at 2^-32 on the text."""
    both = [study.row("releases", release=name) for name in ("plurality", "mixture")]
    return all(abs(row["leaked_nats"]) < 1e-9 and row["lead_points"] > 2.0 * row["lead_stderr"] for row in both)


def noiseless_share(study: Evaluation) -> float:
    """What the realized world itself keeps of the gain, in the sessions of the releases."""
    row = study.row("releases", release="plurality")
    return float((row["accuracy_noiseless"] - row["accuracy_public"]) / (row["accuracy_full"] - row["accuracy_public"]))


def tokens_over_charged(study: Evaluation) -> float:
    """What the tokens alone show of the charge, at 2^-16."""
    row = study.row("tokens_only", release="gaussian", budget="2^-16")
    return float(row["leaked_tokens_nats"] / row["charged_nats"])


def attack_ps(study: Evaluation) -> list[float]:
    """One-sided p-values of every attack on the sessions of `tokens_only` against its bound."""
    found = []
    for row in study.rows("tokens_only"):
        for view in ("history", "tokens"):
            bound = success_bound(row["charged_nats"], 1 / 2)
            error = row[f"membership_{view}_stderr"]
            excess = row[f"membership_{view}"] - bound
            found.append(float(norm.sf(excess / error)) if error else float(excess <= 0.0))
            hits = round(row[f"world_{view}"] * row["sessions"])
            found.append(
                float(
                    binom.sf(hits - 1, row["sessions"], success_bound(row["charged_nats"], 1 / paper_run.PAPER.worlds))
                )
            )
    return found


def per_token_ms(serving: Row) -> float:
    """One stream, the ledger included."""
    return 1e3 / float(serving["tokens_per_second"])


def holds(condition: bool, caller: Callable[[], str]) -> str:
    """The sentence in the block if it is true; an error if it is not."""
    if not condition:
        raise Overturned(f"The results do not bear this out any more; say what they do: {caller().strip()!r}")
    return caller()


FILTERS: dict[str, Callable[..., Any]] = {
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
    "points": lambda value, digits=2: f"{100 * value:.{digits}f}".replace("-", "−"),
    "number": lambda value, digits=0: f"{value:,.{digits}f}",
    "figures": lambda value, digits=3: f"{value:.{digits}g}",
    "minutes": lambda seconds, digits=0: f"{seconds / 60:.{digits}f}",
    "hours": lambda seconds, digits=1: f"{seconds / 3600:.{digits}f}",
    "millions": lambda value, digits=2: f"{value / 1e6:.{digits}f}",
    "file_name": file_name_of,
    "told_gap": told_gap,
    "names": lambda names: ", ".join(f"`{name}`" for name in names),
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
        size=paper_run.PAPER,
        stages=paper_run.STAGES,
        holds=holds,
        largest_gap=largest_gap,
        largest_parting=largest_parting,
        largest_excess=largest_excess,
        share_told=share_told,
        told_gap=told_gap,
        tight_charge=TIGHT,
        gain_gap=gain_gap,
        times_disputed=times_disputed,
        leads=leads,
        noiseless_share=noiseless_share,
        tokens_over_charged=tokens_over_charged,
        attack_ps=attack_ps,
        alarm=ALARM,
        per_token_ms=per_token_ms,
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


def _words(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.ours()


if __name__ == "__main__":
    write_tables()
    write_figures()
    PAGE.write_text(render(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
