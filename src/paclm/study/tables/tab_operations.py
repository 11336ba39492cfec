"""Operation counts of `sec:cost`, from the paper's formulas."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_PAPER = (3.35e9, 2.59e4, 1.3e5)


def build(results: Mapping[str, Result]) -> TableData:
    """One line per set of sizes."""
    rows: list[list[Cell | str]] = []
    for row in results["cost"].rows:
        if row["what"] != "operations":
            continue
        paper: tuple[float | None, ...] = _PAPER if row["sizes"] == "the paper's sizes" else (None, None, None)
        sizes = f"m = {row['worlds']}, d = {row['vocabulary']:,}, k = {row['support_size']}, a = {row['distinct']}"
        counts = [
            Cell(float(row[name]), None, p, ".3g")
            for name, p in zip(("dense", "collapsed", "factor"), paper, strict=True)
        ]
        rows.append([row["sizes"], sizes, *counts])
    return TableData(
        "Operations per release: noise over the whole vocabulary, m·d·min(m, d) + d², against noise on the distinct "
        "votes, m·k + a³ + m·a. Model evaluations are not in either. In brackets: the paper.",
        ["", "sizes", "over the vocabulary", "on distinct votes", "factor"],
        rows,
    )


TABLE = Table("tab:operations", ("cost",), build)
