"""`tab:session`: what long sessions were charged and what they told."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.regimes.sessions import spread_of_ratio
from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_PAPER = {  # budget and horizon: leak, leak ÷ charge, membership and its bound, world and its bound
    ("2^-16", 64): (1.83e-4, 0.188, 0.504, 0.522, 0.000, 0.012),
    ("2^-16", 1024): (2.67e-3, 0.171, 0.503, 0.588, 0.000, 0.028),
    ("2^-16", 4096): (1.08e-2, 0.173, 0.506, 0.675, 0.030, 0.056),
    ("2^-20", 4096): (6.72e-4, 0.172, 0.502, 0.544, 0.010, 0.017),
    ("2^-24", 4096): (4.23e-5, 0.173, 0.497, 0.511, 0.010, 0.010),
}
_COLUMNS = [
    "b",
    "T",
    "charged (nats)",
    "leak, by entropy",
    "leak, by truth",
    "Σ of steps",
    "leak ÷ charged",
    "dissent",
    "difference",
    "membership",
    "bound",
    "world",
    "bound ",
]


def build(results: Mapping[str, Result]) -> TableData:
    """One line per budget and horizon."""
    result = results["sessions"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        paper = _PAPER.get((row["budget"], row["horizon"]), (None,) * 6) if row["collection"] == 1 else (None,) * 6
        name = row["budget"] if row["collection"] == 1 else f"{row['budget']}, collection {row['collection']}"
        rows.append(
            [
                name,
                Cell(row["horizon"]),
                Cell(row["charged_nats"], style=".2e"),
                Cell(row["leaked_nats"], row["leaked_stderr"], paper[0], ".2e"),
                Cell(row["leaked_by_truth_nats"], row["leaked_by_truth_stderr"], style=".2e"),
                Cell(row["step_information_nats"], style=".2e"),
                Cell(row["leaked_over_charged"], row["leaked_over_charged_stderr"], paper[1], ".2%"),
                Cell(row["dissent"], row["dissent_stderr"], style=".2%"),
                Cell(row["gap"], row["gap_stderr"], style=".2%"),
                Cell(row["membership_rate"], row["membership_stderr"], paper[2], ".3f"),
                Cell(row["membership_bound"], paper=paper[3], style=".3f", is_bound=True),
                Cell(row["world_rate"], row["world_stderr"], paper[4], ".3f"),
                Cell(row["world_bound"], paper=paper[5], style=".3f", is_bound=True),
            ]
        )
    count = result.rows[0]["sessions"]
    notes = [
        "Leak: I(S; H_T) of the whole history, estimated from the entropy of the beliefs and, beside it, from the "
        "belief in the realized world; the two agree when the belief is the true posterior. Difference: leak ÷ charged "
        "less the dissent of the same sessions up to the same horizon, session by session.",
    ]
    spread = spread_of_ratio(result.select(collection=1))
    if spread is not None:
        notes.append(
            f"Across budgets, whose sessions are independent, leak ÷ charged at the longest horizon has a standard "
            f"deviation of {100 * spread:.3f} percentage points (the paper: 0.061)."
        )
    return TableData(
        f"Persistent-secret sessions, coupled Gumbel, {count} sessions per budget; errors are over sessions (none "
        "can be told from a rate of zero). Membership and world: how often an attack guesses right, and its bound, "
        "rounded up. In brackets: the paper.",
        _COLUMNS,
        rows,
        notes,
    )


TABLE = Table("tab:session", ("sessions",), build)
