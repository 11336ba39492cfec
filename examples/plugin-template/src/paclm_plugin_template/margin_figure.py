"""The figure of the regime `margin`. matplotlib is imported where it is drawn: studies run without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paclm.study.figure import BLUE
from paclm.study.figures import drawn
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@drawn("fig:margin", "margin", "Worlds that cast the most popular vote; bars: one standard error.")
def margin_figure(result: Result) -> Canvas:
    """One bar per decoder."""
    from matplotlib.figure import Figure as Canvas

    rows = result.select(collection=1)
    canvas = Canvas(figsize=(2.8, 2.2), layout="constrained")
    axes = canvas.subplots()
    shares, errors = ([row[name] for row in rows] for name in ("share", "stderr"))
    axes.bar([row["decoder"] for row in rows], shares, yerr=errors, color=BLUE)
    axes.set(ylabel="share of worlds")
    return canvas
