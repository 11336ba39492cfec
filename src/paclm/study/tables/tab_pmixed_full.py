"""`tab:pmixed-full`: PAC and PMixED at one bound on membership inference, ε ≈ 1."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.privacy.bounds import round_up
from paclm.study.results import Result, Row
from paclm.study.table import Cell, Table, TableData

Line = tuple[float, int, int, float, float, float, float]
"""accuracy, N, order, rate, empty, λ, headroom"""

_PAC = {
    100: (0.3089, 0.984),
    1000: (0.3086, 0.980),
    10**4: (0.3086, 0.981),
    10**5: (0.3086, 0.980),
    10**6: (0.3086, 0.98),
}
_PMIXED: Mapping[tuple[str, int], Line] = {
    ("rigorous", 10**2): (0.25550, 32, 16, 0.02, 0.524, 0.626, 0.330),
    ("rigorous", 10**3): (0.25205, 32, 32, 0.01, 0.728, 0.743, 0.233),
    ("rigorous", 10**4): (0.24695, 32, 64, 0.005, 0.856, 0.685, 0.089),
    ("rigorous", 10**5): (0.24482, 32, 64, 0.001, 0.971, 0.970, 0.029),
    ("rigorous", 10**6): (0.24413, 32, 64, 0.0005, 0.984, 0.773, 0.009),
    ("generous", 10**2): (0.26355, 32, 2, 0.05, 0.190, 0.927, 0.557),
    ("generous", 10**3): (0.25691, 32, 2, 0.03, 0.373, 0.887, 0.370),
    ("generous", 10**4): (0.25062, 32, 2, 0.02, 0.525, 0.767, 0.193),
    ("generous", 10**5): (0.24648, 32, 2, 0.01, 0.724, 0.649, 0.076),
    ("generous", 10**6): (0.24487, 32, 2, 0.005, 0.850, 0.483, 0.030),
}
_COLUMNS = (
    *("T", "b (nats)", "method", "accuracy", "headroom", "N", "order", "q", "f∅", "mean λ"),
    *("accuracy in the top 200", "δ of an example"),
)


def build_at(
    result: Result,
    epsilon: float,
    pac: Mapping[int, tuple[float, float]],
    pmixed: Mapping[tuple[str, int], Line],
) -> TableData:
    """One line per horizon and method at one ε; the paper's release is `gaussian`."""
    rows: list[list[Cell | str]] = []
    for queries in sorted({row["queries"] for row in result.select(kind="pac", epsilon=epsilon)}):
        for row in result.select(kind="pac", epsilon=epsilon, queries=queries):
            rows.append(
                _pac_line(row, pac.get(queries, (None, None)) if row["release"] == "gaussian" else (None, None))
            )
        for row in result.select(kind="matched", epsilon=epsilon, queries=queries, is_selected=True):
            rows.append(_pmixed_line(row, pmixed.get((row["reading"], queries), (None,) * 7)))
    ensembles = result.select(kind="ensemble")
    first = ensembles[0]
    ceilings = ", ".join(f"{row['accuracy_ceiling']:.4f} (N = {row['num_shards']})" for row in ensembles)
    bound = result.select(kind="pac", epsilon=epsilon)[0]
    return TableData(
        f"Matched at a bound of {round_up(bound['mia_bound'], 4)} on membership inference from even odds "
        f"(ε = {epsilon:g}, δ = 1e-5; {bound['per_token_nats'] * bound['queries']:.3f} nats). Headroom: of the "
        "selected configuration's own ceiling. Errors are over passages of the text. In brackets: the paper.",
        _COLUMNS,
        rows,
        [
            f"Public model: {first['accuracy_public']:.4f} over the vocabulary, {first['accuracy_public_inside']:.4f} "
            f"in its top 200 (exact), {bound['accuracy_public']:.4f} with PAC's coins. Ceilings: PAC "
            f"{bound['accuracy_ceiling']:.4f}; PMixED {ceilings}.",
            "δ of an example: what a two-token ensemble reaches at this operating point, exactly; marked † where it is "
            "more than the δ that is promised. The generous reading promises none.",
        ],
    )


def _pac_line(row: Row, paper: tuple[float | None, float | None]) -> list[Cell | str]:
    return [
        f"{row['queries']:,}",
        f"{row['per_token_nats']:.2e}",
        f"PAC, {row['release']}",
        Cell(row["accuracy"], row["stderr"], paper[0], ".4f"),
        Cell(row["headroom"], row["headroom_stderr"], paper[1], ".1%"),
        *("", "", "", "", ""),
        Cell(row["accuracy"], style=".4f"),
        "",
    ]


def _pmixed_line(row: Row, paper: Line | tuple[None, ...]) -> list[Cell | str]:
    is_broken = row["reading"] != "generous" and row["delta_of_example"] > row["delta"]
    return [
        f"{row['queries']:,}",
        "",
        f"PMixED, {row['reading']}",
        Cell(row["accuracy"], row["stderr"], paper[0], ".5f"),
        Cell(row["headroom"], row["headroom_stderr"], paper[6], ".1%"),
        Cell(row["num_shards"], None, paper[1]),
        Cell(row["order"], None, paper[2]),
        Cell(row["rate"], None, paper[3], ".4g"),
        Cell(row["empty"], None, paper[4], ".3f"),
        Cell(row["mean_weight"], None, paper[5], ".3f"),
        Cell(row["accuracy_inside"], style=".5f"),
        Cell(row["delta_of_example"], style=".1e", mark="†" if is_broken else ""),
    ]


def build(results: Mapping[str, Result]) -> TableData:
    """At ε = 1."""
    return build_at(results["pmixed"], 1.0, _PAC, _PMIXED)


TABLE = Table("tab:pmixed-full", ("pmixed",), build)
