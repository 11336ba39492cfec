"""`tab:releases`: every release at every budget, charged both ways."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.regimes.releases import TARGET
from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per release, budget and collection."""
    result = results["releases"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        name = row["release"] if row["collection"] == 1 else f"{row['release']} (collection {row['collection']})"
        rows.append(
            [
                name,
                row["budget"] or "–",
                Cell(row["accuracy"], row["accuracy_stderr"], None, ".2%"),
                Cell(row["retained_gain"], row["retained_gain_stderr"], None, ".0%"),
                Cell(row.get("lead_points"), row.get("lead_stderr"), None, ".2%"),
                Cell(row["leaked_nats"], row["leaked_stderr"], None, ".3g"),
                Cell(row["leaked_nats_by_truth"], row["leaked_stderr_by_truth"], None, ".3g"),
                Cell(row["can_tell_nats"], None, None, ".3g"),
                Cell(row["charged_every_token"], None, None, ".3g"),
                Cell(row["charged_dissent"], None, None, ".3g"),
                _until(row["reads_secret"], row["tokens_until_every_token"]),
                _until(row["reads_secret"], row["tokens_until_dissent"]),
            ]
        )
    first = result.rows[0]
    return TableData(
        f"All releases, coupled Gumbel votes: {first['sessions']} sessions of {first['tokens_per_session']:,} tokens; "
        "errors of the first three columns are over passages of the text; the lead is over gaussian at 2^-32, paired; "
        "nats are per session: leak by the belief's entropy, by its value at the secret, and Σ I, the sum of what each "
        "step can tell (exact for channel, an upper bound for gaussian, what the release declares for others). Last "
        f"columns: tokens until a total that bounds membership inference at {TARGET:.0%} is used up (under dissent: "
        "expected at the rate seen here).",
        [
            "release", "b", "accuracy", "retained gain", "lead in accuracy", "leak (entropy)", "leak (truth)", "Σ I",
            "charged: every token", "charged: dissent", f"tokens to {TARGET:.0%}: every token",
            f"tokens to {TARGET:.0%}: dissent",
        ],
        rows,
        tuple(result.notes),
    )  # fmt: skip


def _until(reads_secret: bool, tokens: int | None) -> Cell | str:
    return Cell(tokens) if reads_secret else "no end"


TABLE = Table("tab:releases", ("releases",), build)
