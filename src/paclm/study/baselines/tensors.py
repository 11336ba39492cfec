"""The divergences of `renyi` on tensors, where a vocabulary times all shard models is worth a GPU. float64 only."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def divergence(log_p: Tensor, log_q: Tensor, order: float) -> Tensor:
    """D_a(P‖Q) along the last axis, for distributions with the same support."""
    if order == float("inf"):
        return (log_p - log_q).amax(-1).clamp_min(0.0)
    return (torch.logsumexp(order * log_p + (1.0 - order) * log_q, -1) / (order - 1.0)).clamp_min(0.0)


def symmetric(log_p: Tensor, log_q: Tensor, order: float) -> Tensor:
    """The larger of the two directions."""
    return torch.maximum(divergence(log_p, log_q, order), divergence(log_q, log_p, order))


def mixed(log_p: Tensor, log_public: Tensor, weight: Tensor) -> Tensor:
    """ln(λp + (1−λ)p0); the weight has all axes but the last."""
    lam = weight.unsqueeze(-1)
    return torch.logaddexp(lam.log() + log_p, torch.log1p(-lam) + log_public)


def log_mean(log_p: Tensor, dim: int) -> Tensor:
    """ln of the mean of distributions along an axis."""
    return torch.logsumexp(log_p, dim) - math.log(log_p.shape[dim])
