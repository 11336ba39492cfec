"""Which order and sampling rate PMixED should take at an operating point.

A digest keeps what any operating point needs of every position once its distributions are dropped: small beside them,
but large for a long text (400 bytes for every position, shard model and order). The search therefore reads a short
text of its own, and `play` reads a long one block by block. It needs no sampling: given |R| = n the sample is uniform,
so the expected gain is Σ_n P(n)·G(β_n), where G is the mean over positions and shard models of λ_i(β)(p_i − p0) at the
true token. G is tabulated once per order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.study.baselines.accountants import Reading, rdp_for
from paclm.study.baselines.distributions import Distributions
from paclm.study.baselines.divergence_table import DivergenceTable, compress, tabulate
from paclm.study.baselines.pmixed import PMixedSettings, radius_for, strict_radius, strict_weight_within


@dataclass(frozen=True, slots=True)
class Digest:
    """A text under N shard models and the public model; tensors are where the models are."""

    truth_shards: Tensor  # (n, N) probability of the true token
    truth_public: Tensor  # (n,)
    mass_shards: Tensor  # (n, N) probability of the public support
    mass_public: Tensor  # (n,)
    is_inside: Tensor  # (n,) the true token is in the support
    largest: Tensor  # (n, N) ln p/p0
    smallest: Tensor  # (n, N)
    tables: dict[int, DivergenceTable]  # by order; rows (n, N)
    passage: IntArray  # (n,)

    @property
    def num_shards(self) -> int:
        return int(self.truth_shards.shape[1])

    @property
    def num_positions(self) -> int:
        return int(self.truth_shards.shape[0])

    @property
    def excess(self) -> Tensor:
        """(n, N) what each shard model adds to the probability of the true token."""
        return self.truth_shards - self.truth_public.unsqueeze(1)

    def ceiling(self) -> Tensor:
        """(n,) the true token under the plain average of all shard models: the ensemble without any privacy."""
        return self.truth_shards.mean(1)

    def ceiling_inside(self) -> Tensor:
        """(n,) the same inside the public support, renormalised."""
        return self.inside(self.ceiling(), self.mass_shards.mean(1))

    def public_inside(self) -> Tensor:
        """(n,) the true token under the public model inside its support, renormalised."""
        return self.inside(self.truth_public, self.mass_public)

    def inside(self, truth: Tensor, mass: Tensor) -> Tensor:
        """A release restricted to the public support afterwards: 0 for a true token outside, more for one inside."""
        return torch.where(self.is_inside, truth / mass, 0.0)

    def strict_weights(self, log_ratio: float) -> Tensor:
        """λ (n, N) of the strict ball, whatever the number that takes part."""
        return strict_weight_within(self.largest, self.smallest, log_ratio)

    def table(self, order: int) -> DivergenceTable:
        """The table of an order; raises if none was made."""
        if order not in self.tables:
            raise InvalidInput(f"No table was made for order {order}; there are {sorted(self.tables)}.")
        return self.tables[order]


def digest_of(part: Distributions, orders: Sequence[int]) -> Digest:
    """The digest of a few positions."""
    shards, public, support = part.log_shards, part.log_public, part.support
    where = part.truth.unsqueeze(1)
    wide = (-1, shards.shape[1], -1)
    ratios = compress(shards, public)
    return Digest(
        truth_shards=shards.gather(-1, where.unsqueeze(1).expand(*wide))[..., 0].exp(),
        truth_public=public.gather(-1, where)[:, 0].exp(),
        mass_shards=shards.gather(-1, support.unsqueeze(1).expand(*wide)).exp().sum(-1),
        mass_public=public.gather(-1, support).exp().sum(-1),
        is_inside=(support == where).any(-1),
        largest=ratios.largest,
        smallest=ratios.smallest,
        tables={table.order: table for table in tabulate(ratios.weights, orders)},
        passage=part.passage,
    )


def join_digests(digests: Sequence[Digest]) -> Digest:
    """The digest of texts one after another."""
    names = [field.name for field in fields(Digest) if field.name not in ("tables", "passage")]
    tables = {
        order: DivergenceTable(order, torch.cat([one.tables[order].values for one in digests]))
        for order in digests[0].tables
    }
    columns = {name: torch.cat([getattr(one, name) for one in digests]) for name in names}
    return Digest(tables=tables, passage=np.concatenate([one.passage for one in digests]), **columns)


@torch.inference_mode()
def digest_blocks(
    parts: Iterable[Distributions],
    orders: Sequence[int],
    block: int,
    on_part: Callable[[Distributions], None] = lambda _: None,
) -> Iterator[Digest]:
    """Digest parts in blocks of at least so many positions; `on_part` is called before a part is dropped."""
    waiting: list[Digest] = []
    for part in parts:
        waiting.append(digest_of(part, orders))
        on_part(part)
        if sum(one.num_positions for one in waiting) >= block:
            yield join_digests(waiting)
            waiting = []
    if waiting:
        yield join_digests(waiting)


def make_digest(parts: Iterable[Distributions], orders: Sequence[int]) -> Digest:
    """The digest of a whole text, which has to be short."""
    whole = list(digest_blocks(parts, orders, 1))
    if not whole:
        raise InvalidInput("There is no position to digest: the text is empty.")
    return join_digests(whole)


_RAREST = 1e-12
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

    target: DpTarget
    settings: PMixedSettings
    gain: float  # expected accuracy above the public model's


def mean_gain(gains: FloatArray, radius: FloatArray) -> FloatArray:
    """G at any radius from its values at RADII, by interpolation in the logarithm."""
    with np.errstate(divide="ignore"):
        found: FloatArray = np.interp(np.log(radius), np.log(RADII), gains, left=0.0)
    return found


@torch.inference_mode()
def tabulate_gains(digest: Digest, order: int | None) -> FloatArray:
    """G at RADII for one order's table, or for the strict ball (order None; the radius is then the log ratio)."""
    excess = digest.excess
    if order is not None:
        means: FloatArray = digest.table(order).gains(RADII, excess).mean(0).cpu().numpy()
        return means
    return np.array([float((digest.strict_weights(radius) * excess).mean()) for radius in RADII.tolist()])


