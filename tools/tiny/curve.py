"""The loss curve of the card, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"  # Okabe and Ito: for every colour vision
TEXT = ("public-books", "public-simplewiki")


def nats_per_token(figures: dict[str, Any], parts: tuple[str, ...]) -> float:
    """The loss on some of the texts together."""
    counts = [figures[part]["num_tokens"] for part in parts]
    losses = [figures[part]["nats_per_token"] for part in parts]
    return sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)


def draw_curve(curve: list[dict[str, Any]], figures: dict[str, Any], path: Path) -> None:
    """Training and held-out loss over the tokens seen; the 5-gram model's loss on the same text for comparison."""
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
        upper.plot(seen, [point["train_loss"] for point in curve], color=BLUE, lw=1.2, label="training, both")
        for name, parts, colour in (("text", TEXT, ORANGE), ("notes", ("notes",), GREEN)):
            upper.plot(
                [point["tokens"] / 1e9 for point in measured],
                [nats_per_token(point["held_out"], parts) for point in measured],
                color=colour,
                lw=1.6,
                marker="o",
                ms=4,
                label=f"held-out {name}",
            )
        ngram = nats_per_token(figures["ngram"]["held_out"], TEXT)
        upper.axhline(ngram, color=GREY, lw=1, ls="--", label="5-gram, held-out text")
        upper.set_ylim(0, ngram + 0.9)
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
