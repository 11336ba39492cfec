"""AdaPMixED: a fixed radius, all shard models, and a loss computed from the distributions themselves.

A noisy screen compares the ensemble with the public model on the public top-k; where they are far apart the public
model answers. Otherwise the answer costs what leaving out any one shard model would change. The total, and with it
the reported ε, depends on the private records, so it is not a guarantee that may be published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray, FloatArray
from paclm.study.baselines.accountants import epsilon_of
from paclm.study.baselines.distributions import log_mean, mixed, symmetric
from paclm.study.baselines.divergence_table import compress, tabulate
from paclm.study.baselines.pmixed import log_member_excess

GUARANTEE = "data-dependent ε (authors' accountant): itself computed from private records, so not publishable as it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaSettings:
    """The authors' defaults."""

    order: int = 18
    radius: float = 0.2
    threshold: float = 4.5
    noise: float = 0.01  # σ of the screen
    screen_weight: float = 1e-4  # λ_s
    screen_size: int = 60  # k
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.noise > 0.0 and self.radius > 0.0 and 0.0 < self.screen_weight <= 1.0 and self.screen_size >= 2):
            raise InvalidInput(f"AdaPMixED needs positive noise, radius and weight, and a screen of 2 tokens: {self}.")


class AdaAnswers(NamedTuple):
    """Answers at n positions, as if nothing had been spent before."""

    log_release: Tensor  # (n, V)
    is_private: BoolArray  # (n,) passed the screen
    losses: FloatArray  # (n,) Rényi loss at the order, screen and answer


@torch.inference_mode()
def answer(
    log_shards: Tensor, log_public: Tensor, support: Tensor, settings: AdaSettings, rng: np.random.Generator
) -> AdaAnswers:
    """Screen and answer: (n, N, V), (n, V) and the public top tokens, best first (n, ≥k)."""
    n, shards, _ = log_shards.shape
    if shards < 2:
        raise InvalidInput("AdaPMixED leaves out one shard model at a time: it needs at least 2.")
    passed = _screen(log_shards, log_public, support[:, : settings.screen_size], settings, rng)
    (table,) = tabulate(compress(log_shards, log_public).weights, [settings.order])
    weights = table.weight(settings.radius)  # (n, N)
    members = mixed(log_shards, log_public.unsqueeze(1), weights)  # (n, N, V)
    mean = log_mean(members, 1)
    losses = torch.zeros(n, dtype=torch.float64, device=mean.device)
    total = members.exp().sum(1)
    for shard in range(shards):  # one at a time, to hold only (n, V)
        without = ((total - members[:, shard].exp()).clamp_min(torch.finfo(torch.float64).tiny) / (shards - 1)).log()
        losses = torch.maximum(losses, symmetric(mean, without, settings.order))
    worst = float(np.logaddexp(0.0, log_member_excess(settings.radius, shards, settings.order)[-1]))
    each = np.minimum(losses.cpu().numpy(), worst / (settings.order - 1))
    screen = (settings.screen_weight / shards) ** 2 * settings.order / settings.noise**2
    release = torch.where(torch.from_numpy(passed).to(mean.device).unsqueeze(-1), mean, log_public)
    return AdaAnswers(release, passed, screen + np.where(passed, each, 0.0))


def within(losses: FloatArray, epsilon: float, settings: AdaSettings) -> int:
    """How many answers come before the data-dependent ε would exceed the target."""
    spent = epsilon_of(np.cumsum(losses), settings.order, settings.delta)
    return int(np.count_nonzero(np.maximum.accumulate(spent) <= epsilon))


def spent_epsilon(losses: FloatArray, settings: AdaSettings) -> float:
    """The data-dependent ε of all these answers together."""
    return float(epsilon_of(losses.sum(), settings.order, settings.delta)) if losses.size else 0.0


def _screen(
    log_shards: Tensor, log_public: Tensor, top: Tensor, settings: AdaSettings, rng: np.random.Generator
) -> BoolArray:
    public = torch.log_softmax(log_public.gather(-1, top), -1)  # (n, k)
    inside = log_shards.gather(-1, top.unsqueeze(1).expand(-1, log_shards.shape[1], -1)).exp().mean(1)
    lam, a = settings.screen_weight, settings.order
    ensemble = lam * inside + (1.0 - lam) * log_public.gather(-1, top).exp()
    noisy = (ensemble / ensemble.sum(-1, keepdim=True)).cpu().numpy()
    noisy = noisy + rng.normal(0.0, settings.noise, noisy.shape)
    noisy = noisy + np.abs(noisy.min(-1, keepdims=True))
    noisy = noisy / noisy.sum(-1, keepdims=True)
    # The shift leaves the smallest entry at zero; the authors leave such entries out on both sides.
    is_kept = noisy > 0.0
    p, q = np.log(np.where(is_kept, noisy, 1.0)), public.cpu().numpy()
    forward = np.where(is_kept, a * p + (1 - a) * q, -math.inf)
    backward = np.where(is_kept, a * q + (1 - a) * p, -math.inf)
    distance = np.maximum(np.logaddexp.reduce(forward, -1), np.logaddexp.reduce(backward, -1)) / (a - 1)
    passed: BoolArray = distance <= settings.threshold
    return passed