def likely_sizes(num_shards: int, rate: float) -> tuple[IntArray, FloatArray]:
    """Numbers of shard models that may be sampled, and their probabilities; the rest is left to the public model."""
    sizes = np.arange(1, num_shards + 1)
    chance: FloatArray = binom.pmf(sizes, num_shards, rate)
    return sizes[chance > _RAREST], chance[chance > _RAREST]


def choose(digest: Digest, targets: Sequence[DpTarget], orders: Sequence[int], rates: Sequence[float]) -> list[Choice]:
    """The best order and rate for each target, by expected accuracy; one choice per target, in their order."""
    best: dict[int, tuple[float, int, float]] = {}  # gain, order and rate by target
    num_shards = digest.num_shards
    chances = {rate: likely_sizes(num_shards, rate) for rate in rates}

    def offer(i: int, gain: float, order: int, rate: float) -> None:
        if i not in best or gain > best[i][0]:
            best[i] = (gain, order, rate)

    loose = [(i, target) for i, target in enumerate(targets) if target.reading != "strict"]
    for order in orders:
        table = tabulate_gains(digest, order)
        budgets = np.array([target.rdp_per_query(order) for _, target in loose])
        is_open = np.flatnonzero(budgets > 0.0)  # elsewhere the order cannot reach ε
        for rate, (sizes, chance) in chances.items():
            radii = np.zeros((len(loose), len(sizes)))
            radii[is_open] = radius_for(budgets[is_open, None], sizes[None, :], rate, order)
            for (i, _), gain in zip(loose, mean_gain(table, radii) @ chance, strict=True):
                offer(i, float(gain), order, rate)
    strict = [(i, target) for i, target in enumerate(targets) if target.reading == "strict"]
    table = tabulate_gains(digest, None) if strict else np.zeros(len(RADII))
    for i, target in strict:
        for rate, (_, chance) in chances.items():
            bound = strict_radius(target.epsilon, target.delta, target.queries, rate, num_shards)
            offer(i, float(mean_gain(table, np.array(bound)) * chance.sum()), 2, rate)
    return [Choice(target, target.settings(num_shards, *best[i][1:]), best[i][0]) for i, target in enumerate(targets)]
