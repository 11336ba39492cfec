"""The loss curve of the card, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito: distinguishable with every kind of colour vision


def draw_curve(curve: list[dict[str, Any]], figures: dict[str, Any], path: Path) -> None:
    """Training and held-out loss over the tokens seen; the 5-gram model's loss for comparison."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    measured = [point for point in curve if "held_out" in point]
    settings: Any = {
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "tiny",  # the same file for the same curve
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings):
        figure, (upper, lower) = plt.subplots(
            2, 1, sharex=True, figsize=(7, 4.4), height_ratios=(4, 1), layout="constrained"
        )
        seen = [point["tokens"] / 1e9 for point in curve]
        upper.plot(seen, [point["train_loss"] for point in curve], color=BLUE, lw=1.2, label="training (with dropout)")
        upper.plot(
            [point["tokens"] / 1e9 for point in measured],
            [point["held_out"]["nats_per_token"] for point in measured],
            color=ORANGE,
            lw=1.6,
            marker="o",
            ms=4,
            label="held out",
        )
        ngram = figures["ngram"]["held_out"]["all"]["nats_per_token"]
        upper.axhline(ngram, color=GREY, lw=1, ls="--", label="5-gram, held out")
        final = figures["tiny"]["held_out"]["all"]["nats_per_token"]
        upper.set_ylim(final - 0.35, ngram + 0.9)
        upper.set_ylabel("nats per token")
        upper.grid(axis="y", color="#DDDDDD", lw=0.6)
        upper.legend(frameon=False)
        lower.plot(seen, [point["lr"] for point in curve], color=GREY, lw=1.2)
        lower.set_ylabel("learning rate")
        lower.set_xlabel("billions of tokens seen")
        lower.set_ylim(0)
        figure.align_ylabels()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
