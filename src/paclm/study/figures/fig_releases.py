"""`fig:releases`: what each release keeps of the gain, against what it tells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Look = tuple[str, str]
_LOOKS = {"gaussian": (BLUE, "o"), "channel": (ORANGE, "s"), "plurality": (GREEN, "D"), "mixture": (RED, "^")}
_SPARE = [(color, marker) for marker in "vP*X<>" for color in (PINK, SKY, GREY)]
"""For releases that were added; after these they repeat."""


def looks_of(names: Iterable[str], known: Mapping[str, Look] = _LOOKS) -> dict[str, Look]:
    """Colour and marker of every release: the four have their own, others a spare one, in their order."""
    others = [name for name in dict.fromkeys(names) if name not in known]
    spare = [look for look in _SPARE if look not in known.values()]
    return {**known, **dict(zip(others, cycle(spare), strict=False))}


def draw(results: Mapping[str, Result]) -> Canvas:
    """Retained gain against leak; releases that tell nothing are lines, right at every leak."""
    from matplotlib.figure import Figure as Canvas

    result = results["releases"]
    canvas = Canvas(figsize=(4.6, 2.9), layout="constrained")
    axes = canvas.subplots()
    for name, (color, marker) in looks_of(row["release"] for row in result.rows).items():
        rows = [row for row in result.select(collection=1, release=name) if row["retained_gain"] is not None]
        if not rows:
            continue
        gains = [row["retained_gain"] for row in rows]
        errors = [row["retained_gain_stderr"] or 0.0 for row in rows]
        if rows[0]["reads_secret"]:
            leaks = [max(row["can_tell_nats"], 1e-12) for row in rows]
            axes.errorbar(leaks, gains, errors, color=color, marker=marker, label=name, capsize=1.5, elinewidth=0.7)
        else:
            axes.axhline(gains[0], color=color, ls="--", label=f"{name} (tells nothing)")
    axes.axhline(0.0, color=GREY, lw=0.8)
    axes.text(0.01, 0.0, "public model", transform=axes.get_yaxis_transform(), va="bottom", color=GREY, fontsize=6.5)
    axes.set_xscale("log")
    axes.set(xlabel="what a session can tell, nats (Σ I, at most)", ylabel="retained gain")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if axes.get_legend_handles_labels()[0]:
        canvas.legend(loc="outside lower center", ncols=2)
    return canvas


FIGURE = Figure(
    "fig:releases",
    "Share of the fine-tuning gain that each release keeps, against what a session can tell about the secret. "
    "Points of a line are budgets from 2^-32 (left) to 2^-4 (right). Dashed: releases that never read the secret "
    "tell nothing. Bars: one standard error over passages of the text.",
    ("releases",),
    draw,
)
