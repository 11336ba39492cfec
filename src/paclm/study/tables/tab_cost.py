"""`sec:cost` as tables: where the time of a token goes."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_LINES: tuple[tuple[str, str, str, float, float | None], ...] = (  # name, column, style, divided by, the paper's
    ("forward pass of all worlds (ms a step)", "forward_ms", ".2f", 1, 29.71),
    ("mechanism (ms a token)", "mechanism_ms", ".3f", 1, 0.223),
    ("mechanism ÷ (forward + mechanism)", "mechanism_share", ".2%", 1, 0.0074),
    ("ledger, durable (ms a step)", "ledger_ms", ".2f", 1, None),
    ("tokens a second, ledger included", "tokens_per_second", ".1f", 1, None),
    ("tokens a second, without ledger", "tokens_per_second_without_ledger", ".1f", 1, 33.4),
    ("peak memory (GB)", "memory_bytes", ".2f", 1e9, 2.23),
    ("one model (ms a step)", "one_model_ms", ".2f", 1, 5.92),
    ("all worlds ÷ one model", "times_one_model", ".1f", 1, 5.0),
    ("worlds one by one ÷ all at once", "cheaper_than_one_by_one", ".1f", 1, 25.5),
)


def build(results: Mapping[str, Result]) -> TableData:
    """One line per quantity, one column per number of sequences; the paper has one sequence."""
    result = results["cost"]
    serving = [row for row in result.rows if row["what"] == "serving"]
    rows: list[list[Cell | str]] = []
    for name, column, style, unit, paper in _LINES:
        cells = [
            Cell(
                None if row[column] is None else row[column] / unit,
                None,
                paper if row["sequences"] == 1 else None,
                style,
            )
            for row in serving
        ]
        rows.append([name, *cells])
    columns = [f"{row['sequences']} sequence{'s' if row['sequences'] > 1 else ''}" for row in serving]
    return TableData(
        f"What a private token costs with {serving[0]['worlds']} worlds ({result.provenance.get('machine')}). "
        "In brackets: the paper, 128 worlds of GPT-2-small on an H100.",
        ["", *columns],
        rows,
        tuple(result.notes),
    )


TABLE = Table("tab:cost", ("cost",), build)
