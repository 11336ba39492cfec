"""One study of docs/research/results: its result files, notes of its stages, and the tables and figures made from them.

Used by the template of tools/make_results.py. Does not interpret results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import paper_options
from paclm.study.figures import all_figures
from paclm.study.regimes import NAMES
from paclm.study.results import Result, Row, load_results
from paclm.study.table import Cell, TableData, file_name_of, to_markdown
from paclm.study.tables import all_tables

TIGHT = 2.0
"""Nats: a charge far below log m, where the leak is not limited by the entropy of the secret."""


@dataclass(frozen=True)
class Evaluation:
    """One corpus, scored on one text: `results/*.json`, `stage-*.json`, and the tables and figures made from them."""

    folder: Path

    @cached_property
    def results(self) -> dict[str, Result]:
        """The results, in the order of the study."""
        found = load_results(self.folder / "results")
        return {name: found[name] for name in NAMES if name in found}

    @cached_property
    def stages(self) -> dict[int, Mapping[str, Any]]:
        """The log of every stage."""
        logs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("stage-*.json"))]
        return {log["stage"]: log for log in logs}

    @cached_property
    def training(self) -> Mapping[str, Any]:
        """Figures of the training, from the stage that did it."""
        (figures,) = [log["training"] for log in self.stages.values() if "training" in log]
        return dict(figures)

    @property
    def origin(self) -> Mapping[str, Any]:
        """Worlds, seed, base and machine: the same for all results of a folder."""
        return next(iter(self.results.values())).provenance

    @cached_property
    def tables(self) -> dict[str, TableData]:
        """Every table whose regimes were run."""
        allowed = [table for table in all_tables() if all(name in self.results for name in table.regimes)]
        return {table.label: table.build(self.results) for table in allowed}

    def row(self, regime: str, **wanted: Any) -> Row:
        """The one row of a result that has these values."""
        return self.results[regime].one(**{"collection": 1, **wanted})

    def rows(self, regime: str, **wanted: Any) -> list[Row]:
        """All rows that have these values."""
        return self.results[regime].select(collection=1, **wanted)

    def cell(self, label: str, column: str, *first: str) -> Cell:
        """The cell of a table in a column, in the row that begins with these words."""
        data = self.tables[label]
        (row,) = [row for row in data.rows if tuple(_words(cell) for cell in row[: len(first)]) == first]
        found = row[list(data.columns).index(column)]
        if not isinstance(found, Cell):
            raise KeyError(f"{label}, {column}, {first} is a heading and no value.")
        return found

    def table(self, label: str) -> str:
        """A table under its label."""
        return f"**`{label}`** {to_markdown(self.tables[label]).strip()}"

    def link(self, label: str) -> str:
        """A link to a table on the page that holds those not shown."""
        heading = re.sub(r"[^\w\s-]", "", f"{self.folder.name}: {label}").replace(" ", "-")
        return f"[`{label}`](tables.md#{heading})"

    def figure(self, label: str) -> str:
        """A drawing with its caption."""
        (caption,) = [figure.caption for figure in all_figures() if figure.label == label]
        return f"![{label}]({self.place}/figures/{file_name_of(label)}.svg)\n\n**`{label}`** {caption}"

    def command(self, regime: str) -> str:
        """The command that made a result, as typed in a checkout."""
        words = str(self.results[regime].provenance["command"])
        return f"python tools/gpu/{words[words.index('dp_run.py' if regime == 'dp' else 'paper_run.py') :]}"

    @property
    def place(self) -> str:
        """The folder as the page links to it."""
        return f"results/{self.folder.name}"

    def minutes_of(self, stage: int) -> str:
        """Minutes of a stage's regimes together, and how many there were."""
        regimes = self.stages[stage]["regimes"] if stage in self.stages else {}
        took = [regime["seconds"] for regime in regimes.values() if "seconds" in regime]
        return f"{sum(took) / 60:.1f} ({len(took)} of {len(paper_options.PAPER_STAGES[stage])})" if took else "not run"

    def never_run(self, *others: Evaluation) -> list[str]:
        """Regimes of a stage without a result here or in the others."""
        wanted = dict.fromkeys(name for stage in paper_options.PAPER_STAGES.values() for name in stage)
        return [name for name in wanted if not any(name in study.results for study in (self, *others))]

    @cached_property
    def released(self) -> dict[str, int]:
        """Released tokens by regime; budgets, rules and coin draws count separately."""
        counted = {name: self._count(name, result.scale) for name, result in self.results.items()}
        return {name: count for name, count in counted.items() if count}

    @property
    def generated(self) -> int:
        """Tokens of text that the mechanism wrote itself."""
        return sum(self.released.get(name, 0) for name in ("sessions", "ablation", "generation", "sweep", "universe"))

    @property
    def on_record(self) -> int:
        """Tokens released on votes that were recorded along a text."""
        return sum(self.released.values()) - self.generated

    @property
    def seconds(self) -> float:
        """Seconds of all regimes, added up; `dp` also trains, and is left out."""
        return sum(result.seconds for name, result in self.results.items() if name != "dp")

    @property
    def passages(self) -> int:
        """Passages that accuracy is measured on; its errors are over these."""
        return int(self.rows("accuracy")[0]["passages"])

    @property
    def tracked(self) -> list[Row]:
        """Sessions of the paper's release on recorded votes, separate secrets for each budget, small charges."""
        cells = self.rows("forgetting", curator="tracking")
        return [row for row in cells if row["charged_nats"] < TIGHT]

    @property
    def compared(self) -> list[Row]:
        """The same beside the other releases; all budgets share secrets."""
        cells = self.rows("releases", release="gaussian")
        return [row for row in cells if row["charged_every_token"] < TIGHT]

    @property
    def forgetful(self) -> Row:
        """The cell where forgetting names the world more often than tracking by the most."""
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
        if regime == "sweep":
            return self._swept(scale)
        if regime == "universe":
            return int(2 * scale["records"] * scale["released"])
        if regime == "generation":
            longest = max(scale["lengths"])
            return len(self.rows(regime, source="private", length=longest)) * int(scale["sequences"] * longest)
        if regime == "ablation":
            return len(rows) * int(scale["trials"] * scale["length"])
        if regime == "coupling":
            return sum(row["positions"] for row in rows if "accuracy_full" in row)  # a difference releases nothing
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

    def _swept(self, scale: Mapping[str, Any]) -> int:
        """A sequence is counted at its longest: shorter cells are prefixes of longer ones."""
        *_, near, far = sorted(scale["lengths"])
        counts = {near: scale["trials"] - scale["long_trials"], far: scale["long_trials"]}
        rows = [row for row in self.rows("sweep") if row["length"] in counts]
        return sum(int(row["realized_length"] * counts[row["length"]]) for row in rows)

    @cached_property
    def num_sessions(self) -> int:
        """Number of persistent-secret sessions over all budgets."""
        scale = self.results["sessions"].scale
        return int(scale["sessions"] * len(scale["budgets"]))


def _words(cell: Cell | str) -> str:
    return cell if isinstance(cell, str) else cell.ours()
