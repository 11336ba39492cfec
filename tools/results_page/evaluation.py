"""One evaluation of docs/research/results: its result files, logs of its stages, and the tables made from them.

Used by the page of tools/make_results.py. Does not interpret results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paclm.errors import InvalidInput
from paclm.study.expectation import IN_EXPECTATION
from paclm.study.figures import all_figures
from paclm.study.regimes import NAMES, regime_named
from paclm.study.results import Result, Row, load_results
from paclm.study.table import TableData, file_name_of, to_markdown
from paclm.study.tables import all_tables
from results_page import pooling

MAIN = ("wiki", "recorded", "cables")
"""What stands side by side in headlines and claims: two corpora, and more text of the first on other worlds."""
CORPORA = ("wiki", "cables")
"""Those whose figures stand side by side in the sections of regimes."""
TITLES = {
    "wiki": "Wikipedia",
    "recorded": "Wikipedia, recorded votes",
    "cables": "diplomatic papers",
    "wikitext": "WikiText test split",
    "collections": "Wikipedia, few worlds",
    "tiny-wiki": "Wikipedia, `tiny`",
    "tiny-cables": "diplomatic papers, `tiny`",
}
"""By the beginning of a folder's name, in the order of the page."""
SCRIPTS = {"paper_run": "tools/gpu", "dp_run": "tools/gpu", "recorded_votes": "tools"}
"""What makes results, and where it is."""


def known_name(name: str) -> str:
    """The longest of TITLES that a folder's name begins with; without one the name."""
    return max((known for known in TITLES if f"{name}-".startswith(f"{known}-")), key=len, default=name)


@dataclass(frozen=True)
class Evaluation:
    """One corpus, scored on one text with one base: `results/*.json` and `stage-*.json`."""

    folder: Path

    @property
    def title(self) -> str:
        """Of `tiny-wiki-collection-2`: Wikipedia, `tiny`, collection 2."""
        known = known_name(self.folder.name)
        rest = self.folder.name[len(known) :].strip("-").replace("-", " ")
        return ", ".join(filter(None, (TITLES.get(known, known), rest)))

    @property
    def place(self) -> str:
        """The folder as the page links to it."""
        return f"results/{self.folder.name}"

    @cached_property
    def results(self) -> dict[str, Result]:
        """The results, in the order of the study; those of regimes that are unknown here are left out."""
        found = load_results(self.folder / "results")
        if "accuracy" in found and IN_EXPECTATION not in found["accuracy"].notes:
            _take_common_secret(found["accuracy"])
        for row in found["cost"].select(what="serving") if "cost" in found else ():
            row.setdefault("context", found["cost"].scale.get("prompt", 0) + 1)  # older results timed one context
        return {name: found[name] for name in NAMES if name in found}

    @cached_property
    def stages(self) -> dict[int, Mapping[str, Any]]:
        """The log of every stage."""
        logs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("stage-*.json"))]
        return {log["stage"]: log for log in logs}

    @property
    def origin(self) -> Mapping[str, Any]:
        """Worlds, seed, base and machine: the same for all results of a folder."""
        return next(iter(self.results.values())).provenance

    @cached_property
    def tables(self) -> dict[str, TableData]:
        """Every table whose regimes were run; of a workspace also those about itself."""
        possible = [table for table in all_tables() if table.regimes or "arguments" in self.origin]
        allowed = [table for table in possible if all(name in self.results for name in table.regimes)]
        built = {table.label: table.build(self.results) for table in allowed}
        return {label: data for label, data in built.items() if data.rows}

    def rows(self, regime: str, **wanted: Any) -> list[Row]:
        """All rows of the first collection that have these values; none without the result."""
        return self.results[regime].select(**{"collection": 1, **wanted}) if regime in self.results else []

    def labels(self, regime: str) -> list[str]:
        """The labels of a regime's tables."""
        return [table.label for table in all_tables() if table.regimes[:1] == (regime,) and table.label in self.tables]

    def table(self, label: str) -> str:
        """A table under its label."""
        return f"**`{label}`** {to_markdown(self.tables[label]).strip()}"

    def link(self, label: str) -> str:
        """A link to a table on the page of all tables."""
        heading = re.sub(r"[^\w\s-]", "", f"{self.folder.name}: {label}").replace(" ", "-")
        return f"[`{label}`](tables.md#{heading})"

    def file(self, regime: str) -> str:
        """The result file, as the pages link to it."""
        return f"{self.place}/results/{regime}.json"

    def sources(self, regime: str) -> str:
        """Links to the tables of a regime and to its result file."""
        return ", ".join([*map(self.link, self.labels(regime)), f"[JSON]({self.file(regime)})"])

    def figure(self, label: str, has_caption: bool = True) -> str:
        """A drawing; nothing where its regime was not run."""
        (figure,) = [figure for figure in all_figures() if figure.label == label]
        if not all(name in self.results for name in figure.regimes):
            return ""
        alternative = f"{label}, {self.title}"
        drawing = f"![{alternative}]({self.place}/figures/{file_name_of(label)}.svg)"
        return f"{drawing}\n\n**`{label}`** {figure.caption}" if has_caption else drawing

    def summary(self, regime: str) -> list[str]:
        """What the regime itself says of its result: verdicts, sentences and headlines."""
        return regime_named(regime).summary(self.results[regime])

    def verdicts(self, regime: str) -> list[str]:
        """The statistical tests of the regime; one that failed starts with ALARM."""
        return regime_named(regime).verdicts(self.results[regime])

    def command(self, regime: str) -> str:
        """The command that made a result, as typed in a checkout."""
        words = str(self.results[regime].provenance["command"])
        found = re.search(rf"(?:{'|'.join(SCRIPTS)})\.py.*", words)
        assert found, words
        script = found[0].partition(".")[0]
        return f"python {SCRIPTS[script]}/{found[0]}"


def _take_common_secret(accuracy: Result) -> None:
    """Give b = ∞ the secret of all other budgets, where results were drawn: older ones drew another for it.

    Its row becomes that of a budget under which noise changed no token.
    """
    for row in accuracy.select(budget="inf"):
        same = accuracy.select(decoder=row["decoder"], collection=row["collection"], same_as_noiseless=True)
        for twin in [one for one in same if one["budget"] != "inf"][:1]:
            row |= {name: value for name, value in twin.items() if name not in ("budget", "per_token_nats")}


@dataclass(frozen=True)
class Pooled(Evaluation):
    """Several collections of worlds of one corpus as one: means, with errors that contain how much they differ."""

    collections: Sequence[Evaluation]

    @property
    def title(self) -> str:
        return f"{self.collections[0].title}, mean of {len(self.collections)} collections"

    @cached_property
    def results(self) -> dict[str, Result]:
        found = {}
        for name in pooling.REGIMES:
            if all(name in one.results for one in self.collections):
                try:
                    found[name] = pooling.pool_results([one.results[name] for one in self.collections])
                except InvalidInput:  # other sizes, as in a rerun that is not finished
                    continue
        return found


def pool_collections(study: Evaluation, studies: Sequence[Evaluation]) -> Pooled | None:
    """The evaluation with all its later collections (`wiki-collection-2`), if there are any that fit together."""
    own = re.compile(rf"{re.escape(study.folder.name)}-collection-\d+")
    pooled = Pooled(study.folder, [study, *(other for other in studies if own.fullmatch(other.folder.name))])
    return pooled if len(pooled.collections) > 1 and pooled.results else None
