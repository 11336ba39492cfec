"""Voting rules that studies compare with coupled Gumbel votes, and the ceiling of any coupling.

Coins come in as tensors; nothing here draws randomness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paclm.engine.decode_step import coupled_votes, pick


def independent_votes(logits: Tensor, support: Tensor, coins: Tensor, temperature: float) -> Tensor:
    """Every world with its own coins (n, W, k)."""
    return pick(logits.float() + temperature * coins, support)


@dataclass(frozen=True, slots=True)
class HybridCoins:
    """Public coins of the hybrid rule."""

    switch: Tensor  # (n,) uniform in [0, 1)
    common: Tensor  # (n, k) Gumbel, shared by all worlds
    own: Tensor  # (n, W, k) Gumbel, one set per world


def hybrid_votes(
    logits: Tensor, support: Tensor, coins: HybridCoins, temperature: float, threshold: float = 0.9
) -> Tensor:
    """Maximal agreement where the coupling ceiling β reaches the threshold, coupled Gumbel elsewhere; (n, W) ids.

    With probability β all worlds take one common sample of min_s p_s / β; otherwise each world samples what is left
    of its own distribution, (p_s - min) / (1 - β). Each world's marginal stays its own conditional.
    """
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)  # (n, W, k)
    log_least = log_p.amin(1)  # (n, k)
    beta = log_least.exp().sum(-1)  # (n,)
    together = pick((log_least + coins.common).unsqueeze(1), support).expand(-1, logits.shape[1])
    rest = (log_p.exp() - log_least.exp().unsqueeze(1)).clamp_min(0.0)
    # A world whose whole mass is common has no residual; then β is 1 and this branch is never taken.
    apart = pick(rest.log() + coins.own, support)
    maximal = torch.where((coins.switch < beta).unsqueeze(1), together, apart)
    return torch.where(
        (beta >= threshold).unsqueeze(1), maximal, coupled_votes(logits, support, coins.common, temperature)
    )


def coupling_ceiling(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """β = Σ_v min_s p_s(v) over the renormalised support: no coupling agrees more often. (n, W, k) → (n,) float64."""
    return torch.softmax(logits.double() / temperature, dim=-1).amin(1).sum(-1)
