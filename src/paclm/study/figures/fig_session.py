"""`fig:session`: leaked ÷ charged beside the dissent of the same sessions, as they grow (not in the paper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_COLORS = (BLUE, ORANGE, GREEN)


def draw(results: Mapping[str, Result]) -> Canvas:
    """One colour per budget: points with errors are the leak, open squares the dissent."""
    from matplotlib.figure import Figure as Canvas

    rows = results["sessions"].select(collection=1)
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    canvas = Canvas(figsize=(6.0, 2.7), layout="constrained")
    axes = canvas.subplots()
    for i, (budget, color) in enumerate(zip(budgets, _COLORS, strict=False)):
        own = [row for row in rows if row["budget"] == budget]
        aside = 1.0 + 0.08 * (i - (len(budgets) - 1) / 2)  # so that errors do not cover each other
        where = [aside * row["horizon"] for row in own]
        axes.plot(
            where, [100 * row["dissent"] for row in own], color=color, ls=":", marker="s", mfc="white", lw=1.0, ms=3.5
        )
        axes.errorbar(
            where,
            [100 * row["leaked_over_charged"] for row in own],
            [100 * (row["leaked_over_charged_stderr"] or 0.0) for row in own],
            color=color,
            marker="o",
            capsize=2,
        )
    horizons = sorted({row["horizon"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(horizons, [f"{horizon:,}" for horizon in horizons])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low - (high - low)), high + 0.25 * (high - low))  # as close as the errors make sense of
    axes.set_xlabel("tokens of the session")
    axes.set_ylabel("% of tokens, % of the charge")
    axes.legend(handles=_keys(budgets), fontsize=7, loc="lower center", ncols=2)
    return canvas


def _keys(budgets: list[str]) -> list[Any]:
    """Legend entries: colours for budgets, then what is shown."""
    from matplotlib.lines import Line2D

    signs = [f"${budget.replace('^', '^{')}}}$" if "^" in budget else budget for budget in budgets]
    return [
        *(Line2D([], [], color=color, label=f"b = {sign}") for sign, color in zip(signs, _COLORS, strict=False)),
        Line2D([], [], color=GREY, marker="o", label="leaked ÷ charged (± one standard error)"),
        Line2D([], [], color=GREY, marker="s", mfc="white", ls=":", label="dissent of the same sessions"),
    ]


FIGURE = Figure(
    "fig:session",
    "What sessions told, as a share of what they were charged (points, errors over sessions), and the share of tokens "
    "on which the worlds of the very same sessions differed (open squares). Horizons of one budget share sessions.",
    ("sessions",),
    draw,
)
