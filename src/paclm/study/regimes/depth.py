"""Adapted layers and rank: gain, dissent, leak, speed and memory of worlds that differ in the last layers only.

Every point trains the worlds and the full-corpus adapter again, on the same records in the same order, and votes on the
same text with the same coins, secrets and noise. Its learning rate is chosen by private accuracy on training records
that its trial worlds have not seen; the test text takes no part in the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import numpy as np

from paclm.privacy.belief import FloatArray
from paclm.privacy.leak import Estimate
from paclm.study.cell import make_cell
from paclm.study.decoding import GUMBEL
from paclm.study.depth_points import (
    DECODINGS,
    DepthScale,
    Trainer,
    choose_points,
    measure_costs,
    search_rate,
    train_and_vote,
    values_at,
)
from paclm.study.lab import Lab
from paclm.study.recorded_votes import TextVotes
from paclm.study.regime import Findings, Regime
from paclm.study.replay import ReplaySettings, replay
from paclm.study.results import Result, Row
from paclm.study.statistics import clustered_mean, retained_gain

LEAK_PER_TOKEN = 2.0**-16
PUBLIC_TOLERANCE = 0.05  # share of positions at which rounding may change the public model's choice


def run(lab: Lab, scale: DepthScale) -> Findings:
    """The speed of all points, then every point."""
    own = lab.workspace.training
    points = choose_points(_num_layers(lab), own.rank, scale.ranks)
    sizes = {name: size for name, size in asdict(scale).items() if name != "ranks"}  # no point depends on the others'
    parts = lab.parts("depth", [sizes, asdict(own)])
    trainer = Trainer(lab)
    timed = "-".join(str(point.rank) for point in points)
    costs = parts.rows(f"costs-of-{timed}", partial(measure_costs, lab, scale, points))
    count = len(lab.workspace.membership)
    records = {"records": min(scale.records, count), "records_in_workspace": count}
    chosen: dict[int, float] = {}  # by depth, at the workspace's rank
    rates: list[Row] = []
    measured: list[Row] = []
    of_all: dict[str, tuple[TextVotes, dict[str, FloatArray]]] = {}
    for point, cost in zip(points, costs, strict=True):
        near = chosen.get(point.depth, [own.learning_rate, *chosen.values()][-1])
        start = near * own.rank / point.rank  # a matrix of twice the rank moves twice as far at the same rate
        tried = parts.rows(f"rates-{point.name}", partial(search_rate, trainer, scale, point, start))
        rates += tried
        rate = next(row["learning_rate"] for row in tried if row["is_chosen"])
        chosen.setdefault(point.depth, rate)
        arrays = parts.arrays(f"votes-{point.name}", partial(train_and_vote, trainer, scale, point.settings(own, rate)))
        seconds, tokens = arrays["training"].tolist()
        common: Row = {**point.row(), "alpha": point.settings(own, rate).alpha, "learning_rate": rate, **records}
        common |= {"training_seconds": seconds, "training_tokens_per_second": tokens / seconds}
        for decoding in DECODINGS:
            votes = TextVotes.from_arrays(arrays, decoding.name)
            values = values_at(votes)
            first = of_all.setdefault(decoding.name, (votes, values))
            row: Row = {"kind": "point", **common, "decoder": decoding.name, "worlds": votes.num_worlds}
            row |= _figures(lab, votes, values) | _against(lab, votes, values, *first)
            if decoding is GUMBEL:
                row |= parts.rows(f"leak-{point.name}", partial(_leak, lab, scale, votes))[0]
            measured.append(row | cost)
    return Findings([*rates, *measured], _notes(lab, scale, rates, measured[0]))


def _num_layers(lab: Lab) -> int:
    from paclm.engine.base_model import base_of, config_of

    return int(config_of(base_of(lab.workspace)).num_hidden_layers)


def _figures(lab: Lab, votes: TextVotes, values: Mapping[str, FloatArray]) -> Row:
    row: Row = {"positions": votes.num_positions, "passages": len(np.unique(votes.passage))}

    def note(name: str, found: Estimate | None) -> None:
        row[name], row[f"{name}_stderr"] = found or (None, None)

    def mean(each: FloatArray) -> Estimate:
        return clustered_mean(each, votes.passage, lab.rng("depth", "bootstrap"))

    for name in ("public", "full", "noiseless", "private"):
        note(f"accuracy_{name}", mean(values[name]))
    note("dissent", mean(values["dissent"]))
    note("gain", mean(values["full"] - values["public"]))
    note("private_gain", mean(values["private"] - values["public"]))
    for name in ("noiseless", "private"):
        rng = lab.rng("depth", "bootstrap")
        found = retained_gain(values[name], values["public"], values["full"], votes.passage, rng)
        note("kept" if name == "private" else "kept_noiseless", found)
    return row


def _against(
    lab: Lab,
    votes: TextVotes,
    values: Mapping[str, FloatArray],
    first: TextVotes,
    reference: Mapping[str, FloatArray],
) -> Row:
    """Differences to all layers, paired position by position."""
    row: Row = {"public_differs": float((votes.public != first.public).mean())}
    for name, of in (("gain", "full"), ("private_gain", "private"), ("dissent", "dissent")):
        rng = lab.rng("depth", "bootstrap")
        found = clustered_mean(values[of] - reference[of], votes.passage, rng)
        row[f"{name}_difference"], row[f"{name}_difference_stderr"] = found
    return row


def _leak(lab: Lab, scale: DepthScale, votes: TextVotes) -> list[Row]:
    """Leak ÷ charge of sessions with a persistent secret on these votes, every token charged."""
    advance = lab.start_task("leak", scale.sessions * scale.tokens)
    seed = lab.seed_for("depth", "sessions")
    settings = ReplaySettings(per_token=LEAK_PER_TOKEN, sessions=scale.sessions, tokens=scale.tokens, seed=seed)
    found = replay(votes, settings, advance)
    row: Row = {"sessions": scale.sessions, "tokens_per_session": scale.tokens, "leak_per_token_nats": LEAK_PER_TOKEN}
    row |= {name: found[name] for name in ("leaked_nats", "leaked_stderr", "charged_nats", "leaked_over_charged")}
    row["leaked_over_charged_stderr"] = found["leaked_stderr"] / found["charged_nats"]
    row["tells_more_than"] = ", ".join(found["tells_more_than"]) or None
    return [row]


def _notes(lab: Lab, scale: DepthScale, rates: list[Row], first: Row) -> list[str]:
    notes = [
        f"Points were trained on {first['records']:,} of the workspace's {first['records_in_workspace']:,} records: "
        "learning rates and gains hold for that many. Set `layers`, `rank`, `alpha` and `learning_rate` of one row "
        "together.",
        "Points share records, order of training, text, coins, secrets and noise. Every point has a learning rate of "
        "its own, chosen by private accuracy (coupled Gumbel at 2^-32) on training records that its trial worlds have "
        "not seen.",
        f"Speed and cache are those of {first['timed_worlds']} worlds and {first['streams']} sequences, whatever the "
        f"workspace has (here {lab.num_worlds} worlds). Speed is that of the engine alone, with untrained adapters: no "
        "release, no ledger, no HTTP.",
    ]
    for layers, rank in dict.fromkeys((row["layers"], row["rank"]) for row in rates):
        tried = [row["difference"] for row in rates if (row["layers"], row["rank"]) == (layers, rank)]
        if max(tried) in (tried[0], tried[-1]):
            notes.append(
                f"layers {layers}, rank {rank}: the best learning rate is at an end of those tried, so the next may be "
                f"better (most_rates = {scale.most_rates})."
            )
    return notes


def verdicts(result: Result) -> list[str]:
    """Whether the trunk is cached once, whether the public model stays the same, whether a release leaks too much."""
    rows = result.select(kind="point")
    fewer = [row for row in rows if row["layers"] != "all"]
    cached = {row["layers"]: row["cache_ratio"] for row in fewer}
    alarm = "ALARM: " if any(ratio >= 1.0 for ratio in cached.values()) else ""
    listed = ", ".join(f"{layers} {ratio:.3f}" for layers, ratio in cached.items())
    differs = max(row["public_differs"] for row in rows)
    changed = "ALARM: " if differs > PUBLIC_TOLERANCE else ""
    broken = [
        f"{row['layers']}, rank {row['rank']}: {row['tells_more_than']}" for row in rows if row.get("tells_more_than")
    ]
    leak = f"ALARM: releases exceed {'; '.join(broken)}" if broken else "no release leaks more than it may"
    return [
        f"{alarm}cache of a token against all layers: {listed} (alarm from 1: the trunk would be kept for every world)",
        f"{changed}largest share of positions where the public model's choice changes with the adapted layers: "
        f"{differs:.2%} (alarm from {PUBLIC_TOLERANCE:.0%}: adapters would reach it)",
        leak,
    ]


def in_points(row: Row) -> Row:
    """The row with gains and differences in percentage points."""
    names = [name for name in row if "gain" in name or "_difference" in name]
    return row | {name: 100.0 * row[name] for name in names if row[name] is not None}


def in_short(result: Result) -> list[str]:
    """What decides, one line a point: private gain, speed and cache against all layers."""
    lines = []
    for row in map(in_points, result.select(kind="point", decoder="gumbel")):
        if row["layers"] == "all":
            gain, rest = make_cell(row, "private_gain ±", "+.2f"), f"{row['tokens_per_second']:,.0f} tokens/s"
        else:
            gain = make_cell(row, "private_gain_difference ±", "+.2f")
            rest = f"{row['speed_ratio']:.2f} times the tokens/s, {row['cache_ratio']:.2f} of the cache"
        against = "" if row["layers"] == "all" else " against all"
        lines.append(f"{row['layers']}, rank {row['rank']}{against}: private gain {gain.ours()} points, {rest}")
    return lines


REGIME = Regime(
    name="depth",
    title="Adapted layers and rank",
    question="How do gain, dissent, leak, speed and memory depend on the adapted layers and on the rank?",
    presets={
        "quick": DepthScale(
            worlds=8,
            records=40,
            positions=2048,
            trial_worlds=4,
            trial_positions=1024,
            most_rates=4,
            sessions=32,
            tokens=256,
            streams=4,
            timed_worlds=16,
            steps=20,
        ),
        "paper": DepthScale(
            worlds=32,
            records=512,
            positions=16384,
            trial_worlds=8,
            trial_positions=8192,
            most_rates=4,
            sessions=100,
            tokens=2048,
            streams=100,
            timed_worlds=128,
            steps=100,
        ),
    },
    run=run,
    in_short=in_short,
    verdicts=verdicts,
    for_each_collection=False,
)
