"""Canaries that nobody forced: member against other worlds at the trigger (`sec:canary-results`)."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per canary, by kind and repetitions."""
    found = results["canaries"].select(part="organic", collection=1)
    rows: list[list[Cell | str]] = [
        [
            row["kind"],
            Cell(row["repetitions"]),
            Cell(row["gap_nats"], row["gap_stderr"], style=".3f"),
            Cell(row["rank_member"], style=",.0f"),
            Cell(row["rank_other"], style=",.0f"),
            Cell(row["rank_difference"], row["rank_stderr"], style=",.1f"),
            Cell(row["vote_share_member_gumbel"], style=".2%"),
            Cell(row["vote_share_other_gumbel"], style=".2%"),
            Cell(row["in_support"]),
        ]
        for row in sorted(found, key=lambda row: (row["kind"], row["repetitions"]))
    ]
    caption = (
        "Organic memorization at the canary trigger: the payload's first token in worlds that hold the canary against "
        "those that do not; errors over worlds. The paper: gaps within ±0.12 nats, ranks 87–157 (C-COMMON) and about "
        "26,000–33,000 (C-OOD) for both, no votes."
    )
    if not rows:
        caption = "Organic memorization was not measured: the workspace was made without canaries."
    columns = ("kind", "repetitions", "gap, nats", "rank, members", "rank, others", "difference")
    return TableData(caption, (*columns, "votes, members", "votes, others", "in support"), rows)


TABLE = Table("tab:canary-organic", ("canaries",), build)
