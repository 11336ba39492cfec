"""`fig:mechanism`: a drawing of how one token comes about. It needs no results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_INK = "#1d1d1d"
_VOTES = (BLUE, BLUE, ORANGE, BLUE, BLUE, BLUE, ORANGE, BLUE)
"""What eight of the worlds vote for, in the drawing."""


def draw(results: Mapping[str, Result]) -> Canvas:
    """Offline on the left, one serving step on the right, the curator's own things below."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.4, 4.1))
    axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 148), ylim=(0, 82))
    axes.axis("off")
    _offline(axes)
    _step(axes)
    _curator(axes)
    return canvas


def _offline(axes: Any) -> None:
    _panel(axes, 2, 4, 34, 74, "offline, once")
    _box(axes, 6, 59, 26, 11, "private records", "the universe, known", "#eef2f6")
    _arrow(axes, (19, 59), (19, 53.5))
    _note(axes, 20.2, 56.2, "each in m/2")
    for shift in (2.4, 1.2, 0.0):
        _box(axes, 6 + shift, 41 + shift, 24, 10.5, "", "", "#e3f0ea")
    axes.text(18, 48.2, "m worlds", ha="center", va="center", fontsize=7.5, weight="bold", color=_INK)
    axes.text(18, 44.2, "overlapping subsets", ha="center", va="center", fontsize=6.2, color=GREY)
    _arrow(axes, (19, 41), (19, 35))
    _note(axes, 20.2, 38.0, "trained alike")
    for shift in (2.4, 1.2, 0.0):
        _box(axes, 6 + shift, 22.5 + shift, 24, 10.5, "", "", "#fdf1d9")
    axes.text(18, 29.7, "m adapters", ha="center", va="center", fontsize=7.5, weight="bold", color=_INK)
    axes.text(18, 25.7, "never leave the curator", ha="center", va="center", fontsize=6.2, color=GREY)
    _box(axes, 6, 8, 26, 10, "public base model", "frozen", "#eef2f6")
    axes.plot([19, 19], [18, 22.5], color=GREY, lw=0.9, ls=(0, (1, 1.5)))


def _step(axes: Any) -> None:
    _panel(axes, 39, 30, 107, 48, "one token, while the budget lasts")
    _box(axes, 42, 54, 19, 13, "context", "prompt and tokens\nreleased so far", "#eef2f6")
    _arrow(axes, (61, 60.5), (66, 60.5))
    _box(axes, 66, 54, 20, 13, "support $V_t$", "the public model's\ntop k tokens", "#eef2f6")
    _arrow(axes, (86, 60.5), (91, 60.5))
    _box(axes, 91, 51, 25, 19, "all worlds vote", "", "#ffffff")
    for number, color in enumerate(_VOTES):
        _dot(axes, 94.4 + 2.6 * number, 59.6, color)
    axes.text(103.5, 54.6, "greedy, or with\nshared coins $U_t$", ha="center", va="center", fontsize=6.2, color=GREY)
    _arrow(axes, (116, 60.5), (121, 60.5))
    _box(axes, 121, 51, 22, 19, "distinct votes $A_t$", "", "#ffffff")
    for height, color, width in ((61.2, BLUE, 12.0), (57.4, ORANGE, 4.0)):
        _bar(axes, 125, height, width, color)
    axes.text(132, 54.0, "each with its mass", ha="center", va="center", fontsize=6.2, color=GREY)
    _arrow(axes, (132, 51), (132, 46.5))
    _box(axes, 118, 34, 25, 12.5, r"noise $\Sigma_t$", "calibrated to their\ncovariance and b", "#fde9e0", edge=RED)
    _arrow(axes, (118, 40.2), (112, 40.2))
    _box(axes, 84, 34, 28, 12.5, r"$R_t = e_{v(S)} + N(0, \Sigma_t)$", "stays inside", "#fde9e0", edge=RED)
    _arrow(axes, (84, 40.2), (79, 40.2))
    _box(axes, 58, 34, 21, 12.5, r"$Y_t = \mathrm{argmax}\ R_t$", "the released token", "#e3f0ea", edge=GREEN)
    _path(axes, [(58, 40.2), (51.5, 40.2), (51.5, 54)])
    axes.text(50.5, 46.6, "to the user\nand back", ha="right", va="center", fontsize=6.0, color=GREY)


