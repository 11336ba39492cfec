"""`tab:canary`: membership advantage of one token under forced memorization."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result, Row
from paclm.study.table import Cell, Table, TableData

_PAPER = {  # greedy and Gumbel, the paper's two canaries
    "inf": ((1.000, 1.000), (0.999, 1.000)),
    "2^-4": ((0.281, 0.260), (0.281, 0.261)),
    "2^-8": ((0.092, 0.120), (0.058, 0.109)),
    "2^-16": ((-0.003, 0.006), (-0.017, -0.007)),
}
_OTHERS = {"agree": "", "own": ", others as they vote"}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per budget, one column per decoder and canary; then the same with the other worlds voting freely."""
    result = results["canaries"]
    forced = result.select(part="forced", collection=1)
    canaries = list(dict.fromkeys(row["canary"] for row in forced))
    columns = ["b"]
    for decoder in ("greedy", "Gumbel"):
        columns += [f"{decoder}, canary {i + 1}" for i in range(len(canaries))]
    rows: list[list[Cell | str]] = []
    for others, words in _OTHERS.items() if canaries else ():  # no payload in any support: none can be forced
        for budget, paper in _PAPER.items():
            line: list[Cell | str] = [("no noise" if budget == "inf" else budget) + words]
            for d, decoder in enumerate(("greedy", "gumbel")):
                for i, canary in enumerate(canaries):
                    row = result.one(
                        part="forced", collection=1, decoder=decoder, canary=canary, others=others, budget=budget
                    )
                    theirs = paper[d][i] if others == "agree" and i < 2 else None
                    line.append(Cell(row["advantage"], row["advantage_stderr"], theirs, ".3f", _mark(row)))
            theory = next(row["advantage_even_split"] for row in forced if row["budget"] == budget)
            line.append(Cell(theory, style=".4f") if others == "agree" else "")
            low, high = _emission(forced, others, budget)
            rows.append([*line, f"{low:.0%} – {high:.0%}"])
    trials = forced[0]["trials"] if forced else 0
    return TableData(
        f"Forced memorization: P(emit | member) − P(emit | not) of one token, {trials:,} trials per cell, uniform "
        "belief; beside it 2Φ(√(2b)) − 1 and the range of emission rates under both hypotheses. In brackets: the "
        "paper.",
        [*columns, "theory (even split)", "payload emitted"],
        rows,
        (
            "†: the 95 % interval contains zero.",
            "Lines without a remark: worlds that do not hold the canary vote as most of them do, so the split is even. "
            "Where they vote as they like, a third candidate takes part of the noise: fewer emissions, less advantage.",
        ),
    )


def _mark(row: Row) -> str:
    return "†" if abs(row["advantage"]) < 1.96 * row["advantage_stderr"] else ""


def _emission(forced: list[Row], others: str, budget: str) -> tuple[float, float]:
    rows = [row for row in forced if row["others"] == others and row["budget"] == budget]
    rates = [row[name] for row in rows for name in ("emitted_member", "emitted_other")]
    return (min(rates), max(rates)) if rates else (0.0, 0.0)


TABLE = Table("tab:canary", ("canaries",), build)
