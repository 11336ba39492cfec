"""`tab:pmixed-neighbours`: every method on the same first queries of the text, each with its own guarantee."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result, Row
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per method."""
    found = results["pmixed"].select(kind="neighbour")
    rows: list[list[Cell | str]] = [
        [
            row["method"],
            Cell(row["accuracy"], row["stderr"], style=".4f"),
            *_beside(row),
            Cell(row["epsilon"], style=".3g"),
            Cell(row["private_share"], style=".0%"),
            row["guarantee"],
        ]
        for row in found
    ]
    first = found[0]
    return TableData(
        f"The first {first['queries']:,} positions of the test text as {first['queries']:,} queries. Disjoint shards: "
        f"N = {first['num_shards']}. Public and ceiling are each method's own: over the vocabulary for mixtures of "
        "distributions, with coupled coins in the top 200 for PAC. Errors are over passages of the text, of which so "
        "few positions have very few: they are rough.",
        ("method", "accuracy", "public", "ceiling", "headroom", "ε", "private answers", "what its guarantee is"),
        rows,
        [
            "ε of PAC is the one its bound on membership inference is matched to. Data-dependent ε are computed from "
            "private records and may not be published as they stand.",
            "GNMax chooses among the public top 200 alone, so that neither public model nor ceiling is its own.",
        ],
    )


def _beside(row: Row) -> list[Cell | str]:
    """What a method is measured by, if it is the method's own: public model, ceiling, headroom."""
    if row["method"].startswith("GNMax"):
        return ["–"] * 3
    return [
        Cell(row["accuracy_public"], style=".4f"),
        Cell(row["accuracy_ceiling"], style=".4f"),
        Cell(row["headroom"], row["headroom_stderr"], style=".1%"),
    ]


TABLE = Table("tab:pmixed-neighbours", ("pmixed",), build)
