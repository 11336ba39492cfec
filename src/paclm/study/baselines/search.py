"""Which N, order and sampling rate PMixED should take at an operating point, and how well it then does.

A digest keeps what any operating point needs of every position once its distributions are dropped. The search needs no
sampling: given |R| = n the sample is uniform, so the expected gain is Σ_n P(n)·G(β_n), where G is the mean over
positions and shard models of λ_i(β)(p_i − p0) at the true token. G is tabulated once per order. Only what is selected
is then scored: `expected_truth` is exact at every position, by the same argument. What is not linear in the sample (a
cut to the public support, perplexity) is played, with a fresh sample of shard models at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binom

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray, IntArray
from paclm.study.baselines.accountants import Reading, rdp_for
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.divergence_table import DivergenceTable, compress, tabulate
from paclm.study.baselines.pmixed import PMixedSettings, radius_for, strict_radius, strict_weight_within


@dataclass(frozen=True, slots=True)
class Digest:
    """A text under N shard models and the public model."""

    truth_shards: FloatArray  # (n, N) probability of the true token
    truth_public: FloatArray  # (n,)
    mass_shards: FloatArray  # (n, N) probability of the public support
    mass_public: FloatArray  # (n,)
    is_inside: BoolArray  # (n,) the true token is in the support
    largest: FloatArray  # (n, N) ln p/p0
    smallest: FloatArray  # (n, N)
    tables: dict[int, DivergenceTable]  # by order; rows (n, N)
    passage: IntArray  # (n,)

    @property
    def num_shards(self) -> int:
        return int(self.truth_shards.shape[1])

    @property
    def num_positions(self) -> int:
        return int(self.truth_shards.shape[0])

    def ceiling(self) -> FloatArray:
        """(n,) the true token under the plain average of all shard models: the ensemble without any privacy."""
        mean: FloatArray = self.truth_shards.mean(axis=1)
        return mean

    def ceiling_inside(self) -> FloatArray:
        """(n,) the same inside the public support, renormalised."""
        return self.inside(self.ceiling(), self.mass_shards.mean(axis=1))

    def public_inside(self) -> FloatArray:
        """(n,) the true token under the public model inside its support, renormalised."""
        return self.inside(self.truth_public, self.mass_public)

    def inside(self, truth: FloatArray, mass: FloatArray) -> FloatArray:
        """A release restricted to the public support afterwards: 0 for a true token outside, more for one inside."""
        return np.where(self.is_inside, truth / mass, 0.0)

    def weights(self, settings: PMixedSettings, members: int, where: tuple[IntArray, IntArray]) -> FloatArray:
        """λ (c,) of shard models at positions, `where` (c,) and (c,), when this many take part."""
        radius = float(settings.radii[members])
        if settings.ball == "strict":
            return strict_weight_within(self.largest[where], self.smallest[where], radius)
        return self.table(settings.order).weight(radius, where)

    def table(self, order: int) -> DivergenceTable:
        """The table of an order; raises if none was made."""
        if order not in self.tables:
            raise InvalidInput(f"No table was made for order {order}; there are {sorted(self.tables)}.")
        return self.tables[order]


@torch.inference_mode()
def make_digest(
    parts: Iterable[Distributions], orders: Sequence[int], on_part: Callable[[Distributions], None] = lambda _: None
) -> Digest:
    """Digest a stream of parts; `on_part` is called with every part before it is dropped."""
    kept: dict[str, list[np.ndarray]] = {}
    tables: dict[int, list[DivergenceTable]] = {order: [] for order in orders}
    for part in parts:
        for name, values in _columns(part).items():
            kept.setdefault(name, []).append(values)
        for table in tabulate(compress(part.log_shards, part.log_public), orders):
            tables[table.order].append(table)
        on_part(part)
    if not kept:
        raise InvalidInput("There is no position to digest: the text is empty.")
    joined = {
        order: DivergenceTable(order, np.concatenate([one.values for one in some]), some[0].device)
        for order, some in tables.items()
    }
    return Digest(tables=joined, **{name: np.concatenate(values) for name, values in kept.items()})


def _columns(part: Distributions) -> dict[str, np.ndarray]:
    shards, support = part.log_shards, part.support
    where = part.truth.reshape(-1, 1)
    wide = (-1, shards.shape[1], -1)
    ratio = shards - part.log_public.unsqueeze(1)
    found = {
        "truth_shards": shards.gather(-1, where.unsqueeze(1).expand(*wide))[..., 0].exp(),
        "truth_public": part.log_public.gather(-1, where)[:, 0].exp(),
        "mass_shards": shards.gather(-1, support.unsqueeze(1).expand(*wide)).exp().sum(-1),
        "mass_public": part.log_public.gather(-1, support).exp().sum(-1),
        "is_inside": (support == where).any(-1),
        "largest": ratio.amax(-1),
        "smallest": ratio.amin(-1),
    }
    return {name: values.cpu().numpy() for name, values in found.items()} | {"passage": part.passage}


_RAREST = 1e-12  # a size of the sample with less probability is not counted
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
        means: FloatArray = digest.tables[order].gains(RADII, excess).mean(axis=0)
        return means
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


def expected_truth(digest: Digest, settings: PMixedSettings) -> FloatArray:
    """(n,) probability that the released token is the true one, averaged exactly over samples of shard models."""
    num_shards = digest.num_shards
    sizes = np.arange(1, num_shards + 1)
    chance: FloatArray = binom.pmf(sizes, num_shards, settings.rate)
    sizes, chance = sizes[chance > _RAREST], chance[chance > _RAREST]  # the rest is left to the public model
    excess = digest.truth_shards - digest.truth_public[:, None]
    if settings.ball == "strict":  # one radius for all sizes
        weights = strict_weight_within(digest.largest, digest.smallest, settings.radii[-1])
        gain: FloatArray = chance.sum() * (weights * excess).mean(axis=1)
    else:
        gain = digest.table(settings.order).gains(settings.radii[sizes], excess) @ chance
    return digest.truth_public + gain


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
