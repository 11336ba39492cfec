"""`tab:session-accuracy`: whether tokens get worse as a session goes on (no such table in the paper)."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_VOTERS = ("released", "realized", "full", "public")
_NAMES = {"released": "released", "realized": "realized world", "full": "full corpus", "public": "public model"}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per budget and stretch of the session."""
    result = results["sessions"]
    rows: list[list[Cell | str]] = []
    before = 0
    for row in result.rows:
        before = before if before < row["horizon"] else 0
        name = row["budget"] if row["collection"] == 1 else f"{row['budget']}, collection {row['collection']}"
        right = [Cell(row[f"accuracy_{v}"], row[f"accuracy_{v}_stderr"], style=".1%") for v in _VOTERS]
        same = [Cell(row[f"agreement_{v}"], row[f"agreement_{v}_stderr"], style=".2%") for v in _VOTERS[1:]]
        rows.append([name, f"{before + 1:,} – {row['horizon']:,}", *right, *same])
        before = row["horizon"]
    return TableData(
        "Accuracy over the long run. Accuracy: the first token of each query against the text its prompt was cut from "
        "(the only token whose context is the text's own). Agreement: all released tokens against each voter's choice "
        "on the same context with the same coins.",
        [
            "b",
            "tokens of the session",
            *(f"accuracy, {_NAMES[voter]}" for voter in _VOTERS),
            *(f"agreement, {_NAMES[voter]}" for voter in _VOTERS[1:]),
        ],
        rows,
    )


TABLE = Table("tab:session-accuracy", ("sessions",), build)