def _curator(axes: Any) -> None:
    _panel(axes, 39, 4, 107, 22, "")
    axes.text(
        92.5, 5.9, "the curator's own: sealed, and durable before the token leaves",
        ha="center", va="center", fontsize=6.8, color=GREY, style="italic",
    )  # fmt: skip
    _box(axes, 118, 9.5, 25, 11, "belief $P_{t-1}$", "over the m worlds", "#f5e6ef", edge=PINK)
    _box(axes, 84, 9.5, 28, 11, "secret S", "one world, for ever", "#f5e6ef", edge=PINK)
    _box(axes, 50, 9.5, 29, 11, "ledger", "spent + b ≤ total, or stop", "#e6f3fb", edge=SKY)
    _arrow(axes, (137, 20.5), (137, 34), dashed=True)
    _arrow(axes, (94, 20.5), (94, 34), dashed=True)
    _arrow(axes, (103, 34), (121, 20.5), color=PINK)
    axes.text(113.5, 27.9, "Bayes with $R_t$", ha="left", va="center", fontsize=6.0, color=GREY, backgroundcolor="none")
    _arrow(axes, (64.5, 20.5), (64.5, 34), dashed=True)
    axes.text(65.4, 28.0, "charge b first", ha="left", va="center", fontsize=6.0, color=GREY)


def _panel(axes: Any, x: float, y: float, width: float, height: float, title: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1.6", fc="#fafafa", ec="#d5d5d5", lw=0.8)
    )
    axes.text(x + 2, y + height - 2.6, title, ha="left", va="center", fontsize=6.8, color=GREY, style="italic")


def _box(
    axes: Any, x: float, y: float, width: float, height: float, title: str, below: str, fill: str, edge: str = "#8a8a8a"
) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1.2", fc=fill, ec=edge, lw=0.9))
    if title:
        top = y + height - 3.4 if below or height > 15 else y + height / 2
        axes.text(x + width / 2, top, title, ha="center", va="center", fontsize=7.5, weight="bold", color=_INK)
    if below:
        axes.text(
            x + width / 2,
            y + (height - 5.0) / 2,
            below,
            ha="center",
            va="center",
            fontsize=6.2,
            color=GREY,
            linespacing=1.25,
        )


def _dot(axes: Any, x: float, y: float, color: str) -> None:
    from matplotlib.patches import Circle

    axes.add_patch(Circle((x, y), 1.05, fc=color, ec="white", lw=0.5))


def _bar(axes: Any, x: float, y: float, width: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, 2.4, fc=color, ec="none"))


def _arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], *, dashed: bool = False, color: str = _INK
) -> None:
    look = {"arrowstyle": "-|>,head_width=0.18,head_length=0.32", "color": color, "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
    if dashed:
        look |= {"linestyle": (0, (3, 2)), "color": PINK}
    axes.annotate("", xy=end, xytext=start, arrowprops=look)


def _path(axes: Any, points: list[tuple[float, float]]) -> None:
    """A line with corners, an arrow at its end."""
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=_INK, lw=1.0, solid_capstyle="butt")
    _arrow(axes, points[-2], points[-1])


def _note(axes: Any, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="left", va="center", fontsize=6.0, color=GREY)


FIGURE = Figure(
    "fig:mechanism",
    "How one token comes about. All worlds vote inside the public support; the belief-weighted disagreement of their "
    "votes sets the noise; the realized world's vote plus that noise, R, stays inside and updates the belief, and only "
    "its largest entry leaves. Dashed: what enters a step from the curator's own. Where all worlds agree there is no "
    "noise and nothing is learnt.",
    (),
    draw,
)
