"""`tab:pmixed-val`: does this PMixED behave like the authors'? No sampling, the hardest place to show a gain."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Cell, Table, TableData

_PAPER = {
    8: (0.2459, 27.19, 0.0021, 0.151, 0.037),
    16: (0.2471, 26.68, 0.0033, 0.221, 0.069),
    32: (0.2480, 26.20, 0.0042, 0.334, 0.118),
}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per number of shards."""
    found = results["pmixed"].select(kind="validation")
    rows: list[list[Cell | str]] = []
    for row in found:
        paper = _PAPER.get(row["num_shards"], (None,) * 5)
        rows.append(
            [
                str(row["num_shards"]),
                Cell(row["accuracy"], None, paper[0], ".4f"),
                Cell(row["perplexity"], None, paper[1], ".2f"),
                Cell(row["gain"], None, paper[2], "+.4f"),
                f"[{row['gain_low']:+.4f}, {row['gain_high']:+.4f}]",
                Cell(row["mean_weight"], None, paper[3], ".3f"),
                Cell(row["headroom"], row["headroom_stderr"], paper[4], ".1%"),
                Cell(row["least_probability"], style=".1e"),
            ]
        )
    first = found[0]
    return TableData(
        "PMixED without sampling at a generous ε = 2, T = 1024, order 2. Public model: accuracy "
        f"{first['accuracy_public']:.4f}, perplexity {first['perplexity_public']:.2f}. Accuracy: the mean probability "
        "of the true token; headroom is the share of the plain average's gain that survives. Interval and error are "
        "over passages of the text. In brackets: the paper.",
        ("N", "accuracy", "perplexity", "gain", "95% interval", "mean λ", "headroom", "least probability"),
        rows,
        [] if not any(row["is_at_floor"] for row in found) else ["A probability sits at the numerical floor."],
    )


TABLE = Table("tab:pmixed-val", ("pmixed",), build)
