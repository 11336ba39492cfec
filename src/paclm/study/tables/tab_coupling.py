"""Coupled against uncoupled training; not in the paper, which trains coupled."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result, Row
from paclm.study.table import Cell, Table, TableData

_LINES = (  # name, column, style
    ("unanimity", "unanimity", ".1%"),
    ("distinct votes given dissent", "distinct_given_dissent", ".2f"),
    ("their 95th percentile", "distinct_p95", ".0f"),
    ("accuracy of a world", "accuracy_world", ".2%"),
    ("accuracy released at 2^-32", "accuracy_private", ".2%"),
    ("retained gain at 2^-32", "retained_gain", ".1%"),
)


def build(results: Mapping[str, Result]) -> TableData:
    """One line per quantity, one column per decoder and way of training."""
    result = results["coupling"]
    ways = ["coupled", "uncoupled"]
    if result.select(training="difference"):  # paired; results of earlier versions lack it
        ways.append("difference")
    pairs = [(decoder, way) for decoder in ("greedy", "gumbel") for way in ways]
    rows: list[list[Cell | str]] = []
    for name, column, style in _LINES:
        found = [result.one(decoder=decoder, training=way, collection=1) for decoder, way in pairs]
        rows.append([name, *(_cell(row, column, style) for row in found)])
    ceilings = {way: result.one(decoder="any", training=way, collection=1) for way in ("coupled", "uncoupled")}
    cells = [_cell(ceilings.get(way, {}), "ceiling", ".3f") for _, way in pairs]
    rows.append(["coupling ceiling β (τ = 1)", *cells])
    return TableData(
        "The same worlds trained from one start in one order (coupled), and each from its own start in its own order "
        "(uncoupled). Same text, coins, secrets and noise. The ceiling is over other positions than the rows above it: "
        "the first few of every held-out record, where little is settled.",
        ("", *(f"{decoder}, {way}" for decoder, way in pairs)),
        rows,
    )


def _cell(row: Row, column: str, style: str) -> Cell | str:
    """A value with its error; not everything has a difference."""
    return Cell(row[column], row.get(f"{column}_stderr"), style=style) if column in row else "–"


TABLE = Table("tab:coupling", ("coupling",), build)
