"""Membership in the universe; not in the paper, and not covered by the guarantee."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_SOURCES = {
    "adapters": "holds all adapters",
    "released": "reads released text (2^-16 a token)",
    "full": "reads text of the full-corpus adapter (not private)",
}
_ATTACKS = {
    "loss": "loss",
    "reference": "loss against the public model",
    "min-k": "least likely 20 % of tokens",
    "spread": "spread over worlds",
    "overlap": "shared 1- to 3-grams",
    "surrogate": "surrogate model",
}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per attacker, score and collection."""
    found = results["universe"].select(part="score")
    rows: list[list[Cell | str]] = [
        [
            _SOURCES[row["source"]] + (f", collection {row['collection']}" if row["collection"] != 1 else ""),
            _ATTACKS[row["attack"]],
            Cell(row["auc"], row["auc_stderr"], style=".3f"),
            Cell(row["true_positives"], row["true_positives_stderr"], style=".1%"),
        ]
        for row in found
    ]
    return TableData(
        f"Is a record in the corpus at all? {found[0]['members']} members against {found[0]['others']} held-out "
        "records. The guarantee does not speak about this.",
        ("attacker", "score", "AUC", "members found at 1 % false positives"),
        rows,
        results["universe"].notes,
    )


TABLE = Table("tab:universe", ("universe",), build)
