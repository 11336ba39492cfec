"""`fig:mechanism`: a drawing of how one token is released, as lists of boxes, arrows and labels. Needs no results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_INK, _EDGE = "#1d1d1d", "#8a8a8a"
_PLAIN, _WHITE, _LEAF, _SAND = "#eef2f6", "#ffffff", "#e3f0ea", "#fdf1d9"
_ROSE, _SKIN, _AIR = "#f5e6ef", "#fde9e0", "#e6f3fb"
_PANELS: tuple[tuple[float, float, float, float, str], ...] = (  # x, y, width, height, title
    (2, 4, 34, 74, "offline, once"),
    (39, 30, 107, 48, "one token, while the budget lasts"),
    (39, 4, 107, 22, ""),
)
_BOXES: Any = (  # x, y, width, height, title, text below, fill, edge
    (6, 59, 26, 11, "private records", "the universe, known", _PLAIN, _EDGE),
    *((6 + shift, 41 + shift, 24, 10.5, "", "", _LEAF, _EDGE) for shift in (2.4, 1.2, 0.0)),
    *((6 + shift, 22.5 + shift, 24, 10.5, "", "", _SAND, _EDGE) for shift in (2.4, 1.2, 0.0)),
    (6, 8, 26, 10, "public base model", "frozen", _PLAIN, _EDGE),
    (42, 54, 19, 13, "context", "prompt and tokens\nreleased so far", _PLAIN, _EDGE),
    (66, 54, 20, 13, "support $V_t$", "the public model's\ntop k tokens", _PLAIN, _EDGE),
    (91, 51, 25, 19, "all worlds vote", "", _WHITE, _EDGE),
    (121, 51, 22, 19, "distinct votes $A_t$", "", _WHITE, _EDGE),
    (118, 34, 25, 12.5, r"noise $\Sigma_t$", "calibrated to their\ncovariance and b", _SKIN, RED),
    (84, 34, 28, 12.5, r"$R_t = e_{v(S)} + N(0, \Sigma_t)$", "never released", _SKIN, RED),
    (58, 34, 21, 12.5, r"$Y_t = \mathrm{argmax}\ R_t$", "the released token", _LEAF, GREEN),
    (118, 9.5, 25, 11, "belief $P_{t-1}$", "over the m worlds", _ROSE, PINK),
    (84, 9.5, 28, 11, "secret S", "one world, never changed", _ROSE, PINK),
    (50, 9.5, 29, 11, "ledger", "spent + b ≤ total, or stop", _AIR, SKY),
)
_ARROWS = (  # from, to, colour, is dashed
    ((19, 59), (19, 53.5), _INK, False),
    ((19, 41), (19, 35), _INK, False),
    ((61, 60.5), (66, 60.5), _INK, False),
    ((86, 60.5), (91, 60.5), _INK, False),
    ((116, 60.5), (121, 60.5), _INK, False),
    ((132, 51), (132, 46.5), _INK, False),
    ((118, 40.2), (112, 40.2), _INK, False),
    ((84, 40.2), (79, 40.2), _INK, False),
    ((51.5, 40.2), (51.5, 54), _INK, False),
    ((137, 20.5), (137, 34), PINK, True),
    ((94, 20.5), (94, 34), PINK, True),
    ((103, 34), (121, 20.5), PINK, False),
    ((64.5, 20.5), (64.5, 34), PINK, True),
)
_LABELS: tuple[tuple[float, float, str, str, float], ...] = (  # x, y, text, horizontal alignment, size
    (20.2, 56.2, "each in m/2", "left", 6.0),
    (18, 44.2, "overlapping subsets", "center", 6.2),
    (20.2, 38.0, "trained alike", "left", 6.0),
    (18, 25.7, "never leave the curator", "center", 6.2),
    (103.5, 54.6, "greedy, or with\nshared coins $U_t$", "center", 6.2),
    (132, 54.0, "each with its mass", "center", 6.2),
    (50.5, 46.6, "to the user\nand back", "right", 6.0),
    (113.5, 27.9, "Bayes with $R_t$", "left", 6.0),
    (65.4, 28.0, "charge b first", "left", 6.0),
)
_NAMES: tuple[tuple[float, float, str], ...] = ((18, 48.2, "m worlds"), (18, 29.7, "m adapters"))
_VOTES = (BLUE, BLUE, ORANGE, BLUE, BLUE, BLUE, ORANGE, BLUE)  # votes of eight of the worlds


def _draw(results: Mapping[str, Result]) -> Canvas:
    """Offline on the left, one serving step on the right, what only the curator holds below."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

    canvas = Canvas(figsize=(7.4, 4.1))
    axes = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, 148), ylim=(0, 82))
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, radius: float, **look: Any) -> None:
        axes.add_patch(FancyBboxPatch((x, y), width, height, f"round,pad=0,rounding_size={radius}", **look))

    def text(x: float, y: float, words: str, size: float, ha: str = "center", color: str = GREY, **look: Any) -> None:
        axes.text(x, y, words, ha=ha, va="center", fontsize=size, color=color, **look)

    for x, y, width, height, title in _PANELS:
        box(x, y, width, height, 1.6, fc="#fafafa", ec="#d5d5d5", lw=0.8)
        text(x + 2, y + height - 2.6, title, 6.8, "left", style="italic")
    text(92.5, 5.9, "held by the curator: sealed, and durable before the token leaves", 6.8, style="italic")
    for x, y, width, height, title, below, fill, edge in _BOXES:
        box(x, y, width, height, 1.2, fc=fill, ec=edge, lw=0.9)
        top = y + height - 3.4 if below or height > 15 else y + height / 2
        text(x + width / 2, top, title, 7.5, color=_INK, weight="bold")
        text(x + width / 2, y + (height - 5.0) / 2, below, 6.2, linespacing=1.25)
    for x, y, name in _NAMES:
        text(x, y, name, 7.5, color=_INK, weight="bold")
    for x, y, words, align, size in _LABELS:
        text(x, y, words, size, align)
    for number, color in enumerate(_VOTES):
        axes.add_patch(Circle((94.4 + 2.6 * number, 59.6), 1.05, fc=color, ec="white", lw=0.5))
    for y, color, width in ((61.2, BLUE, 12.0), (57.4, ORANGE, 4.0)):
        axes.add_patch(Rectangle((125, y), width, 2.4, fc=color, ec="none"))
    axes.plot([19, 19], [18, 22.5], color=GREY, lw=0.9, ls=(0, (1, 1.5)))
    axes.plot([58, 51.5], [40.2, 40.2], color=_INK, lw=1.0, solid_capstyle="butt")  # to the arrow back to the context
    for start, end, color, is_dashed in _ARROWS:
        look: dict[str, Any] = {"arrowstyle": "-|>,head_width=0.18,head_length=0.32", "color": color, "lw": 1.0}
        look |= {"shrinkA": 0, "shrinkB": 0, "linestyle": (0, (3, 2)) if is_dashed else "-"}
        axes.annotate("", xy=end, xytext=start, arrowprops=look)
    return canvas


MECHANISM = Figure(
    "fig:mechanism",
    "How one token is released. All worlds vote inside the public support; the belief-weighted disagreement of their "
    "votes sets the noise; the realized world's vote plus that noise, R, is never released and updates the belief, and "
    "only its largest entry leaves. Dashed: what enters a step from the curator. Where all worlds agree there is no "
    "noise and nothing is learnt.",
    (),
    _draw,
)
