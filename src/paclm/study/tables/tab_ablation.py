"""`tab:ablation`: rules of voting compared on paired trials."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_PAPER = {  # rule and budget: unanimity, a | dissent, p95 a, ratio, rep-3, distinct-1
    ("greedy", "2^-8"): (0.887, 2.20, 3, 1.11, 0.430, 0.391),
    ("greedy", "2^-16"): (0.880, 2.20, 3, 1.28, 0.430, 0.391),
    ("Gumbel, τ = 1.0", "2^-8"): (0.826, 2.17, 3, 1.16, 0.022, 0.750),
    ("Gumbel, τ = 1.0", "2^-16"): (0.832, 2.20, 3, 1.10, 0.022, 0.750),
    ("Gumbel, τ = 0.8", "2^-8"): (0.840, 2.17, 3, 1.02, 0.047, 0.681),
    ("Gumbel, τ = 0.8", "2^-16"): (0.845, 2.16, 3, 1.02, 0.047, 0.681),
    ("hybrid, β ≥ 0.9", "2^-8"): (0.837, 4.97, 28, 1.15, 0.020, 0.756),
    ("hybrid, β ≥ 0.9", "2^-16"): (0.834, 5.71, 36, 1.14, 0.020, 0.756),
}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per rule and budget."""
    result = results["ablation"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        first = row["collection"] == 1
        paper = _PAPER.get((row["variant"], row["budget"]), (None,) * 6) if first else (None,) * 6
        rows.append(
            [
                row["variant"] if first else f"{row['variant']}, collection {row['collection']}",
                row["budget"],
                Cell(row["unanimity"], row["unanimity_stderr"], paper[0], ".3f"),
                Cell(row["distinct_given_dissent"], row["distinct_given_dissent_stderr"], paper[1], ".2f"),
                Cell(row["p95_distinct"], paper=paper[2], style=".0f"),
                Cell(row["ratio"], row["ratio_stderr"], paper[3], ".2f"),
                Cell(row["rep3"], row["rep3_stderr"], paper[4], ".3f"),
                Cell(row["distinct1"], row["distinct1_stderr"], paper[5], ".3f"),
            ]
        )
    return TableData(
        f"Rules of voting, {result.rows[0]['trials']} trials of {result.scale['length']} tokens per cell, paired in "
        "prompt, world, noise seed and coins. a: distinct votes. Ratios are to each rule's own reference. In brackets: "
        "the paper, which gives rep-3 and distinct-1 once per rule.",
        ["rule", "b", "unanimity", "a | dissent", "p95 of a | dissent", "perplexity ratio", "rep-3", "distinct-1"],
        rows,
    )


TABLE = Table("tab:ablation", ("ablation",), build)
