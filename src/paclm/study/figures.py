"""The figures that are drawn from results, one function each. A new one is also named in `all_figures`.

matplotlib is imported only when a figure is drawn. `fig:mechanism` shows no results; it is in `mechanism_drawing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from paclm.study.figure import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Figure
from paclm.study.mechanism_drawing import MECHANISM
from paclm.study.questions import ALL
from paclm.study.regimes.canaries import even_split_advantage
from paclm.study.regimes.depth import in_points
from paclm.study.regimes.knowledge import OTHERS
from paclm.study.regimes.student import NO_NOISE
from paclm.study.results import Result, Row
from paclm.study.table_rows import only_releases

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Draw = Callable[[Result], "Canvas"]
Look = tuple[str, str]  # colour and marker


def all_figures() -> list[Figure]:
    """Every figure, by label."""
    figures = [canary, content, degeneracy, depth, flatness, knowledge, MECHANISM, pmixed, releases, session, student]
    return [*figures, temperature, universe, worlds]


def drawn(label: str, regime: str, caption: str) -> Callable[[Draw], Figure]:
    """Makes a figure of a function that draws one result."""
    return lambda draw: Figure(label, caption, (regime,), lambda results: draw(results[regime]))


def _canvas(width: float, height: float, layout: Any = "constrained") -> Canvas:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width, height), layout=layout)


def _points(rows: Sequence[Row], x: str, y: str, error: str = "", aside: float = 1.0) -> tuple[list[float], ...]:
    """Positions (moved a little aside), values and errors, as `errorbar` takes them."""
    errors = [row[error or f"{y}_stderr"] or 0.0 for row in rows]
    return [aside * row[x] for row in rows], [row[y] for row in rows], errors


@drawn(
    "fig:canary",
    "canaries",
    "Forced memorization of canaries, one token under a uniform belief; bars are 95 % intervals. As the budget falls "
    "membership no longer shows, while the payload is still emitted.",
)
def canary(result: Result) -> Canvas:
    canvas = _canvas(6.6, 2.6, None)
    left, right = canvas.subplots(1, 2)
    powers = np.linspace(-17, -3, 200)
    left.plot(powers, [even_split_advantage(2.0**x) for x in powers], color=GREY, label="2Φ(√(2b)) − 1")
    left.axhline(0, color=GREY, linewidth=0.6)
    forced = result.select(part="forced", collection=1, others="agree")
    for decoder, words, colour, shift in (("greedy",) * 2 + (BLUE, -0.45), ("gumbel", "coupled Gumbel", ORANGE, 0.15)):
        rows = [row for row in forced if row["decoder"] == decoder and row["budget"] != "inf"]
        number = {name: i for i, name in enumerate(dict.fromkeys(row["canary"] for row in rows))}
        x = [np.log2(row["per_token_nats"]) + shift + 0.3 * number[row["canary"]] for row in rows]

        def bars(axes: Any, value: str, error: str, look: Any, rows: list[Row] = rows, x: Any = x) -> None:
            errors = [1.96 * row[error] for row in rows]
            axes.errorbar(x, [row[value] for row in rows], errors, capsize=2, **look)

        bars(left, "advantage", "advantage_stderr", {"fmt": "o", "color": colour, "label": words})
        for side, marker, fill, who in (("member", "o", colour, "member"), ("other", "s", "white", "not a member")):
            look = {"fmt": marker, "color": colour, "markerfacecolor": fill, "label": f"{words}, {who}"}
            bars(right, f"emitted_{side}", "emitted_stderr", look)
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


@drawn(
    "fig:content",
    "content",
    "A quorum of worlds without any one record. (a) The share of the gain that is kept. (b) Dissent, and the share of "
    "votes that are replaced. Quorum 0 is none. Bars: one standard error over passages, most of it common to points.",
)
def content(result: Result) -> Canvas:
    canvas = _canvas(6.4, 2.7)
    left, right = canvas.subplots(1, 2)
    for decoder, colour, words in (("greedy", ORANGE, "greedy"), ("gumbel", BLUE, "coupled Gumbel")):
        rows = [{**row, "x": x} for x, row in enumerate(result.select(part="text", decoder=decoder, collection=1))]
        for end, line, name in (
            ("at_32", "-", "2⁻³²"),
            ("plurality", ":", "plurality"),
            ("noiseless", "--", "no noise"),
        ):
            if all(row[f"retained_gain_{end}"] is not None for row in rows):  # without a gain there is no share of it
                points = _points(rows, "x", f"retained_gain_{end}")
                left.errorbar(*points, color=colour, ls=line, marker="o", label=f"{words}, {name}")
        for column, line in (("dissent", "-"), ("replaced", "--")):
            right.errorbar(*_points(rows, "x", column), color=colour, ls=line, marker="o", label=f"{words}, {column}")
    for axes, title in ((left, "(a) share of the gain kept"), (right, "(b) dissent and replaced votes")):
        axes.set_xticks([row["x"] for row in rows], [str(row["quorum"]) for row in rows])
        axes.set_xlabel("quorum q")
        axes.set_title(title, loc="left")
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 1):g}%")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    return canvas


_TEXTS = (  # source, decoder, budget, name, colour, marker, line
    ("private", "greedy", "2^-16", "private greedy, 2^-16", BLUE, "o", "-"),
    ("public", "greedy", None, "public greedy", SKY, "s", "--"),
    ("full", "greedy", None, "full-corpus greedy", GREY, "^", "--"),
    ("private", "gumbel", "2^-16", "private Gumbel, 2^-16", RED, "o", "-"),
    ("private", "gumbel", "2^-24", "private Gumbel, 2^-24", ORANGE, "D", "-"),
    ("full", "gumbel", None, "full-corpus Gumbel", PINK, "v", "--"),
    ("human", None, None, "human text", GREEN, "*", ":"),
)


@drawn(
    "fig:degeneracy",
    "generation",
    "Degeneracy is a property of the decoder, not of the mechanism: (a) repetition and (b) diversity against length, "
    "every reference of equal length. (c, d) The hazard: as greedy text falls into loops the worlds agree more and the "
    "measured cost falls. Errors: bootstrap over sequences.",
)
def degeneracy(result: Result) -> Canvas:
    canvas = _canvas(6.6, 4.6, None)
    panels = canvas.subplots(2, 2, sharex=True)
    columns = {
        "rep3": "(a) rep-3",
        "distinct1": "(b) distinct-1",
        "unanimity": "(c) unanimity",
        "ratio": "(d) perplexity ÷ reference",
    }
    lengths = sorted({row["length"] for row in result.rows})
    for axes, (column, title) in zip(panels.flat, columns.items(), strict=True):
        for number, (source, decoder, budget, name, colour, marker, line) in enumerate(_TEXTS):
            if column not in ("rep3", "distinct1") and source != "private":
                continue
            aside = 1.0 + 0.03 * (number - len(_TEXTS) // 2)  # so that lines that agree do not cover each other
            rows = result.select(collection=1, source=source, decoder=decoder, budget=budget)
            points = _points([row for row in rows if row.get(column) is not None], "length", column, aside=aside)
            axes.errorbar(*points, color=colour, marker=marker, linestyle=line, capsize=2, label=name)
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xticks([], minor=True)
    panels[1, 1].axhline(1.0, color=GREY, linewidth=0.8)
    for axes in panels[1]:
        axes.set_xlabel("tokens generated")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.1), fontsize=7)
    canvas.tight_layout()
    return canvas


@drawn(
    "fig:depth",
    "depth",
    "Adapters in the last layers only, coupled Gumbel. (a) Gain of the full-corpus adapter and of the private release "
    "at 2^-32 by adapted layers, at one rank. (b) Private gain by speed of the engine, all ranks. Gains are in "
    "percentage points. Bars: one standard error over passages.",
)
def depth(result: Result) -> Canvas:
    canvas = _canvas(6.4, 3.1)
    left, right = canvas.subplots(1, 2)
    rows = [in_points(row) for row in result.select(kind="point", decoder="gumbel", collection=1)]
    first = rows[0]  # all layers
    own = [row for row in rows if row["rank"] == first["rank"]]
    gains = (("gain", BLUE, "s", "full corpus", 0.98), ("private_gain", ORANGE, "o", "private", 1.02))
    for column, color, marker, label, aside in gains:
        points = _points(own, "depth", column, aside=aside)
        left.errorbar(*points, color=color, marker=marker, capsize=2, label=label)
    left.set(xlabel=f"adapted layers (rank {first['rank']})", ylabel="gain, points")
    left.set_title("(a) gain by depth", loc="left")
    left.set_xticks([row["depth"] for row in own])
    looks = cycle(((ORANGE, "o"), (BLUE, "s"), (GREEN, "^"), (PINK, "D"), (SKY, "v"), (RED, "P")))
    for row, (color, marker) in zip(rows, looks, strict=False):
        look = {"color": color, "marker": marker, "linestyle": "none", "capsize": 2, "elinewidth": 0.8}
        label = f"{row['layers']}, rank {row['rank']}"
        right.errorbar(*_points([row], "tokens_per_second", "private_gain"), **look, label=label)
    measured = f"engine, {first['timed_worlds']} worlds, {first['streams']} sequences"
    right.set(xlabel=f"tokens a second ({measured})", ylabel="private gain, points")
    right.set_title("(b) private gain by speed", loc="left")
    for axes in (left, right):  # below, where no bar is
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, fontsize=7)
    return canvas


@drawn(
    "fig:flatness",
    "flatness",
    "The budget drives the noise without limit, and the released token only until votes no longer count. (a) Median "
    "and largest noise scale over positions with dissent, with a line of slope 1/√b (shifted down to be seen). (b) "
    "Flips rise towards the limit of a release that ignores the vote, flips on unanimous positions are exactly zero, "
    "and accuracy moves only as long as flips do. Bars: one standard error over passages.",
)
def flatness(result: Result) -> Canvas:
    from matplotlib.lines import Line2D

    canvas = _canvas(6.4, 2.7)
    left, right = canvas.subplots(1, 2)
    looks = {"greedy": (ORANGE, "s", "greedy"), "gumbel": (BLUE, "o", "coupled Gumbel")}
    for decoder, (color, marker, _) in looks.items():
        rows = [row for row in result.select(collection=1, decoder=decoder) if row["budget"] != "inf"]
        if not rows or rows[0]["sigma_median"] is None:
            continue
        budgets, medians = (np.array([row[name] for row in rows]) for name in ("per_token_nats", "sigma_median"))
        left.plot(budgets, medians, marker=marker, color=color)
        left.plot(budgets, [row["sigma_max"] for row in rows], marker=marker, color=color, ls="--", mfc="white")
        if decoder == "gumbel":
            left.plot(budgets, medians[0] * np.sqrt(budgets[0] / budgets) / 3.0, color=GREY, ls=":")
        lines: Mapping[str, Mapping[str, Any]] = {
            "flip_dissent": {"marker": marker},
            "accuracy": {"marker": marker, "mfc": "white", "ls": "--"},
            "flip_unanimous": {"marker": "x", "ls": "none"},
        }
        for column, look in lines.items():
            if all(row[column] is not None for row in rows):  # without such positions there is no line
                right.errorbar(*_points(rows, "per_token_nats", column), color=color, **look)
        right.axhline(rows[0]["flip_limit"], color=color, ls=":", lw=1.0)
    left.set(yscale="log", ylabel="noise scale σ")
    left.set_title("(a) the budget drives the noise", loc="left")
    right.set(ylabel="rate", ylim=(-0.03, 1.0))
    right.set_title("(b) flips settle, and accuracy with them", loc="left")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([2.0**-n for n in range(4, 33, 4)], [f"$2^{{-{n}}}$" for n in range(4, 33, 4)])
        axes.set_xlabel("per-token budget b, nats (tighter to the right)")
        axes.invert_xaxis()
        axes.minorticks_off()

    def key(label: str, color: str = GREY, **look: Any) -> Any:
        return Line2D([], [], color=color, label=label, **look)

    hollow = {"marker": "o", "mfc": "white", "ls": "--"}
    decoders = [key(name, color, marker=marker) for color, marker, name in looks.values()]
    left.legend(
        handles=[*decoders, key("median", marker="o"), key("max", **hollow), key("slope of 1/√b", ls=":")],
        loc="upper left",
        fontsize=7,
    )
    unanimous, limit = key("flips | unanimous", marker="x", ls="none"), key("limit 1 − 1/ā", ls=":")
    right.legend(
        handles=[key("flips | dissent", marker="o"), key("accuracy", **hollow), unanimous, limit],
        loc="upper left",
        fontsize=7,
        ncols=2,
    )
    return canvas


_SPARE = [(color, marker) for marker in "vP*X<>" for color in (PINK, SKY, GREY)]
"""For releases that were added; after these they repeat."""
_RELEASES: Mapping[str, Look] = {
    "gaussian": (BLUE, "o"),
    "channel": (ORANGE, "s"),
    "plurality": (GREEN, "D"),
    "mixture": (RED, "^"),
}


def looks_of(names: Iterable[str], known: Mapping[str, Look] = _RELEASES) -> dict[str, Look]:
    """Colour and marker of every release: the four have their own, others a spare one, in their order."""
    others = [name for name in dict.fromkeys(names) if name not in known]
    spare = [look for look in _SPARE if look not in known.values()]
    return {**known, **dict(zip(others, cycle(spare), strict=False))}


@drawn(
    "fig:pmixed",
    "pmixed",
    "PAC and PMixED at a matched bound on membership inference (ε = 1), on the same records and test text. At every "
    "horizon PMixED takes the best N, order and sampling rate of its own search. Bars: one standard error over "
    "passages of the text; in (a) most of it is common to all methods, since they read the same ones. PAC draws inside "
    "the public top 200, PMixED over the whole vocabulary: each has a public model of its own. (b) is floored at "
    "0.1 %, and empty where the ceiling lies below the public model.",
)
def pmixed(result: Result) -> Canvas:
    canvas = _canvas(7.2, 2.9)
    left, right = canvas.subplots(1, 2)
    known = {"gaussian": (BLUE, "o"), "plurality": (SKY, "s"), "mixture": (GREEN, "^"), "channel": (PINK, "v")}
    readings = {"generous": (ORANGE, "D"), "rigorous": (RED, "X"), "strict": (GREY, "P")}
    floor, pac = 1e-3, result.select(kind="pac")
    curves = [
        (f"PAC, {name}", result.select(kind="pac", epsilon=1.0, release=name), look)
        for name, look in looks_of((row["release"] for row in pac), known).items()
    ] + [
        (f"PMixED, {name}", result.select(kind="matched", epsilon=1.0, reading=name, is_selected=True), look)
        for name, look in readings.items()
    ]
    ink = result.select(kind="ink", epsilon=1.0, adjacency="any", is_selected=True)
    if ink:  # searched where there was public text
        is_searched = any(row["is_searched"] for row in ink)
        best_ink = [row for row in ink if row["is_searched"] == is_searched]
        curves.append(("InvisibleInk (own temperature)", best_ink, ("black", "*")))
    for number, (label, rows, (color, marker)) in enumerate(curves):
        style: dict[str, Any] = {"color": color, "marker": marker, "capsize": 2, "elinewidth": 0.7}
        aside = 1.06 ** (number - (len(curves) - 1) / 2)  # bars beside each other, not one behind another
        points = _points(rows, "queries", "accuracy", "stderr", aside)
        left.errorbar(*points, label=label, ecolor=(color, 0.35), **style)
        shared = [row for row in rows if row["headroom"] is not None]
        if shared:
            x, shares, errors = _points(shared, "queries", "headroom", aside=aside)
            right.errorbar(x, [max(share, floor) for share in shares], errors, **style)
    ensembles, paper = result.select(kind="ensemble"), result.select(kind="pac", release="gaussian")[0]
    best = max(ensembles, key=lambda row: float(row["accuracy_ceiling"]))
    references = (
        (ensembles[0]["accuracy_public"], "public model", ":"),
        (paper["accuracy_public"], "public model, top 200", (0, (1, 4))),
        (paper["accuracy_ceiling"], "PAC without noise", "--"),
        (best["accuracy_ceiling"], f"PMixED without privacy, N = {best['num_shards']}", "-."),
    )
    for value, label, dashes in references:
        left.axhline(value, color="black", linewidth=0.8, linestyle=dashes, label=label)
    left.set(xscale="log", xlabel="queries T", ylabel="next-token accuracy", title="(a) accuracy")
    right.set(xscale="log", yscale="log", xlabel="queries T", ylabel="share of own headroom", title="(b) headroom kept")
    right.set_ylim(floor, 1.5)
    canvas.legend(loc="outside lower center", ncols=4, fontsize=7)
    return canvas


@drawn(
    "fig:releases",
    "releases",
    "Share of the fine-tuning gain that each release keeps, against what a session can leak about the secret. Points "
    "of a line are budgets from 2^-32 (left) to 2^-4 (right). Dashed: releases that never read the secret leak "
    "nothing. Bars: one standard error over passages of the text.",
)
def releases(result: Result) -> Canvas:
    canvas = _canvas(4.6, 2.9)
    axes = canvas.subplots()
    shown = [row for row in only_releases(result) if row["retained_gain"] is not None]
    for name, (color, marker) in looks_of(row["release"] for row in shown).items():
        rows = [row for row in shown if row["release"] == name]
        if not rows:
            continue
        leaks, gains, errors = _points(rows, "can_tell_nats", "retained_gain")
        if rows[0]["reads_secret"]:
            look: Any = {"color": color, "marker": marker, "label": name, "capsize": 1.5, "elinewidth": 0.7}
            axes.errorbar([max(leak, 1e-12) for leak in leaks], gains, errors, **look)
        else:
            axes.axhline(gains[0], color=color, ls="--", label=f"{name} (leaks nothing)")
    axes.axhline(0.0, color=GREY, lw=0.8)
    axes.text(0.01, 0.0, "public model", transform=axes.get_yaxis_transform(), va="bottom", color=GREY, fontsize=6.5)
    axes.set_xscale("log")
    axes.set(xlabel="what a session can leak, nats (Σ I, at most)", ylabel="retained gain")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if axes.get_legend_handles_labels()[0]:
        canvas.legend(loc="outside lower center", ncols=2)
    return canvas


@drawn(
    "fig:knowledge",
    "knowledge",
    "Questions about what the records say that a greedy completion answers exactly. Bars: one standard error over "
    "different answers. Light: not private, or nothing learnt.",
)
def knowledge(result: Result) -> Canvas:
    rows = result.select(part="score", kind=ALL, collection=1)[::-1]
    canvas = _canvas(4.6, 0.5 + 0.19 * len(rows))
    axes = canvas.subplots()
    looks = looks_of(row["release"] for row in rows if row["release"] not in OTHERS)
    named = [f"{OTHERS.get(row['release'], row['release'])}, {row['budget'] or ''}".rstrip(", ") for row in rows]
    names = [re.sub(r"2\^(-\d+)$", r"$2^{\1}$", name) for name in named]
    colours = ["#b8b8b8" if row["release"] in OTHERS else looks[row["release"]][0] for row in rows]
    errors = [row["exact_match_stderr"] or 0.0 for row in rows]
    axes.barh(names, [row["exact_match"] for row in rows], xerr=errors, color=colours, error_kw={"lw": 0.8})
    axes.set(xlabel="exact match", xlim=(0.0, None))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(False, axis="y")
    return canvas


@drawn(
    "fig:session",
    "sessions",
    "Leak of sessions as a share of what they were charged (points, errors over sessions), and the dissent of the very "
    "same sessions (open squares). Horizons of one budget share sessions.",
)
def session(result: Result) -> Canvas:
    from matplotlib.lines import Line2D

    rows = result.select(collection=1)
    budgets = dict(zip(dict.fromkeys(row["budget"] for row in rows), (BLUE, ORANGE, GREEN), strict=False))
    canvas = _canvas(6.0, 2.7)
    axes = canvas.subplots()
    for i, (budget, color) in enumerate(budgets.items()):
        own = [row for row in rows if row["budget"] == budget]
        aside = 1.0 + 0.08 * (i - (len(budgets) - 1) / 2)  # so that errors do not cover each other
        where, shares, errors = _points(own, "horizon", "leaked_over_charged", aside=aside)
        dissent = [100 * row["dissent"] for row in own]
        axes.plot(where, dissent, color=color, ls=":", marker="s", mfc="white", lw=1.0, ms=3.5)
        shares, errors = ([100 * value for value in values] for values in (shares, errors))
        axes.errorbar(where, shares, errors, color=color, marker="o", capsize=2)
    horizons = sorted({row["horizon"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(horizons, [f"{horizon:,}" for horizon in horizons])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low - (high - low)), high + 0.25 * (high - low))  # no closer than the errors justify
    axes.set_xlabel("tokens of the session")
    axes.set_ylabel("% of tokens, % of the charge")
    signs = {budget: f"${budget.replace('^', '^{')}}}$" if "^" in budget else budget for budget in budgets}
    keys = [Line2D([], [], color=color, label=f"b = {signs[budget]}") for budget, color in budgets.items()]
    keys.append(Line2D([], [], color=GREY, marker="o", label="leaked ÷ charged (± one standard error)"))
    keys.append(Line2D([], [], color=GREY, marker="s", mfc="white", ls=":", label="dissent of the same sessions"))
    axes.legend(handles=keys, fontsize=7, loc="lower center", ncols=2)
    return canvas


@drawn(
    "fig:student",
    "student",
    "Gain kept by students of private text, by tokens distilled (coupled Gumbel), beside the full-corpus adapter, the "
    "public model and DP adapters. Cross: a student of the realized world's own text, without noise. Bars: one "
    "standard error over passages.",
)
def student(result: Result) -> Canvas:
    canvas = _canvas(4.6, 3.1)
    axes = canvas.subplots()
    found = result.select(part="gain", decoder="gumbel", collection=1)
    rows = [row for row in found if row["retained_gain"] is not None]
    students = [row for row in rows if row.get("is_default")]
    names = [row["source"] for row in students if not row["is_control"]]
    looks = looks_of(names)
    for number, name in enumerate(dict.fromkeys(names)):
        (color, marker), own = looks[name], [row for row in students if row["source"] == name]
        look: Any = {"color": color, "marker": marker, "capsize": 2, "elinewidth": 0.8, "label": name}
        where, shares, errors = _points(own, "tokens", "retained_gain", aside=1.0 + 0.04 * number)
        axes.errorbar(where, shares, errors, **look)
    look = {"color": GREY, "marker": "x", "linestyle": "none", "capsize": 2}
    control = [row for row in students if row["source"] == NO_NOISE]
    where, shares, errors = _points(control, "tokens", "retained_gain")
    axes.errorbar(where, shares, errors, **look)
    axes.axhline(1.0, color=GREY, lw=0.8, ls="--", label="full corpus (not private)")
    axes.axhline(0.0, color=GREY, lw=0.8, label="public model")
    for row, dashes in zip((row for row in rows if not row["is_student"]), cycle((":", "-.", (0, (5, 1))))):
        axes.axhline(row["retained_gain"], color=PINK, lw=1.0, ls=dashes, label=row["source"])
    tokens = [row["tokens"] for row in found if row["is_student"]]
    axes.set_xscale("log")
    axes.set(xlabel="tokens distilled", ylabel="gain kept", xlim=(min(tokens) / 1.5, 1.5 * max(tokens)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    canvas.legend(loc="outside lower center", ncols=3, fontsize=7)
    return canvas


@drawn(
    "fig:temperature",
    "temperature",
    "Adaptive temperature against one temperature everywhere (line, τ at its points), by the share of votes "
    "that are not those of τ = 1. (a) Dissent. (b) Lead over the public model at the same temperatures, in percentage "
    "points. Bars: one standard error over passages.",
)
def temperature(result: Result) -> Canvas:
    canvas = _canvas(6.6, 2.9)
    panels = canvas.subplots(1, 2)
    lead = (("lead_noiseless", GREEN, "fixed, no noise"), ("lead_at_32", ORANGE, "fixed, 2⁻³²"))
    fixed, adaptive = (result.select(kind=kind, collection=1) for kind in ("fixed", "adaptive"))
    looks = dict(zip((row["rule"] for row in adaptive), "xP*D", strict=True))
    for name, colour, words in (("dissent", BLUE, "fixed"), *lead):
        axes = panels[int(name != "dissent")]
        axes.errorbar(*_points(fixed, "distance", name), color=colour, marker="o", capsize=2, label=words)
        for row in adaptive:
            label = row["rule"] if name == "dissent" else None
            axes.plot(row["distance"], row[name], looks[row["rule"]], color=colour, ls="none", label=label)
    for row in fixed:
        near = (row["distance"], row["dissent"])
        panels[0].annotate(f"{row['temperature']:g}", near, (2, 4), textcoords="offset points")
    for axes, title in zip(panels, ("(a) dissent", "(b) lead over the public model"), strict=True):
        axes.set_title(title, loc="left")
        axes.set_xlabel("votes changed")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 1):g}%")
        axes.legend(fontsize=6)
    return canvas


@drawn(
    "fig:universe",
    "universe",
    "Is a record in the corpus at all? Members against held-out records, for an attacker with all adapters and for one "
    "who reads text. The guarantee does not cover this question.",
)
def universe(result: Result) -> Canvas:
    canvas = _canvas(6.6, 3.1, None)
    curves = {
        "holds the adapters": [("adapters", attack) for attack in ("loss", "reference", "min-k", "spread")],
        "reads text": [(source, attack) for source in ("released", "full") for attack in ("overlap", "surrogate")],
    }
    lines = ((BLUE, "-"), (ORANGE, "-"), (GREEN, "--"), (PINK, "--"))
    panels = canvas.subplots(1, len(curves), sharey=True)
    for axes, (title, shown) in zip(panels, curves.items(), strict=True):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=":")
        for (source, attack), (colour, line) in zip(shown, lines, strict=True):
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


@drawn(
    "fig:worlds",
    "worlds",
    "How many worlds to train. (a) The share of the gain that is kept: subsets of the trained worlds (lines), worlds "
    "drawn and trained for themselves (squares). (b) The share of tokens on which the worlds dissent. Bars: one "
    "standard error over passages, most of it common to all points.",
)
def worlds(result: Result) -> Canvas:
    canvas = _canvas(6.4, 2.7)
    left, right = canvas.subplots(1, 2)
    for decoder, colour, words in (("greedy", ORANGE, "greedy"), ("gumbel", BLUE, "coupled Gumbel")):
        rows = sorted(result.select(decoder=decoder, collection=1), key=lambda row: row["worlds"])
        lines = [row for row in rows if row["design"] != "balanced"]
        own = [row for row in rows if row["design"] == "balanced"]
        columns = {"retained_gain_at_32": ("-", "o"), "retained_gain_noiseless": ("--", "^")}
        for column, (line, marker) in columns.items():
            label = f"{words}, {'2⁻³²' if column.endswith('32') else 'no noise'}"
            if all(row[column] is not None for row in rows):  # without a gain there is no share of it
                left.errorbar(*_points(lines, "worlds", column), color=colour, ls=line, marker=marker, label=label)
                left.plot([row["worlds"] for row in own], [row[column] for row in own], "s", color=colour, mfc="white")
        right.errorbar(*_points(lines, "worlds", "dissent"), color=colour, marker="o", label=words)
        right.plot([row["worlds"] for row in own], [row["dissent"] for row in own], "s", color=colour, mfc="white")
    sizes = sorted({row["worlds"] for row in result.rows})
    for axes, title in ((left, "(a) share of the gain kept"), (right, "(b) dissent")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("worlds m")
        axes.set_title(title, loc="left")
        axes.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 1):g}%")
        axes.minorticks_off()
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    return canvas
