"""Forced canaries: what one token gives away, and how often the payload is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from paclm.study.canaries import even_split_advantage
from paclm.study.figure import BLUE, GREY, ORANGE, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_DECODERS = (("greedy", "greedy", BLUE, -0.45), ("gumbel", "coupled Gumbel", ORANGE, 0.15))


def draw(results: Mapping[str, Result]) -> Canvas:
    """Left: advantage against budget with the even split's curve. Right: emission under both hypotheses."""
    from matplotlib import pyplot as plt

    result = results["canaries"]
    canvas, (left, right) = plt.subplots(1, 2, figsize=(6.6, 2.6))
    powers = np.linspace(-17, -3, 200)
    left.plot(powers, [even_split_advantage(2.0**x) for x in powers], color=GREY, label="2Φ(√(2b)) − 1")
    left.axhline(0, color=GREY, linewidth=0.6)
    for name, words, colour, shift in _DECODERS:
        rows = [
            row
            for row in result.select(part="forced", collection=1, decoder=name, others="agree")
            if row["budget"] != "inf"
        ]
        number = {name: i for i, name in enumerate(dict.fromkeys(row["canary"] for row in rows))}
        x = np.array([np.log2(row["per_token_nats"]) + shift + 0.3 * number[row["canary"]] for row in rows])
        errors = [1.96 * row["advantage_stderr"] for row in rows]
        left.errorbar(x, [row["advantage"] for row in rows], errors, fmt="o", color=colour, label=words, capsize=2)
        for side, marker, whom in (("emitted_member", "o", "member"), ("emitted_other", "s", "not a member")):
            filled = {"markerfacecolor": colour if side == "emitted_member" else "white"}
            errors = [1.96 * row["emitted_stderr"] for row in rows]
            values = [row[side] for row in rows]
            right.errorbar(x, values, errors, fmt=marker, color=colour, label=f"{words}, {whom}", capsize=2, **filled)
    right.axhline(0.5, color=GREY, linewidth=0.6)
    right.set_ylim(0.0, 0.8)
    left.set_ylabel("membership advantage")
    right.set_ylabel("payload emitted")
    for axes in (left, right):
        axes.set_xticks([-16, -8, -4], ["2⁻¹⁶", "2⁻⁸", "2⁻⁴"])
        axes.set_xlabel("budget b, nats")
    left.legend(loc="upper left")
    right.legend(loc="lower left", fontsize=6)
    canvas.tight_layout()
    return canvas


FIGURE = Figure(
    "fig:canary",
    "Forced memorization of canaries, one token under a uniform belief; bars are 95 % intervals. Membership stops "
    "showing as the budget falls, the payload goes on being emitted.",
    ("canaries",),
    draw,
)
