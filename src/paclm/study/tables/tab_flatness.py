"""`tab:flatness`: noise, flips and accuracy at every budget."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_COLUMNS = (  # heading, value, error, style
    ("σ median", "sigma_median", None, ".3g"),
    ("σ max", "sigma_max", None, ".3g"),
    ("accuracy", "accuracy", "accuracy_stderr", ".4f"),
    ("flip (all)", "flip", None, ".4f"),
    ("flip | unanimous", "flip_unanimous", None, ".4f"),
    ("flip | dissent", "flip_dissent", "flip_dissent_stderr", ".4f"),
)
_PAPER: dict[str, tuple[float, ...]] = {  # coupled Gumbel
    "inf": (0, 0, 0.3063, 0.0, 0.0, 0.0),
    "2^-4": (1.29, 2.84, 0.3058, 0.0419, 0.0, 0.2600),
    "2^-8": (5.15, 11.3, 0.3053, 0.0715, 0.0, 0.4442),
    "2^-16": (82.3, 182, 0.3051, 0.0835, 0.0, 0.5181),
    "2^-24": (1.32e3, 2.91e3, 0.3051, 0.0848, 0.0, 0.5262),
    "2^-32": (2.11e4, 4.65e4, 0.3051, 0.0839, 0.0, 0.5206),
}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per decoder, budget and collection."""
    result = results["flatness"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        paper: tuple[float | None, ...] = (None,) * len(_COLUMNS)
        if row["collection"] == 1 and row["decoder"] == "gumbel":
            paper = _PAPER.get(row["budget"], paper)
        name = row["decoder"] if row["collection"] == 1 else f"{row['decoder']}, collection {row['collection']}"
        cells = [
            Cell(row[value], row[error] if error and row["budget"] != "inf" else None, theirs, style)
            for (_, value, error, style), theirs in zip(_COLUMNS, paper, strict=True)
        ]
        rows.append([name, "∞" if row["budget"] == "inf" else row["budget"], *cells])
    return TableData(
        f"Budget flatness: {result.scale['positions']:,} teacher-forced positions × {result.scale['draws']} draws. σ "
        "is the square root of the largest eigenvalue of the noise covariance, over positions where worlds differ; a "
        "flip is a released token that is not the realized world's vote. In brackets: the paper (coupled Gumbel).",
        ["decoder", "b", *(heading for heading, *_ in _COLUMNS)],
        rows,
    )


TABLE = Table("tab:flatness", ("flatness",), build)
