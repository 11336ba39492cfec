"""`fig:flatness`: the budget drives the noise, flips rise with it and settle, and so does accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.study.figure import BLUE, GREY, ORANGE, Figure
from paclm.study.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_LOOKS = {"greedy": (ORANGE, "s", "greedy"), "gumbel": (BLUE, "o", "coupled Gumbel")}


def draw(results: Mapping[str, Result]) -> Canvas:
    """(a) σ against b with a 1/√b line; (b) flips and accuracy against b."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6.4, 2.7), layout="constrained")
    left, right = canvas.subplots(1, 2)
    for decoder in _LOOKS:
        rows = [row for row in results["flatness"].select(collection=1, decoder=decoder) if row["budget"] != "inf"]
        if rows and rows[0]["sigma_median"] is not None:
            _noise(left, rows, decoder)
            _flips(right, rows, decoder)
    left.set(yscale="log", ylabel="noise scale σ")
    left.set_title("(a) the budget drives the noise", loc="left")
    right.set(ylabel="rate", ylim=(-0.03, 1.0))
    right.set_title("(b) flips settle, and accuracy with them", loc="left")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([2.0**-n for n in range(4, 33, 4)], [f"$2^{{-{n}}}$" for n in range(4, 33, 4)])
        axes.set_xlabel("per-token budget b, nats (tighter to the right)")
        axes.invert_xaxis()
        axes.minorticks_off()
    left.legend(handles=_keys("median", "max", with_line=True), loc="upper left", fontsize=7)
    right.legend(
        handles=_keys("flips | dissent", "accuracy", with_zero=True)[2:], loc="upper left", fontsize=7, ncols=2
    )
    return canvas


def _keys(filled: str, hollow: str, *, with_line: bool = False, with_zero: bool = False) -> list[Any]:
    """Legend entries: colours for decoders, line styles for what is shown."""
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], color=color, marker=marker, label=name) for color, marker, name in _LOOKS.values()]
    keys.append(Line2D([], [], color=GREY, marker="o", label=filled))
    keys.append(Line2D([], [], color=GREY, marker="o", mfc="white", ls="--", label=hollow))
    if with_line:
        keys.append(Line2D([], [], color=GREY, ls=":", label="slope of 1/√b"))
    if with_zero:
        keys.append(Line2D([], [], color=GREY, marker="x", ls="none", label="flips | unanimous"))
        keys.append(Line2D([], [], color=GREY, ls=":", label="limit 1 − 1/ā"))
    return keys


def _noise(axes: Any, rows: list[Row], decoder: str) -> None:
    color, marker, _ = _LOOKS[decoder]
    budgets = np.array([row["per_token_nats"] for row in rows])
    medians = [row["sigma_median"] for row in rows]
    axes.plot(budgets, medians, marker=marker, color=color)
    axes.plot(budgets, [row["sigma_max"] for row in rows], marker=marker, color=color, ls="--", mfc="white")
    if decoder == "gumbel":
        axes.plot(budgets, medians[0] * np.sqrt(budgets[0] / budgets) / 3.0, color=GREY, ls=":")


def _flips(axes: Any, rows: list[Row], decoder: str) -> None:
    color, marker, _ = _LOOKS[decoder]
    budgets = [row["per_token_nats"] for row in rows]

    def line(column: str, **look: Any) -> None:
        if all(row[column] is not None for row in rows):  # none of its positions, no line
            errors = [row[f"{column}_stderr"] or 0.0 for row in rows]
            axes.errorbar(budgets, [row[column] for row in rows], errors, color=color, **look)

    line("flip_dissent", marker=marker)
    axes.axhline(rows[0]["flip_limit"], color=color, ls=":", lw=1.0)
    line("accuracy", marker=marker, mfc="white", ls="--")
    line("flip_unanimous", marker="x", ls="none")


FIGURE = Figure(
    "fig:flatness",
    "The budget drives the noise without end, and the released token only until votes no longer count. (a) Median and "
    "largest noise scale over positions where worlds differ, with a line of slope 1/√b (shifted down to be seen). (b) "
    "Flips rise towards the limit of a release that ignores the vote, flips on unanimous positions are exactly zero, "
    "and accuracy moves only as long as flips do. Bars: one standard error over passages.",
    ("flatness",),
    draw,
)
