"""What tokens alone tell, beside the whole history; not in the paper."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData


def build(results: Mapping[str, Result]) -> TableData:
    """One line per release and budget."""
    found = results["tokens_only"].select(collection=1)
    rows: list[list[Cell | str]] = [
        [
            f"{row['release']}, {row['budget']}",
            Cell(row["charged_nats"], style=".3g"),
            Cell(row["leaked_history_nats"], row["leaked_history_stderr"], style=".3g"),
            Cell(
                row["leaked_tokens_nats"], row["leaked_tokens_stderr"], style=".3g", mark="" if row["is_exact"] else "†"
            ),
            Cell(row["tokens_over_history"], row["tokens_over_history_stderr"], style=".1%"),
            Cell(row["world_history"], style=".1%"),
            Cell(row["world_tokens"], style=".1%"),
            Cell(row["membership_history"], row["membership_history_stderr"], style=".1%"),
            Cell(row["membership_tokens"], row["membership_tokens_stderr"], style=".1%"),
        ]
        for row in found
    ]
    first = found[0]
    return TableData(
        f"What the tokens tell beside what the history tells: {first['sessions']} sessions of {first['tokens']:,} "
        "tokens, Gumbel votes on test text, uniform belief at the start. Leaks in nats; attacks as success rates.",
        (
            "release, b",
            "charged",
            "leak of the history",
            "leak of the tokens",
            "tokens ÷ history",
            "world found, history",
            "world found, tokens",
            "membership, history",
            "membership, tokens",
        ),
        rows,
        (
            "†: a lower bound in expectation, log m + E log q(S | tokens), reached by an attack that can be carried "
            "out (a particle filter over the curator's hidden beliefs). The truth lies between it and the history's.",
            "channel: exact, tokens and history are the same.",
        ),
    )


TABLE = Table("tab:tokens-only", ("tokens_only",), build)
