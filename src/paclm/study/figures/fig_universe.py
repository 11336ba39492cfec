"""ROC curves of the attacks on the universe itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_PANELS = (
    (
        "holds the adapters",
        (("adapters", "loss"), ("adapters", "reference"), ("adapters", "min-k"), ("adapters", "spread")),
    ),
    ("reads text", (("released", "overlap"), ("released", "surrogate"), ("full", "overlap"), ("full", "surrogate"))),
)
_LINES = ((BLUE, "-"), (ORANGE, "-"), (GREEN, "--"), (PINK, "--"))


def draw(results: Mapping[str, Result]) -> Canvas:
    """One panel per attacker."""
    from matplotlib import pyplot as plt

    result = results["universe"]
    canvas, panels = plt.subplots(1, len(_PANELS), figsize=(6.6, 3.1), sharey=True)
    for axes, (title, curves) in zip(panels, _PANELS, strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        for (source, attack), (colour, line) in zip(curves, _LINES, strict=True):
            rows = result.select(part="roc", collection=1, source=source, attack=attack)
            auc = result.one(part="score", collection=1, source=source, attack=attack)["auc"]
            name = attack if source == "adapters" else f"{source}, {attack}"
            x, y = ([row[side] for row in rows] for side in ("false_positives", "true_positives"))
            axes.plot(x, y, color=colour, linestyle=line, label=f"{name}: {auc:.2f}")
        axes.set_title(title)
        axes.set_xlabel("false positives")
        axes.set_aspect("equal")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, title="AUC", fontsize=6, title_fontsize=6)
    panels[0].set_ylabel("true positives")
    canvas.tight_layout()
    return canvas


FIGURE = Figure(
    "fig:universe",
    "Is a record in the corpus at all? Members against held-out records, for an attacker with all adapters and for one "
    "who reads text. The guarantee does not cover this question.",
    ("universe",),
    draw,
)
