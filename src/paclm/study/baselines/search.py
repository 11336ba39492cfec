"""Which N, order and sampling rate PMixED should take at an operating point, and how well it then does.

The search needs no sampling: given |R| = n the sample is uniform, so the expected gain is Σ_n P(n)·G(β_n), where G is
the mean over positions and shard models of λ_i(β)(p_i − p0) at the true token. G is tabulated once per order. Only
what is selected is then played, with a fresh sample of shard models at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from paclm.privacy.belief import FloatArray
from paclm.study.baselines.accountants import Reading, rdp_for
from paclm.study.baselines.digest import Digest
from paclm.study.baselines.pmixed import PMixedSettings, radius_for, strict_radius, strict_weight_within

RADII: FloatArray = np.geomspace(1e-9, 50.0, 150)


@dataclass(frozen=True, slots=True)
class DpTarget:
    """The guarantee to reach: T queries within (ε, δ)."""

    queries: int
    epsilon: float
    delta: float
    reading: str  # rigorous, generous or strict

    def rdp_per_query(self, order: int) -> float:
        """The Rényi loss at this order that one query may spend; not for the strict reading."""
        reading: Reading = "generous" if self.reading == "generous" else "rigorous"
        return rdp_for(self.epsilon, self.delta, order, reading) / self.queries

    def settings(self, num_shards: int, order: int, rate: float) -> PMixedSettings:
        """The operating point of an ensemble that reaches it."""
        return PMixedSettings(
            num_shards=num_shards,
            order=order,
            rate=rate,
            queries=self.queries,
            epsilon=self.epsilon,
            delta=self.delta,
            reading="generous" if self.reading == "generous" else "rigorous",
            ball="strict" if self.reading == "strict" else "one-order",
        )


class Choice(NamedTuple):
    """The best operating point of one ensemble for one target."""

    settings: PMixedSettings
    gain: float  # expected accuracy above the public model's


def mean_gain(gains: FloatArray, radius: FloatArray) -> FloatArray:
    """G at any radius from its values at RADII, by interpolation in the logarithm."""
    with np.errstate(divide="ignore"):
        found: FloatArray = np.interp(np.log(radius), np.log(RADII), gains, left=0.0)
    return found


def tabulate_gains(digest: Digest, order: int | None) -> FloatArray:
    """G at RADII for one order's table, or for the strict ball (order None; the radius is then the log ratio)."""
    excess = digest.truth_shards - digest.truth_public[:, None]  # (n, N)
    if order is not None:
        return digest.tables[order].mean_gains(RADII, excess)
    weights = (strict_weight_within(digest.largest, digest.smallest, radius) for radius in RADII)
    return np.array([float((own * excess).mean()) for own in weights])


def choose(digest: Digest, targets: Sequence[DpTarget], orders: Sequence[int], rates: Sequence[float]) -> list[Choice]:
    """The best order and rate for each target, by expected accuracy; one choice per target, in their order."""
    best: dict[int, tuple[float, int, float]] = {}  # gain, order and rate by target
    num_shards = digest.num_shards
    members = np.arange(1, num_shards + 1)
    chances = {rate: binom.pmf(members, num_shards, rate) for rate in rates}  # P(|R| = n)

    def offer(i: int, gain: float, order: int, rate: float) -> None:
        if i not in best or gain > best[i][0]:
            best[i] = (gain, order, rate)

    loose = [(i, target) for i, target in enumerate(targets) if target.reading != "strict"]
    for order in orders:
        table = tabulate_gains(digest, order)
        budgets = np.array([target.rdp_per_query(order) for _, target in loose])
        is_open = np.flatnonzero(budgets > 0.0)  # elsewhere the order cannot reach ε
        for rate in rates:
            sizes = members if rate < 1.0 else members[-1:]  # the others cannot occur
            radii = np.zeros((len(loose), num_shards))
            radii[np.ix_(is_open, sizes - 1)] = radius_for(budgets[is_open, None], sizes[None, :], rate, order)
            for (i, _), gain in zip(loose, mean_gain(table, radii) @ chances[rate], strict=True):
                offer(i, float(gain), order, rate)
    strict = [(i, target) for i, target in enumerate(targets) if target.reading == "strict"]
    table = tabulate_gains(digest, None) if strict else np.zeros(len(RADII))
    for i, target in strict:
        for rate in rates:
            bound = strict_radius(target.epsilon, target.delta, target.queries, rate, num_shards)
            offer(i, float(mean_gain(table, np.array(bound)) * chances[rate].sum()), 2, rate)
    return [Choice(target.settings(num_shards, *best[i][1:]), best[i][0]) for i, target in enumerate(targets)]


class PMixedPass(NamedTuple):
    """One pass over the text with fresh samples of shard models."""

    truth: FloatArray  # (n,) probability that the released token is the true one
    inside: FloatArray  # (n,) the same when the release is restricted to the public support
    empty: float  # share of positions without any shard model
    mean_weight: float  # λ over the shard models that took part; NaN if none did


def play(digest: Digest, settings: PMixedSettings, rng: np.random.Generator) -> PMixedPass:
    """One pass: every position has its own sample of shard models."""
    chosen = rng.random((digest.num_positions, digest.num_shards)) < settings.rate  # (n, N)
    sizes = chosen.sum(axis=1)
    truth, mass = digest.truth_public.copy(), digest.mass_public.copy()
    total_weight = 0.0
    for members in np.unique(sizes[sizes > 0]):
        rows = np.flatnonzero(sizes == members)
        weights = np.zeros((len(rows), digest.num_shards))
        at, who = np.nonzero(chosen[rows])
        weights[at, who] = digest.weights(settings, int(members), (rows[at], who))
        for whole, own in ((truth, digest.truth_shards), (mass, digest.mass_shards)):
            whole[rows] += (weights * (own[rows] - whole[rows, None])).sum(axis=1) / members
        total_weight += float(weights.sum())
    taken = int(sizes.sum())
    mean_weight = total_weight / taken if taken else float("nan")
    return PMixedPass(truth, digest.inside(truth, mass), float((sizes == 0).mean()), mean_weight)
