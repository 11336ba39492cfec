"""PMixED: mollify every sampled shard model toward the public one, average, and sample from that.

    R   each shard model with probability q; none → the public model answers
    β   from ε_sub(β; |R|) = ε_RDP / T                                       `radius_for`
    λ_i the largest weight with D↔_a(λp_i + (1−λ)p0, p0) ≤ aβ                `mixing_weight`
    out mean over R of λ_i p_i + (1−λ_i) p0

This is the published method with its own accountant, whose gaps docs/research/baselines.md names; `strict` closes them.
The accountant counts on disjoint shards: one record moves one shard model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.study.baselines import strict
from paclm.study.baselines.accountants import Reading, largest, log_expm1, rdp_for, sampled_rdp
from paclm.study.baselines.renyi import check_whole_order, log_sum_exp, mix

Ball = Literal["one-order", "strict"]

_SAFETY = 1e-12
"""Relative; the divergence is computed to about 1e-15."""
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PMixedSettings:
    """One operating point. Frozen before the first query; T queries compose to at most (ε, δ) by its accountant."""

    num_shards: int
    order: int
    rate: float = 1.0
    """q: the probability with which a shard model takes part in a query."""
    queries: int
    """T."""
    epsilon: float
    delta: float = 1e-5
    reading: Reading = "rigorous"
    ball: Ball = "one-order"
    """`one-order` is the published rule; `strict` bounds the largest log ratio, with one radius for every query."""
    radii: FloatArray = field(init=False, repr=False, compare=False)
    """β for 0 … N sampled shard models; 0 where the budget allows nothing."""

    def __post_init__(self) -> None:
        check_whole_order(self.order)
        if self.num_shards < 2 or self.queries < 1:
            raise InvalidInput(f"PMixED needs at least 2 shards and 1 query, not {self.num_shards} and {self.queries}.")
        if self.ball not in ("one-order", "strict"):
            raise InvalidInput(f"There is no ball {self.ball!r}. Choose one-order or strict.")
        if self.ball == "strict":
            if self.reading != "rigorous":
                raise InvalidInput("The strict ball is for the rigorous reading: the other one is no guarantee.")
            bound = strict.log_ratio_for(self.epsilon, self.delta, self.queries, self.rate, self.num_shards)
            radii = np.full(self.num_shards + 1, bound)
        else:
            members = np.arange(self.num_shards + 1)
            radii = radius_for(np.full(members.shape, self.rdp / self.queries), members, self.rate, self.order)
        radii[: self.num_shards if self.rate == 1.0 else 1] = 0.0  # sizes that never come up
        radii.setflags(write=False)
        object.__setattr__(self, "radii", radii)

    @property
    def rdp(self) -> float:
        """ε_RDP, for all queries together."""
        return rdp_for(self.epsilon, self.delta, self.order, self.reading)

    @property
    def is_feasible(self) -> bool:
        """Whether any query may be answered with more than the public model."""
        return bool(self.radii.any())

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        said = f"ε = {self.epsilon:g}, δ = {self.delta:g} over {self.queries:,} queries, per shard of records"
        if self.ball == "strict":
            return f"(ε, δ)-differential privacy, worst case: {said}"
        if self.reading == "generous":
            return (
                f"Rényi loss ε at order {self.order}, which is less than (ε, δ)-DP; by the authors' accountant: {said}"
            )
        return f"(ε, δ)-differential privacy by the authors' accountant, which has a gap below its order: {said}"

    def weights(self, log_shards: npt.ArrayLike, log_public: npt.ArrayLike, members: npt.ArrayLike) -> FloatArray:
        """λ of shard models (…, V) when so many take part; the number may differ along all axes but the last."""
        radius = self.radii[np.asarray(members)]
        if self.ball == "strict":
            return strict.mixing_weight(log_shards, log_public, radius)
        return mixing_weight(log_shards, log_public, self.order, radius)


def log_member_excess(radius: npt.ArrayLike, members: npt.ArrayLike, order: int) -> FloatArray:
    """ln(e^((k−1)·ε_n(k)) − 1) for k = 2 … order (…, order − 1): what one of n shard models adds to the k-th moment.

    ε_1(k) = βk; for n ≥ 2, ε_n(k) = ln((n−1)/n + e^((k−1)·4βk)/n) / (k−1).
    """
    beta, n = np.asarray(radius, dtype=np.float64)[..., None], np.asarray(members)[..., None]
    k = np.arange(2.0, order + 1)
    is_alone = n <= 1
    return log_expm1((k - 1) * k * beta * np.where(is_alone, 1.0, 4.0)) - np.where(
        is_alone, 0.0, np.log(np.maximum(n, 1))
    )


def query_loss(radius: npt.ArrayLike, members: npt.ArrayLike, rate: float, order: int) -> FloatArray:
    """ε_sub: the Rényi loss of one query at the given order."""
    return sampled_rdp(order, rate, log_member_excess(radius, members, order))


def radius_for(budget: npt.ArrayLike, members: npt.ArrayLike, rate: float, order: int) -> FloatArray:
    """β with ε_sub(β) ≤ budget, from below; 0 where the budget is not positive."""
    most, n = np.broadcast_arrays(np.asarray(budget, dtype=np.float64), np.asarray(members))
    return largest(lambda radius: query_loss(radius, n, rate, order) <= most, most.shape)


def mixing_weight(log_p: npt.ArrayLike, log_public: npt.ArrayLike, order: int, radius: npt.ArrayLike) -> FloatArray:
    """λ for distributions (…, V): 1 inside the ball D↔_a ≤ aβ, else the root from below, by bisection."""
    p, public = np.asarray(log_p, dtype=np.float64), np.asarray(log_public, dtype=np.float64)
    difference = log_difference(p, public)
    target = order * np.asarray(radius, dtype=np.float64) * (1.0 - _SAFETY)
    shape = np.broadcast_shapes(difference.shape[:-1], target.shape)
    low, high = np.zeros(shape), np.ones(shape)
    inside = mollified_divergence(difference, public, high, order) <= target
    if inside.all():
        return high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        holds = mollified_divergence(difference, public, middle, order) <= target
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    weight: FloatArray = np.where(inside, 1.0, low)
    return weight


def log_difference(log_p: FloatArray, log_public: FloatArray) -> FloatArray:
    """ln p/p0 (…, V); refuses a public distribution without full support, or numbers that are none."""
    if not np.isfinite(log_public).all() or np.isnan(log_p).any() or (log_p > 1e-9).any():
        raise InvalidInput(
            "Log probabilities must be numbers of at most 0, and the public model must give mass to every token."
        )
    difference: FloatArray = log_p - log_public
    return difference


def mollified_divergence(difference: FloatArray, log_public: FloatArray, weight: FloatArray, order: int) -> FloatArray:
    """D↔_a(λp + (1−λ)p0, p0) from ln p/p0 (…, V) and λ (…): both directions from one logarithm."""
    lam = weight[..., None]
    step = lam * np.expm1(difference)
    with np.errstate(divide="ignore"):
        far = np.log((1.0 - lam) + lam * np.exp(difference))
    log_ratio = np.where(step < -0.5, far, np.log1p(np.maximum(step, -0.5)))  # each where it keeps its digits
    forward = log_sum_exp(log_public + order * log_ratio)
    backward = log_sum_exp(log_public + (1.0 - order) * log_ratio)
    divergence: FloatArray = np.maximum(0.0, np.maximum(forward, backward)) / (order - 1)
    return divergence


def release_distribution(
    log_shards: FloatArray, log_public: FloatArray, chosen: BoolArray, settings: PMixedSettings
) -> tuple[FloatArray, FloatArray]:
    """ln of the distribution that is sampled from (V,), and λ of the chosen shard models (|R|,).

    log_shards: (N, V). An empty choice is the public model itself.
    """
    if log_shards.shape != (settings.num_shards, log_public.shape[-1]) or chosen.shape != (settings.num_shards,):
        raise InvalidInput(
            f"There must be {settings.num_shards} shard models over one vocabulary, not {log_shards.shape}."
        )
    members = int(np.count_nonzero(chosen))
    if members == 0:
        return log_public, np.zeros(0)
    weights = settings.weights(log_shards[chosen], log_public, members)
    mixed = mix(log_shards[chosen], log_public, weights)  # (|R|, V)
    released: FloatArray = log_sum_exp(mixed.T) - math.log(members)
    return released, weights
