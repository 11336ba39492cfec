"""PAC's side of the comparison: the same text, the budget that matches (ε, δ), every release, fresh secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.releases import RULES, rule_named
from paclm.study.baselines.matching import matched_nats, success_at_half
from paclm.study.decoding import GREEDY, GUMBEL
from paclm.study.recorded_votes import TextVotes
from paclm.study.results import Row
from paclm.study.statistics import clustered_mean, retained_gain
from paclm.study.streams import play_fresh

if TYPE_CHECKING:
    from paclm.study.lab import Lab


class Rates(NamedTuple):
    """How often the released token is the true one, per vote, averaged over secrets and noise."""

    released: FloatArray  # (n,)
    noiseless: FloatArray  # (n,) without noise: the mean over worlds, exactly
    public: FloatArray  # (n,)
    passage: IntArray  # (n,)


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
    seed = lab.seed_for("pmixed", "pac")
    rows: list[Row] = []
    advance = lab.start_task("PAC at matched bounds", len(points) * len(RULES))
    for release in RULES:
        whole: Row | None = None
        for epsilon, queries in points:
            per_token = matched_nats(epsilon, delta) / queries
            if whole is None or rule_named(release).reads_secret:
                whole = _figures(lab, _rates(_first(votes, positions), release, per_token, passes, seed))
            bound = success_at_half(epsilon, delta)
            point = {"epsilon": epsilon, "queries": queries, "per_token_nats": per_token, "mia_bound": bound}
            rows.append({"kind": "pac", "method": "PAC", "release": release, **point, **whole})
            advance(1)
        epsilon, queries = near
        rates = _rates(_first(votes, queries), release, matched_nats(epsilon, delta) / queries, passes, seed)
        guarantee = f"mutual information: {matched_nats(epsilon, delta):.3f} nats over {queries:,} tokens"
        if not rule_named(release).reads_secret:
            guarantee = "mutual information: none at all about which world was realized"
        named = {"kind": "neighbour", "method": f"PAC, {release}", "guarantee": guarantee, "epsilon": epsilon}
        rows.append({**named, "queries": queries, "private_share": 1.0, **_figures(lab, rates)})
    return rows


def _first(votes: TextVotes, positions: int) -> TextVotes:
    """The votes on the first positions of the text, in all draws."""
    keep = votes.position < positions
    return TextVotes(**{name: column[keep] for name, column in votes.columns().items()})


def _rates(votes: TextVotes, release: str, per_token: float, passes: int, seed: int) -> Rates:
    truth = votes.truth
    released = np.zeros(len(truth))
    for stream in play_fresh(votes, rule_named(release), per_token, passes, votes.num_positions, seed):
        released += stream.released == truth
    noiseless: FloatArray = (votes.votes == truth[:, None]).mean(axis=1)
    public: FloatArray = (votes.public == truth).astype(np.float64)
    return Rates(released / passes, noiseless, public, votes.passage)


def _figures(lab: Lab, rates: Rates) -> Row:
    accuracy, stderr = clustered_mean(rates.released, rates.passage, lab.rng("pmixed", "pac", "bootstrap"))
    rng = lab.rng("pmixed", "pac", "headroom")
    headroom = retained_gain(rates.released, rates.public, rates.noiseless, rates.passage, rng)
    return {
        "accuracy": accuracy,
        "stderr": stderr,
        "accuracy_public": float(rates.public.mean()),
        "accuracy_ceiling": float(rates.noiseless.mean()),
        "headroom": headroom.mean if headroom else None,
        "headroom_stderr": headroom.stderr if headroom else None,
    }
