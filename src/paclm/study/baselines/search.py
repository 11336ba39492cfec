"""Which N, order and sampling rate PMixED should take at an operating point, and how well it then does.

The search needs no sampling: given |R| = n the sample is uniform, so the expected gain is Σ_n P(n)·G(β_n), where G is
the mean over positions and shard models of λ_i(β)(p_i − p0) at the true token. G is tabulated once per order. Only
what is selected is then played, with fresh samples of shard models at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

from paclm.privacy.belief import FloatArray
from paclm.study.baselines import strict
from paclm.study.baselines.accountants import READINGS, Reading, rdp_for
from paclm.study.baselines.digest import Digest
from paclm.study.baselines.pmixed import PMixedSettings, radius_for

RADII: FloatArray = np.geomspace(1e-9, 50.0, 150)


@dataclass(frozen=True, slots=True)
class DpTarget:
    """What must hold: T queries within (ε, δ), read one way or the other, or strictly."""

    queries: int
    epsilon: float
    delta: float
    reading: str
    """rigorous, generous or strict."""


class Choice(NamedTuple):
    """The best operating point of one ensemble for one target."""

    settings: PMixedSettings
    gain: float
    """Expected accuracy above the public model's."""


@dataclass(frozen=True, slots=True)
class GainCurve:
    """G over the radius, by interpolation in its logarithm."""

    gains: FloatArray

    def __call__(self, radius: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            found: FloatArray = np.interp(np.log(radius), np.log(RADII), self.gains, left=0.0)
        return found


def gain_curve(digest: Digest, order: int | None) -> GainCurve:
    """G for one order's table, or for the strict ball (order None, the radius is then the log ratio)."""
    excess = digest.truth_shards - digest.truth_public[:, None]  # (n, N)
    if order is not None:
        return GainCurve(digest.tables[order].mean_gains(RADII, excess))
    weights = (strict.weight_within(digest.largest, digest.smallest, radius) for radius in RADII)
    return GainCurve(np.array([float((own * excess).mean()) for own in weights]))


def choose(digest: Digest, targets: Sequence[DpTarget], orders: Sequence[int], rates: Sequence[float]) -> list[Choice]:
    """The best order and rate for each target, by expected accuracy; one choice per target, in their order."""
    best: list[tuple[float, PMixedSettings | None]] = [(-np.inf, None)] * len(targets)
    members = np.arange(1, digest.num_shards + 1)
    loose = [(i, target) for i, target in enumerate(targets) if target.reading in READINGS]
    for order in orders:
        curve = gain_curve(digest, order)
        budgets = np.array([_per_query(target, order) for _, target in loose])
        is_open = np.flatnonzero(budgets > 0.0)  # elsewhere the order cannot reach ε at all
        for rate in rates:
            sizes = members if rate < 1.0 else members[-1:]  # the others never come up
            radii = np.zeros((len(loose), len(members)))
            radii[np.ix_(is_open, sizes - 1)] = radius_for(budgets[is_open, None], sizes[None, :], rate, order)
            gains = curve(radii) @ _size_probabilities(digest.num_shards, rate)
            for (i, target), gain in zip(loose, gains, strict=True):
                if gain > best[i][0]:
                    best[i] = (float(gain), _settings(digest, target, order, rate))
    tight = [(i, target) for i, target in enumerate(targets) if target.reading == "strict"]
    curve = gain_curve(digest, None) if tight else GainCurve(np.zeros(len(RADII)))
    for i, target in tight:
        for rate in rates:
            bound = strict.log_ratio_for(target.epsilon, target.delta, target.queries, rate, digest.num_shards)
            gain = float(curve(np.array(bound)) * _size_probabilities(digest.num_shards, rate).sum())
            if gain > best[i][0]:
                best[i] = (gain, _settings(digest, target, 2, rate))
    return [Choice(settings, gain) for gain, settings in best if settings is not None]


def _per_query(target: DpTarget, order: int) -> float:
    reading: Reading = "generous" if target.reading == "generous" else "rigorous"
    return rdp_for(target.epsilon, target.delta, order, reading) / target.queries


def _size_probabilities(num_shards: int, rate: float) -> FloatArray:
    """P(|R| = n) for n = 1 … N."""
    probabilities: FloatArray = binom.pmf(np.arange(1, num_shards + 1), num_shards, rate)
    return probabilities


def _settings(digest: Digest, target: DpTarget, order: int, rate: float) -> PMixedSettings:
    return PMixedSettings(
        num_shards=digest.num_shards,
        order=order,
        rate=rate,
        queries=target.queries,
        epsilon=target.epsilon,
        delta=target.delta,
        reading="generous" if target.reading == "generous" else "rigorous",
        ball="strict" if target.reading == "strict" else "one-order",
    )


class PMixedPass(NamedTuple):
    """One pass over the text with fresh samples of shard models."""

    truth: FloatArray  # (n,) probability that the released token is the true one
    inside: FloatArray  # (n,) the same when the release is cut to the public support
    empty: float
    """Share of positions that no shard model took part in."""
    mean_weight: float
    """λ over the shard models that did; NaN if none ever did."""


def play(digest: Digest, settings: PMixedSettings, rng: np.random.Generator) -> PMixedPass:
    """One pass: at every position its own sample of shard models."""
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
    return PMixedPass(
        truth, digest.inside(truth, mass), float((sizes == 0).mean()), total_weight / taken if taken else float("nan")
    )
