"""The PAC side of the comparison: the same text, the budget that matches (ε, δ), every release, fresh secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.releases import RULES, rule_named
from paclm.study.baselines.accountants import matched_nats, success_at_half
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.recorded_votes import TextVotes
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh

if TYPE_CHECKING:
    from paclm.study.lab import Lab


def pac_rows(
    lab: Lab,
    *,
    positions: int,
    vote_positions: int,
    gumbel_draws: int,
    passes: int,
    points: Sequence[tuple[float, int]],
    delta: float,
    near: tuple[float, int],
) -> list[Row]:
    """Rows for every release at every (ε, T), and at the neighbours' point on their first queries."""
    decodings = (GREEDY, GUMBEL.times(gumbel_draws))
    votes = lab.text_votes(vote_positions, decodings)[GUMBEL.name]
    rows: list[Row] = []
    advance = lab.start_task("PAC at matched bounds", len(points) * len(RULES))
    for release in RULES:
        whole: Row | None = None
        for epsilon, queries in points:
            per_token = matched_nats(epsilon, delta) / queries
            if whole is None or rule_named(release).reads_secret:
                whole = _figures(lab, _first(votes, positions), release, per_token, passes)
            bound = success_at_half(epsilon, delta)
            point = {"epsilon": epsilon, "queries": queries, "per_token_nats": per_token, "mia_bound": bound}
            rows.append({"kind": "pac", "method": "PAC", "release": release, **point, **whole})
            advance(1)
        epsilon, queries = near
        total = matched_nats(epsilon, delta)
        figures = _figures(lab, _first(votes, queries), release, total / queries, passes)
        guarantee = f"mutual information: {total:.3f} nats over {queries:,} tokens"
        if not rule_named(release).reads_secret:
            guarantee = "mutual information: none at all about which world was realized"
        named = {"kind": "neighbour", "method": f"PAC, {release}", "guarantee": guarantee, "epsilon": epsilon}
        rows.append({**named, "queries": queries, "private_share": 1.0, **figures})
    return rows


def _first(votes: TextVotes, positions: int) -> TextVotes:
    """The votes on the first positions of the text, in all draws."""
    keep = votes.position < positions
    return TextVotes(**{name: column[keep] for name, column in votes.columns().items()})


def _figures(lab: Lab, votes: TextVotes, release: str, per_token: float, passes: int) -> Row:
    """How often the released token is the true one, averaged over secrets and noise."""
    truth, rule, released = votes.truth, rule_named(release), np.zeros(votes.num_positions)
    for stream in play_fresh(votes, rule, per_token, passes, votes.num_positions, lab.seed_for("pmixed", "pac")):
        released += stream.released == truth
    released /= passes
    noiseless: FloatArray = (votes.votes == truth[:, None]).mean(axis=1)  # exact: the mean over worlds
    public = (votes.public == truth).astype(np.float64)
    rngs = [lab.rng("pmixed", "pac", name) for name in ("bootstrap", "headroom")]
    return accuracy_row(released, public, noiseless, votes.passage, *rngs)


def accuracy_row(
    truth: FloatArray,
    public: FloatArray,
    ceiling: FloatArray,
    passage: IntArray,
    rng: np.random.Generator,
    headroom_rng: np.random.Generator,
) -> Row:
    """Mean probability of the true token (n,), and the share of the gain up to the ceiling; errors over passages."""
    accuracy, stderr = clustered_mean(truth, passage, rng)
    headroom = retained_gain(truth, public, ceiling, passage, headroom_rng)
    return {
        "accuracy": accuracy,
        "stderr": stderr,
        "accuracy_public": float(public.mean()),
        "accuracy_ceiling": float(ceiling.mean()),
        "headroom": headroom.mean if headroom else None,
        "headroom_stderr": headroom.stderr if headroom else None,
    }
