"""SubMix: shard models in random pairs, each pair mixed with the public model as far as its two halves agree.

A pair's weight is the largest for which replacing the pair by either half stays within the per-query allowance; an
answer costs what leaving out a pair would change. When any pair has spent its ε the public model answers from then on.
The guarantee is a relaxation over this fixed grouping of the records and depends on the data: not differential privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import FloatArray, IntArray
from paclm.study.baselines.distributions import divergence, log_mean, mixed, symmetric

GUARANTEE = "group relaxation (operational privacy of SubMix), data-dependent; not differential privacy"

_FARTHEST = 200.0  # log ratios beyond this are clipped whatever the constant
_HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class SubMixSettings:
    """What one deployment of SubMix may spend."""

    epsilon: float
    queries: int  # B: the allowance of a query is consumption · ε / B
    order: float = 2.0
    gamma: float = 10.0  # |ln p_i/p0| is clipped at half of it
    consumption: float = 1.0  # c

    def __post_init__(self) -> None:
        if not (self.epsilon > 0.0 and self.queries >= 1 and self.gamma > 0.0 and self.consumption > 0.0):
            raise InvalidInput(f"SubMix needs positive ε, queries, γ and consumption: {self}.")

    @property
    def allowance(self) -> float:
        """Of one query."""
        return self.consumption * self.epsilon / self.queries


class SubMixAnswers(NamedTuple):
    """Answers at n positions, as if nothing had been spent before."""

    log_release: Tensor  # (n, V)
    weights: FloatArray  # (n, pairs)
    losses: FloatArray  # (n, pairs)


def random_pairs(num_shards: int, rng: np.random.Generator) -> IntArray:
    """Shards in pairs (pairs, 2), drawn once per deployment; an odd one is left out."""
    if num_shards < 4:
        raise InvalidInput(f"SubMix needs two pairs of shards, not {num_shards} shards.")
    return rng.permutation(num_shards)[: num_shards // 2 * 2].reshape(-1, 2)


def clip(log_p: Tensor, log_public: Tensor, limit: float) -> Tensor:
    """Keep |ln p/p0| ≤ limit for every token: p times a constant, clipped where it leaves the band, summing to 1.

    The sum never falls as the constant rises, and goes from e^-limit to e^limit: bisection finds the constant.
    """
    ratio = (log_p - log_public).clamp(-_FARTHEST, _FARTHEST)
    high = ratio.abs().amax(-1, keepdim=True) + limit
    low = -high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        total = torch.logsumexp(log_public + (ratio + middle).clamp(-limit, limit), -1, keepdim=True)
        low, high = torch.where(total < 0.0, middle, low), torch.where(total < 0.0, high, middle)
    return torch.log_softmax(log_public + (ratio + high).clamp(-limit, limit), -1)


@torch.inference_mode()
def answer(log_shards: Tensor, log_public: Tensor, pairs: IntArray, settings: SubMixSettings) -> SubMixAnswers:
    """Mix every pair as far as its allowance permits, and average: (n, N, V), (n, V)."""
    public = log_public.unsqueeze(1)
    clipped = clip(log_shards, public, settings.gamma / 2)
    first, second = (clipped[:, torch.from_numpy(own).to(clipped.device)] for own in pairs.T)  # (n, pairs, V)
    middle = torch.logaddexp(first, second) - float(np.log(2.0))

    def differs(weight: Tensor) -> Tensor:
        centre = mixed(middle, public, weight)
        either = (divergence(centre, mixed(half, public, weight), settings.order) for half in (first, second))
        return torch.maximum(*either)

    low = torch.zeros(first.shape[:2], dtype=torch.float64, device=first.device)
    high = torch.ones_like(low)
    inside = differs(high) <= settings.allowance
    for _ in range(_HALVINGS):
        half = 0.5 * (low + high)
        holds = differs(half) <= settings.allowance
        low, high = torch.where(holds, half, low), torch.where(holds, high, half)
    weights = torch.where(inside, 1.0, low)
    members = mixed(middle, public, weights)  # (n, pairs, V)
    mean = log_mean(members, 1)
    total, count = members.exp().sum(1, keepdim=True), members.shape[1]
    without = ((total - members.exp()).clamp_min(torch.finfo(torch.float64).tiny) / (count - 1)).log()
    losses = symmetric(without, mean.unsqueeze(1), settings.order)
    return SubMixAnswers(mean, weights.cpu().numpy(), losses.cpu().numpy())


def within(losses: FloatArray, settings: SubMixSettings) -> int:
    """How many answers come before any pair would exceed its ε, or the queries are used up."""
    spent = np.cumsum(losses, axis=0).max(axis=1)
    return min(settings.queries, int(np.count_nonzero(spent <= settings.epsilon)))
