"""`tab:census`: how stable worlds are, and what the support leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_COLUMNS = (  # heading, value, error, style
    ("unanimity", "unanimity", "unanimity_stderr", ".3f"),
    ("median a", "median_distinct", None, ".0f"),
    ("p95 a", "p95_distinct", None, ".0f"),
    ("argmax coverage", "argmax_coverage", "argmax_coverage_stderr", ".3f"),
    ("mass coverage", "mass_coverage", "mass_coverage_stderr", ".3f"),
    ("median mass", "mass_coverage_median", None, ".3f"),
    ("p5 mass", "mass_coverage_p5", None, ".3f"),
    ("β", "ceiling", "ceiling_stderr", ".3f"),
)
_PAPER: dict[int, tuple[float | None, ...]] = {
    50: (0.835, 1, 2, 0.974, 0.799, None, None, 0.881),
    200: (0.834, 1, 2, 0.986, 0.885, 0.931, 0.615, 0.878),
    1000: (0.827, 1, 2, 0.995, 0.953, None, None, 0.874),
}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per support size and collection."""
    result = results["census"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        first = row["collection"] == 1
        paper = _PAPER.get(row["support_size"], (None,) * len(_COLUMNS)) if first else (None,) * len(_COLUMNS)
        name = f"{row['support_size']:,}" if first else f"{row['support_size']:,} (collection {row['collection']})"
        cells = [
            Cell(row[value], row[error] if error else None, theirs, style)
            for (_, value, error, style), theirs in zip(_COLUMNS, paper, strict=True)
        ]
        rows.append([name, Cell(row["positions"], paper=_positions(row["support_size"]) if first else None), *cells])
    return TableData(
        f"Stability census, greedy votes of {result.rows[0]['worlds']} worlds. a: distinct votes at a position. "
        "Coverage is averaged over worlds; median and 5th percentile are over positions. β: the largest probability "
        "with which any coupling could make all worlds agree, on the renormalised support. In brackets: the paper.",
        ["k", "positions", *(heading for heading, *_ in _COLUMNS)],
        rows,
        tuple(result.notes),
    )


def _positions(size: int) -> int | None:
    return {50: 65_053, 200: 65_053, 1000: 19_982}.get(size)


TABLE = Table("tab:census", ("census",), build)
