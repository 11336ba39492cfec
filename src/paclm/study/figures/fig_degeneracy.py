"""`fig:degeneracy`: repetition and diversity belong to the decoder; and what loops do to the measured cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_LINES = (  # source, decoder, budget, name, colour, marker, line
    ("private", "greedy", "2^-16", "private greedy, 2^-16", BLUE, "o", "-"),
    ("public", "greedy", None, "public greedy", SKY, "s", "--"),
    ("full", "greedy", None, "full-corpus greedy", GREY, "^", "--"),
    ("private", "gumbel", "2^-16", "private Gumbel, 2^-16", RED, "o", "-"),
    ("private", "gumbel", "2^-24", "private Gumbel, 2^-24", ORANGE, "D", "-"),
    ("full", "gumbel", None, "full-corpus Gumbel", PINK, "v", "--"),
    ("human", None, None, "human text", GREEN, "*", ":"),
)


def draw(results: Mapping[str, Result]) -> Canvas:
    """(a) rep-3, (b) distinct-1, (c) unanimity and (d) the perplexity ratio of private text, all against length."""
    from matplotlib import pyplot

    result = results["generation"]
    canvas, ((first, second), (third, fourth)) = pyplot.subplots(2, 2, figsize=(6.6, 4.6), sharex=True)
    panels = (
        (first, "rep3", "(a) rep-3"),
        (second, "distinct1", "(b) distinct-1"),
        (third, "unanimity", "(c) unanimity"),
        (fourth, "ratio", "(d) perplexity ÷ reference"),
    )
    for axes, column, title in panels:
        for number, (source, decoder, budget, name, colour, marker, line) in enumerate(_LINES):
            aside = 1.0 + 0.03 * (number - len(_LINES) // 2)  # so that lines that agree can be told apart
            rows = result.select(collection=1, source=source, decoder=decoder, budget=budget)
            if column in ("rep3", "distinct1") or source == "private":
                _line(axes, rows, column, name, colour, marker, line, aside)
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        lengths = sorted({row["length"] for row in result.rows})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xticks([], minor=True)
    fourth.axhline(1.0, color=GREY, linewidth=0.8)
    for axes in (third, fourth):
        axes.set_xlabel("tokens generated")
    handles, labels = first.get_legend_handles_labels()
    canvas.legend(handles, labels, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.1), fontsize=7)
    canvas.tight_layout()
    return canvas


def _line(
    axes: Any, rows: list[Row], column: str, name: str, colour: str, marker: str, line: str, aside: float
) -> None:
    rows = [row for row in rows if row.get(column) is not None]
    axes.errorbar(
        [aside * row["length"] for row in rows],
        [row[column] for row in rows],
        [row[f"{column}_stderr"] or 0.0 for row in rows],
        color=colour,
        marker=marker,
        linestyle=line,
        capsize=2,
        label=name,
    )


FIGURE = Figure(
    "fig:degeneracy",
    "Degeneracy is a property of the decoder, not of the mechanism: (a) repetition and (b) diversity against length, "
    "every reference of equal length. (c, d) The hazard: as greedy text falls into loops the worlds agree more and the "
    "measured cost falls. Errors: bootstrap over sequences.",
    ("generation",),
    draw,
)
