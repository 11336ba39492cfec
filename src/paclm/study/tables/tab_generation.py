"""`tab:generation`: the numbers behind `fig:degeneracy`."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result, Row
from paclm.study.table import Cell, Table, TableData

_PAPER = {  # source, decoder, budget and length: rep-3, distinct-1, perplexity ratio, unanimity
    ("private", "greedy", "2^-16", 16): (None, None, "1.13–1.19", 0.825),
    ("private", "greedy", "2^-16", 64): (None, None, None, 0.887),
    ("private", "greedy", "2^-16", 256): (0.825, None, "1.06–1.09", 0.961),
    ("public", "greedy", None, 256): (0.831, None, None, None),
    ("full", "greedy", None, 256): (0.836, None, None, None),
    ("private", "gumbel", "2^-16", 256): (0.053, 0.574, "1.11–1.16", None),
    ("private", "gumbel", "2^-24", 256): (0.050, 0.571, "1.11–1.16", None),
    ("human", None, None, 256): (0.047, 0.573, None, None),
}
_NAMES = {"private": "private", "public": "public model", "full": "full corpus (not private)", "human": "human text"}


def build(results: Mapping[str, Result]) -> TableData:
    """One line per source, decoder and length."""
    result = results["generation"]
    rows: list[list[Cell | str]] = []
    for row in result.rows:
        key = (row["source"], row["decoder"], row["budget"], row["length"])
        paper = _PAPER.get(key, (None,) * 4) if row["collection"] == 1 else (None,) * 4
        rows.append(
            [
                _name(row),
                Cell(row["length"]),
                Cell(row["rep3"], row["rep3_stderr"], paper[0], ".3f"),
                Cell(row["distinct1"], row["distinct1_stderr"], paper[1], ".3f"),
                Cell(row["perplexity"], row["perplexity_stderr"], style=".2f"),
                Cell(row["ratio"], row["ratio_stderr"], paper[2], ".3f"),
                Cell(row.get("unanimity"), row.get("unanimity_stderr"), paper[3], ".3f"),
            ]
        )
    return TableData(
        f"Generated text by length, {result.rows[0]['sequences']} sequences each; errors by a bootstrap over "
        "sequences. Perplexity is the public model's; its ratio is to the full-corpus model's text under the same "
        "decoder at equal length. In brackets: the paper.",
        ["text", "T", "rep-3", "distinct-1", "perplexity", "ratio", "unanimity"],
        rows,
        [
            "Under greedy decoding unanimity rises with T and the ratio falls, because text falls into loops: a low "
            "measured cost at long lengths is no merit of the mechanism.",
        ],
    )


def _name(row: Row) -> str:
    parts = [_NAMES[row["source"]], row["decoder"], row["budget"]]
    if row["collection"] != 1:
        parts.append(f"collection {row['collection']}")
    return ", ".join(part for part in parts if part)


TABLE = Table("tab:generation", ("generation",), build)
