"""`tab:accuracy`: teacher-forced accuracy, decomposed."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_LINES = (  # name, value, error, greedy and Gumbel in the paper
    ("public model", "accuracy_public", "stderr_public", 0.3816, 0.2556),
    ("full corpus (not private)", "accuracy_full", "stderr_full", 0.4392, 0.3149),
    ("b = ∞ (subsampled, no noise)", "accuracy_noiseless", "stderr_noiseless", 0.4281, 0.3068),
    ("PAC at b = 2^-32", "accuracy_private", "stderr_private", 0.4244, 0.3057),
    ("fine-tuning gain", "gain_points", "gain_stderr", 0.0576, 0.0593),
    ("subsampling cost", "subsampling_points", "subsampling_stderr", -0.0111, -0.0081),
    ("noise cost", "noise_points", "noise_stderr", -0.0037, -0.0012),
    ("retained gain", "retained_gain", "retained_gain_stderr", 0.743, 0.844),
)


def build(results: Mapping[str, Result]) -> TableData:
    """One line per quantity, one column per decoder and collection."""
    result = results["accuracy"]
    found = [result.select(decoder=decoder, budget="2^-32") for decoder in ("greedy", "gumbel")]
    columns: list[str] = [""]
    rows: list[list[Cell | str]] = []
    for decoder, own in zip(("greedy", "coupled Gumbel"), found, strict=True):
        columns += [decoder if row["collection"] == 1 else f"{decoder}, collection {row['collection']}" for row in own]
    for name, value, error, *paper in _LINES:
        cells = [
            Cell(row[value], row.get(error), paper[i] if row["collection"] == 1 else None, ".2%")
            for i, own in enumerate(found)
            for row in own
        ]
        rows.append([name, *cells])
    greedy, gumbel = (own[0]["positions"] for own in found)
    return TableData(
        f"Teacher-forced next-token accuracy on {greedy:,} (greedy) and {gumbel:,} (Gumbel) positions. Decoders are "
        "not comparable with each other. Gains and costs are in percentage points, errors over passages. In brackets: "
        "the paper.",
        columns,
        rows,
    )


TABLE = Table("tab:accuracy", ("accuracy",), build)
