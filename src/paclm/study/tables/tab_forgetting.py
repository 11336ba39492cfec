"""`tab:forgetting`: a curator who tracks the belief against one who calibrates to the prior for ever."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per budget, horizon, curator and collection."""
    rows: list[list[Cell | str]] = []
    for row in results["forgetting"].rows:
        name = row["curator"] if row["collection"] == 1 else f"{row['curator']} (collection {row['collection']})"
        rows.append(
            [
                row["budget"],
                f"{row['tokens']:,}",
                name,
                Cell(row["leaked_nats"], row["leaked_stderr"], None, ".3g"),
                Cell(row["leaked_nats_by_truth"], row["leaked_stderr_by_truth"], None, ".3g"),
                Cell(row["can_tell_nats"], row["can_tell_stderr"], None, ".3g"),
                Cell(row["can_tell_over_charged_most"], None, None, ".3f"),
                Cell(row["charged_dissent_nats"], None, None, ".3g"),
                Cell(row["world_id_rate"], None, None, ".1%"),
                Cell(row["accuracy"], row["accuracy_stderr"], None, ".2%"),
            ]
        )
    return TableData(
        "Noise calibrated to the belief (tracking) against noise for the uniform prior at every step (forgetting). The "
        "onlooker's belief is exact in both. Σ I: what the steps can have told, a Gaussian bound at the belief of the "
        "moment; for the tracking curator it is what is charged where worlds differ, for the forgetting one nothing "
        "holds it below (worst: the session with the largest ratio). Horizons and curators share secrets.",
        [
            "b", "tokens", "curator", "leak (entropy)", "leak (truth)", "Σ I", "worst Σ I ÷ charged",
            "charged: dissent", "world found", "accuracy",
        ],
        rows,
    )  # fmt: skip


TABLE = Table("tab:forgetting", ("forgetting",), build)
