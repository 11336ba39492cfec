"""PMixED: mix every sampled shard model with the public one, average, and sample from that.

    R   each shard model with probability q; none → the public model answers
    β   from ε_sub(β; |R|) = ε_RDP / T                                       `radius_for`
    λ_i the largest weight with D↔_a(λp_i + (1−λ)p0, p0) ≤ aβ                `mixing_weight`
    out mean over R of λ_i p_i + (1−λ_i) p0

This is the published method with its own accountant, whose gaps docs/research/baselines.md names. The accountant
assumes disjoint shards: one record moves one shard model.

The strict ball closes the gaps. With |ln m_i/p0| ≤ c for every mixed model, two averages that differ in one of n
members differ by a factor of at most (n−1)/n + e^(2c)/n, and a single member from the public model by at most e^c. Both
are at most (1 + e^(2c))/2, so one bound holds for every sample, and amplification and composition are those of pure DP:
no moment condition, no order, and nothing that depends on how many were sampled. q, T, N and c are public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.study.baselines.accountants import (
    Reading,
    check_whole_order,
    composed_pure,
    largest,
    log_expm1,
    log_sum_exp,
    mix,
    rdp_for,
    sampled_pure,
    sampled_rdp,
)

Ball = Literal["one-order", "strict"]

_SAFETY = 1e-12  # relative; the divergence is computed to about 1e-15
_HALVINGS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PMixedSettings:
    """One operating point. Fixed before the first query; T queries compose to at most (ε, δ) by its accountant."""

    num_shards: int
    order: int
    rate: float = 1.0  # q: the probability with which a shard model takes part in a query
    queries: int  # T
    epsilon: float
    delta: float = 1e-5
    reading: Reading = "rigorous"
    ball: Ball = "one-order"  # the published rule; `strict` bounds the largest log ratio, one radius for every query
    radii: FloatArray = field(init=False, repr=False, compare=False)  # β for 0 … N sampled models; 0: nothing allowed

    def __post_init__(self) -> None:
        check_whole_order(self.order)
        if self.num_shards < 2 or self.queries < 1:
            raise InvalidInput(f"PMixED needs at least 2 shards and 1 query, not {self.num_shards} and {self.queries}.")
        if self.ball not in ("one-order", "strict"):
            raise InvalidInput(f"There is no ball {self.ball!r}. Choose one-order or strict.")
        if self.ball == "strict":
            if self.reading != "rigorous":
                raise InvalidInput("The strict ball is for the rigorous reading: the generous one is no guarantee.")
            bound = strict_radius(self.epsilon, self.delta, self.queries, self.rate, self.num_shards)
            radii = np.full(self.num_shards + 1, bound)
        else:
            members = np.arange(self.num_shards + 1)
            radii = radius_for(np.full(members.shape, self.rdp / self.queries), members, self.rate, self.order)
        radii[: self.num_shards if self.rate == 1.0 else 1] = 0.0  # sizes that cannot occur
        radii.setflags(write=False)
        object.__setattr__(self, "radii", radii)

    @property
    def rdp(self) -> float:
        """ε_RDP, for all queries together."""
        return rdp_for(self.epsilon, self.delta, self.order, self.reading)

    @property
    def guarantee(self) -> str:
        """What is promised, in words."""
        budget = f"ε = {self.epsilon:g}, δ = {self.delta:g} over {self.queries:,} queries, per shard of records"
        if self.ball == "strict":
            return f"(ε, δ)-differential privacy, worst case: {budget}"
        if self.reading == "generous":
            loss = f"Rényi loss ε at order {self.order}, which is less than (ε, δ)-DP"
            return f"{loss}; by the authors' accountant: {budget}"
        return f"(ε, δ)-differential privacy by the authors' accountant, which has a gap below its order: {budget}"

    def weights(self, log_shards: npt.ArrayLike, log_public: npt.ArrayLike, members: npt.ArrayLike) -> FloatArray:
        """λ of shard models (…, V) when this many take part; the number may differ along all axes but the last."""
        radius = self.radii[np.asarray(members)]
        if self.ball == "strict":
            return strict_weight(log_shards, log_public, radius)
        return mixing_weight(log_shards, log_public, self.order, radius)


def log_member_excess(radius: npt.ArrayLike, members: npt.ArrayLike, order: int) -> FloatArray:
    """ln(e^((k−1)·ε_n(k)) − 1) for k = 2 … order (…, order − 1): what one of n shard models adds to the k-th moment.

    ε_1(k) = βk; for n ≥ 2, ε_n(k) = ln((n−1)/n + e^((k−1)·4βk)/n) / (k−1).
    """
    beta, n = np.asarray(radius, dtype=np.float64)[..., None], np.asarray(members)[..., None]
    k = np.arange(2.0, order + 1)
    factor, log_n = np.where(n <= 1, 1.0, 4.0), np.where(n <= 1, 0.0, np.log(np.maximum(n, 1)))
    return log_expm1((k - 1) * k * beta * factor) - log_n


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
    if not np.isfinite(public).all() or np.isnan(p).any() or (p > 1e-9).any():
        raise InvalidInput(
            "Log probabilities must be numbers of at most 0, and the public model must give mass to every token."
        )
    difference = p - public
    target = order * np.asarray(radius, dtype=np.float64) * (1.0 - _SAFETY)
    shape = np.broadcast_shapes(difference.shape[:-1], target.shape)
    low, high = np.zeros(shape), np.ones(shape)
    inside = mixed_divergence(difference, public, high, order) <= target
    if inside.all():
        return high
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        holds = mixed_divergence(difference, public, middle, order) <= target
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return np.where(inside, 1.0, low)


def mixed_divergence(difference: FloatArray, log_public: FloatArray, weight: FloatArray, order: int) -> FloatArray:
    """D↔_a(λp + (1−λ)p0, p0) from ln p/p0 (…, V) and λ (…): both directions from one logarithm."""
    lam = weight[..., None]
    step = lam * np.expm1(difference)
    with np.errstate(divide="ignore"):
        far = np.log((1.0 - lam) + lam * np.exp(difference))
    log_ratio = np.where(step < -0.5, far, np.log1p(np.maximum(step, -0.5)))  # each where it keeps its digits
    forward = log_sum_exp(log_public + order * log_ratio)
    backward = log_sum_exp(log_public + (1.0 - order) * log_ratio)
    return np.maximum(0.0, np.maximum(forward, backward)) / (order - 1)


def release_distribution(
    log_shards: FloatArray, log_public: FloatArray, chosen: BoolArray, settings: PMixedSettings
) -> tuple[FloatArray, FloatArray]:
    """ln of the distribution that is sampled from (V,), and λ of the chosen shard models (|R|,).

    log_shards: (N, V). If none is chosen it is the public model.
    """
    members = int(np.count_nonzero(chosen))
    if members == 0:
        return log_public, np.zeros(0)
    weights = settings.weights(log_shards[chosen], log_public, members)
    mixed = mix(log_shards[chosen], log_public, weights)  # (|R|, V)
    return log_sum_exp(mixed.T) - math.log(members), weights


def strict_query_epsilon(log_ratio: float, rate: float, num_shards: int) -> float:
    """The pure ε of one query when every mixed model stays within the log ratio c of the public one.

    Without sampling all N take part and N−1 without the neighbour, so the factor is (N−1)/N + e^(2c)/N.
    """
    members = num_shards if rate == 1.0 else 2
    return sampled_pure(float(np.log1p(math.expm1(2.0 * log_ratio) / members)), rate)


def strict_radius(epsilon: float, delta: float, queries: int, rate: float, num_shards: int) -> float:
    """The largest log ratio c for which this many queries compose to at most (ε, δ), from below."""
    goal = epsilon * (1.0 - _SAFETY)

    def holds(c: FloatArray) -> BoolArray:
        each = float(c)  # past 300, e^(2c) leaves float64; no budget comes near it
        fits = each < 300.0 and composed_pure(strict_query_epsilon(each, rate, num_shards), queries, delta) <= goal
        return np.array(fits)

    return float(largest(holds))


def strict_weight(log_p: npt.ArrayLike, log_public: npt.ArrayLike, log_ratio: npt.ArrayLike) -> FloatArray:
    """λ for distributions (…, V): the largest with |ln(λp + (1−λ)p0) − ln p0| ≤ c for every token, in closed form."""
    difference = np.asarray(log_p, dtype=np.float64) - np.asarray(log_public, dtype=np.float64)
    most, least, c = (torch.as_tensor(np.asarray(x)) for x in (difference.max(-1), difference.min(-1), log_ratio))
    weight: FloatArray = strict_weight_within(most, least, c).numpy()
    return weight


def strict_weight_within(most: Tensor, least: Tensor, log_ratio: float | Tensor) -> Tensor:
    """The same from the largest and smallest ln p/p0 of each row: 1 + λ(r−1) is monotone in r."""
    c = torch.as_tensor(log_ratio, dtype=torch.float64, device=most.device) * (1.0 - _SAFETY)
    upper = torch.expm1(c) / torch.expm1(most.clamp_min(0.0))
    lower = torch.expm1(-c) / torch.expm1(least.clamp_max(0.0))
    return torch.fmin(upper, lower).nan_to_num(nan=1.0, posinf=1.0).clamp(0.0, 1.0)
