"""`fig:pmixed`: accuracy and headroom against the number of queries, at a matched bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.figures.fig_releases import looks_of
from paclm.study.results import Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_EPSILON = 1.0
_PAC = {"gaussian": (BLUE, "o"), "plurality": (SKY, "s"), "mixture": (GREEN, "^"), "channel": (PINK, "v")}
_PMIXED = {"generous": (ORANGE, "D"), "rigorous": (RED, "X"), "strict": (GREY, "P")}
_FLOOR = 1e-3
_ASIDE = 1.06


def draw(results: Mapping[str, Result]) -> Canvas:
    """(a) accuracy with four reference lines; (b) share of the own ceiling's gain, on a logarithmic scale."""
    import matplotlib.pyplot as plt

    result = results["pmixed"]
    canvas, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.9), layout="constrained")
    looks = looks_of((row["release"] for row in result.select(kind="pac")), _PAC)
    curves = [
        (f"PAC, {name}", result.select(kind="pac", epsilon=_EPSILON, release=name), look)
        for name, look in looks.items()
    ] + [
        (f"PMixED, {name}", result.select(kind="matched", epsilon=_EPSILON, reading=name, is_selected=True), look)
        for name, look in _PMIXED.items()
    ]
    for number, (label, rows, (color, marker)) in enumerate(curves):
        style: dict[str, Any] = {"color": color, "marker": marker, "capsize": 2, "elinewidth": 0.7}
        aside = _ASIDE ** (number - (len(curves) - 1) / 2)  # bars beside each other, not one behind another
        left.errorbar(*_points(rows, "accuracy", "stderr", aside), label=label, ecolor=(color, 0.35), **style)
        known = [row for row in rows if row["headroom"] is not None]
        if known:
            x, shares, errors = _points(known, "headroom", "headroom_stderr", aside)
            right.errorbar(x, [max(share, _FLOOR) for share in shares], errors, **style)
    for (value, said), dashes in zip(_references(result), (":", (0, (1, 4)), "--", "-."), strict=True):
        left.axhline(value, color="black", linewidth=0.8, linestyle=dashes, label=said)
    left.set(xscale="log", xlabel="queries T", ylabel="next-token accuracy", title="(a) accuracy")
    right.set(xscale="log", yscale="log", xlabel="queries T", ylabel="share of own headroom", title="(b) headroom kept")
    right.set_ylim(_FLOOR, 1.5)
    canvas.legend(loc="outside lower center", ncols=4, fontsize=7)
    plt.close(canvas)
    return canvas


def _points(rows: list[Row], value: str, error: str, aside: float) -> tuple[list[float], list[float], list[float]]:
    """Horizons a little aside, values, and errors."""
    return (
        [aside * row["queries"] for row in rows],
        [row[value] for row in rows],
        [row[error] or 0.0 for row in rows],
    )


def _references(result: Result) -> list[tuple[float, str]]:
    """The public model as each method draws from it, PAC without noise, and the best plain average of shard models."""
    ensembles = result.select(kind="ensemble")
    best: Row = max(ensembles, key=lambda row: float(row["accuracy_ceiling"]))
    pac: Row = result.select(kind="pac", release="gaussian")[0]
    return [
        (ensembles[0]["accuracy_public"], "public model"),
        (pac["accuracy_public"], "public model, top 200"),
        (pac["accuracy_ceiling"], "PAC without noise"),
        (best["accuracy_ceiling"], f"PMixED without privacy, N = {best['num_shards']}"),
    ]


FIGURE = Figure(
    "fig:pmixed",
    "PAC and PMixED at a matched bound on membership inference (ε = 1), on the same records and test text. At every "
    "horizon PMixED takes the best N, order and sampling rate of its own search. Bars: one standard error over "
    "passages of the text; in (a) most of it is common to all methods, since they read the same ones. PAC draws inside "
    "the public top 200, PMixED over the whole vocabulary: each has a public model of its own. (b) is floored at "
    "0.1 %, and empty where the ceiling lies below the public model.",
    ("pmixed",),
    draw,
)
