"""`fig:session`: leaked ÷ charged beside the dissent of the same sessions, as they grow (not in the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paclm.study.figure import BLUE, GREEN, ORANGE, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def draw(results: Mapping[str, Result]) -> Canvas:
    """One colour per budget: points with errors are the leak, open squares the dissent."""
    from matplotlib import pyplot

    rows = results["sessions"].select(collection=1)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    canvas, axes = pyplot.subplots(figsize=(4.6, 2.9))
    for i, (budget, colour) in enumerate(zip(budgets, (BLUE, ORANGE, GREEN), strict=False)):
        own = [row for row in rows if row["budget"] == budget]
        aside = 1.0 + 0.06 * (i - (len(budgets) - 1) / 2)  # so that errors do not cover each other
        where = [aside * row["horizon"] for row in own]
        axes.errorbar(
            where,
            [100 * row["leaked_over_charged"] for row in own],
            [100 * row["leaked_over_charged_stderr"] for row in own],
            color=colour,
            marker="o",
            capsize=2,
            label=f"leaked ÷ charged, b = {budget}",
        )
        axes.plot(
            where,
            [100 * row["dissent"] for row in own],
            color=colour,
            linestyle=":",
            marker="s",
            markerfacecolor="white",
            label=f"dissent, b = {budget}",
        )
    horizons = sorted({row["horizon"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(horizons, [f"{horizon:,}" for horizon in horizons])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the session")
    axes.set_ylabel("% of tokens, % of the charge")
    axes.legend(ncols=1, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


FIGURE = Figure(
    "fig:session",
    "What sessions told, as a share of what they were charged (points, errors over sessions), and the share of tokens "
    "on which the worlds of the very same sessions differed (open squares). Horizons of one budget share sessions.",
    ("sessions",),
    draw,
)
