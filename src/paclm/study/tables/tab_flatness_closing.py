"""`tab:flatness-closing`: the arithmetic by which flat accuracy follows from the flips (`sec:stability-utility`)."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_LINES: tuple[tuple[str, str, str, str, float | None, float | None], ...] = (
    # name, column, at which budget, style, greedy and Gumbel in the paper
    ("dissent fraction", "dissent_fraction", "2^-32", ".4f", 0.1460, 0.1611),
    ("mean distinct votes ā | dissent", "mean_distinct_given_dissent", "2^-32", ".2f", None, 2.19),
    ("flip limit 1 − 1/ā", "flip_limit", "2^-32", ".3f", None, 0.543),
    ("mean of 1 − 1/a", "flip_limit_per_position", "2^-32", ".3f", None, None),
    ("flip | dissent at 2^-4", "flip_dissent", "2^-4", ".3f", 0.256, 0.260),
    ("flip | dissent at 2^-32", "flip_dissent", "2^-32", ".3f", 0.521, 0.521),
    ("accuracy | dissent, no noise", "accuracy_dissent", "inf", ".4f", None, 0.1473),
    ("accuracy | dissent at 2^-32", "accuracy_dissent", "2^-32", ".4f", None, 0.1400),
    ("Δ accuracy | dissent", "change_dissent", "2^-32", ".4f", None, -0.0072),
    ("dissent fraction × Δ | dissent", "change_by_arithmetic", "2^-32", ".5f", None, -0.00116),
    ("Δ accuracy, observed", "change", "2^-32", ".5f", -0.00060, -0.00116),
    ("no vote for the truth | dissent", "truth_not_voted_given_dissent", "2^-32", ".1%", None, 0.70),
    ("f: majority right | truth voted", "majority_right_given_voted", "2^-32", ".3f", None, 0.52),
    ("Δ accuracy | majority right", "change_majority_right", "2^-32", ".1%", None, -0.341),
    ("Δ accuracy | majority wrong", "change_majority_wrong", "2^-32", ".1%", None, 0.318),
)


def build(results: Mapping[str, Result]) -> TableData:
    """One line per quantity, one column per decoder and collection."""
    result = results["flatness"]
    columns = sorted({(row["decoder"], row["collection"]) for row in result.rows})
    rows: list[list[Cell | str]] = []
    for name, value, budget, style, *paper in _LINES:
        cells: list[Cell] = []
        for decoder, collection in columns:
            row = result.one(decoder=decoder, collection=collection, budget=budget)
            theirs = paper[decoder == "gumbel"] if collection == 1 else None
            cells.append(Cell(row[value], row.get(f"{value}_stderr"), theirs, style))
        rows.append([name, *cells])
    headings = [decoder if number == 1 else f"{decoder}, collection {number}" for decoder, number in columns]
    return TableData(
        "What noise can do to accuracy. Worlds differ at a fraction of positions; only there does it change a token, "
        "and in the end the release ignores the vote. Majority lines are over positions with dissent and a vote for "
        "the truth. The dissent fraction times the change there is the observed change, by construction. In brackets: "
        "the paper.",
        ["", *headings],
        rows,
    )


TABLE = Table("tab:flatness-closing", ("flatness",), build)
