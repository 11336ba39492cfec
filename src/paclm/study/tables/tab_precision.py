"""float32 against bfloat16; not in the paper."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per decoder and quantity."""
    rows: list[list[Cell | str]] = []
    for row in results["precision"].rows:
        for name in ("unanimity", "accuracy"):
            rows.append(
                [
                    f"{row['decoder']}, {name}",
                    Cell(row[f"{name}_float32"], style=".2%"),
                    Cell(row[f"{name}_bfloat16"], style=".2%"),
                    Cell(row[f"{name}_difference"], row[f"{name}_stderr"], style=".3%"),
                ]
            )
    count = results["precision"].rows[0]["positions"]
    return TableData(
        f"The same {count:,} positions, coins and adapters in two arithmetics; accuracy is the mean over worlds.",
        ("", "float32", "bfloat16", "difference"),
        rows,
    )


TABLE = Table("tab:precision", ("precision",), build)
