"""The capacity pilot (`sec:canary-results`): what repetition does to a canary."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

PAPER = {1024: (0.33, 62.5, 0.0), 4096: (1.14, 52.5, 0.0)}
"""By repetitions, at rank 32 and 4 epochs: gap, median rank, share of argmax."""


def build(results: Mapping[str, Result]) -> TableData:
    """One line per setting, kind and count."""
    rows: list[list[Cell | str]] = []
    has_papers = False
    for row in results["capacity"].rows:
        is_papers = row["rank"] == 32 and row["kind"] == "C-COMMON" and row["repetitions"] in PAPER
        has_papers |= is_papers
        gap, rank, share = PAPER[row["repetitions"]] if is_papers else (None, None, None)
        rows.append(
            [
                f"r = {row['rank']}, {row['epochs']} epochs",
                row["kind"],
                Cell(row["repetitions"]),
                Cell(row["gap_nats"], row["gap_stderr"], gap, ".2f"),
                Cell(row["median_rank"], paper=rank, style=",.1f"),
                Cell(row["median_rank_control"], style=",.1f"),
                Cell(row["argmax_share"], paper=share, style=".0%"),
            ]
        )
    return TableData(
        "Capacity pilot: adapters with one canary against a clean control on identical data, over the tokens of the "
        "payload. Gap in nats a token; rank 1 is the favourite." + (" In brackets: the paper." if has_papers else ""),
        ("setting", "kind", "repetitions", "gap", "median rank", "rank in control", "argmax"),
        rows,
        tuple(results["capacity"].notes),
    )


TABLE = Table("tab:capacity", ("capacity",), build)
