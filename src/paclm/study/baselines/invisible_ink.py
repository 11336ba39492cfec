"""InvisibleInk: move the public logits by the clipped average of the shard models' differences, and sample.

    φ̄  = φ_0 + (1/B) Σ_i clip_C(φ_i − φ_0)     each entry to [−C, C]                        `moved_scores`
    out ~ softmax(φ̄/τ) on the tokens of `support`, which is found from the public logits alone

In the paper (arXiv 2507.02974) the private texts stand in B prompts; here, as for PMixED, they are in the adapters of B
disjoint shards. Sampling from softmax(φ̄/τ) is the exponential mechanism: if a neighbour moves every entry of φ̄ by at
most Δ, the log ratios of its answers span at most 2Δ/τ, and an answer is (Δ/τ)²/2-zCDP. Δ depends on what one record
can do to its shard model:

    "any"      it may change the model in any way: a term goes from one end of [−C, C] to the other, Δ = 2C/B
    "public"   its shard falls back to the public model (the paper's neighbours): a term becomes 0, Δ = C/B

The promise about the corpus needs "any": to add or remove a record of a shard leaves a shard model that was trained on
the others, not the public one. T answers are Tρ-zCDP. C, τ, B and k are public and fixed before the first query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from paclm.errors import InvalidInput
from paclm.privacy.belief import IntArray
from paclm.study.baselines.accountants import zcdp_epsilon, zcdp_for
from paclm.study.baselines.distributions import Distributions

Adjacency = Literal["any", "public"]
Score = Literal["logits", "log probabilities"]
Margin = Literal["one shard", "all shards"]

ADJACENCIES: tuple[Adjacency, ...] = ("any", "public")
SCORES: tuple[Score, ...] = ("logits", "log probabilities")
MARGINS: tuple[Margin, ...] = ("one shard", "all shards")
_SAFETY = 1e-12  # relative


@dataclass(frozen=True, kw_only=True, slots=True)
class InkSettings:
    """One operating point."""

    num_shards: int  # B
    clip: float  # C
    temperature: float = 1.0  # τ
    adjacency: Adjacency = "any"
    score: Score = "log probabilities"
    """What is clipped. Logits are the paper's; they have a common shift in every context, which the softmax ignores and
    clipping does not. Log probabilities are logits without it. The privacy is the same."""
    top_k: int | None = None  # k of Top-k+; None: the whole vocabulary
    margin: Margin = "one shard"  # of Top-k+: 2C/B as its authors have it, or 2C, which covers the private top k

    def __post_init__(self) -> None:
        if self.num_shards < 2 or (self.top_k is not None and self.top_k < 1):
            raise InvalidInput(
                f"InvisibleInk needs at least 2 shards and 1 token, not {self.num_shards} and {self.top_k}."
            )
        for symbol, value in (("C", self.clip), ("τ", self.temperature)):
            if not (math.isfinite(value) and value > 0.0):
                raise InvalidInput(f"{symbol} must be a positive number, not {value!r}.")
        known = {"adjacency": ADJACENCIES, "score": SCORES, "margin": MARGINS}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise InvalidInput(f"There is no {name} {getattr(self, name)!r}. Choose {' or '.join(choices)}.")

    @property
    def sensitivity(self) -> float:
        """Δ: the most by which a neighbour moves an entry of φ̄."""
        return (2.0 if self.adjacency == "any" else 1.0) * self.clip / self.num_shards

    @property
    def log_ratio_range(self) -> float:
        """2Δ/τ: the range of the log ratios of one answer under two neighbours, and its pure ε."""
        return 2.0 * self.sensitivity / self.temperature

    @property
    def rho(self) -> float:
        """The zCDP of one answer."""
        return 0.5 * (self.sensitivity / self.temperature) ** 2

    @property
    def support_margin(self) -> float:
        """How far below the k-th largest public logit a token may lie."""
        return 2.0 * self.clip / (self.num_shards if self.margin == "one shard" else 1)

    def epsilon(self, queries: int, delta: float) -> float:
        """The ε at δ of this many answers."""
        return zcdp_epsilon(queries * self.rho, delta)


def guarantee(adjacency: Adjacency, epsilon: float, delta: float, queries: int) -> str:
    """What is promised, in words."""
    unit = {
        "any": "a record that may change its shard's model in any way",
        "public": "a record without which its shard falls back to the public model",
    }[adjacency]
    return (
        f"(ε, δ)-differential privacy, worst case: ε = {epsilon:g}, δ = {delta:g} over {queries:,} queries, per {unit}"
    )


def clip_ratio_for(epsilon: float, delta: float, queries: int, num_shards: int, adjacency: Adjacency) -> float:
    """C/τ with which this many answers stay within (ε, δ), from below: all that the budget fixes."""
    if queries < 1:
        raise InvalidInput(f"The number of queries must be at least 1, not {queries}.")
    each = math.sqrt(2.0 * zcdp_for(epsilon, delta) / queries)  # Δ/τ
    return each * num_shards / (2.0 if adjacency == "any" else 1.0) * (1.0 - _SAFETY)


def differences(part: Distributions, score: Score, dtype: torch.dtype = torch.float64) -> Tensor:
    """φ_i − φ_0 (c, B, V), rounded to the type given: half the memory traffic for figures of many settings."""
    found = torch.empty(part.log_shards.shape, dtype=dtype, device=part.log_shards.device)
    torch.sub(part.log_shards, part.log_public.unsqueeze(1), out=found)
    if score == "logits":
        found += (part.log_norms[:, :-1] - part.log_norms[:, -1:]).unsqueeze(-1).to(dtype)
    return found


def moved_scores(log_public: Tensor, moves: Tensor, clip: float) -> Tensor:
    """φ̄ (c, V) from φ_0 (c, V) and φ_i − φ_0 (c, B, V)."""
    return log_public + moves.clamp(-clip, clip).mean(1)


def kth_largest(log_public: Tensor, k: int | None) -> Tensor | None:
    """The k-th largest public logit (c, 1); None where k is no limit."""
    if k is None or k >= log_public.shape[-1]:
        return None
    return torch.topk(log_public, k, dim=-1).values[:, -1:]


def support(log_public: Tensor, settings: InkSettings, kth: Tensor | None = None) -> Tensor | None:
    """The tokens (c, V) that may be drawn, from the public logits alone; None: all.

    All whose public logit is at least the k-th largest less a margin. Each entry of φ̄ lies within C of φ_0, so with a
    margin of 2C these are a superset of the k largest entries of φ̄. The authors' 2C/B covers what a single shard model
    can move: with it a token of the private top k can be missed when shard models agree. That costs utility, not
    privacy: the support does not depend on the records in either case. `kth`: of `kth_largest`, if it is known.
    """
    least = kth_largest(log_public, settings.top_k) if kth is None else kth
    return None if least is None else log_public >= least - settings.support_margin


def log_release(scores: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    """ln softmax(φ/τ) (c, V) on the allowed tokens; −inf elsewhere."""
    scaled = scores / temperature
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -math.inf)
    return torch.log_softmax(scaled, -1)


def release_distribution(part: Distributions, settings: InkSettings) -> Tensor:
    """ln of the distribution (c, V) that is sampled from."""
    scores = moved_scores(part.log_public, differences(part, settings.score), settings.clip)
    return log_release(scores, support(part.log_public, settings), settings.temperature)


def sample(log_distribution: Tensor, rng: np.random.Generator) -> IntArray:
    """One token per row of (c, V): the argmax after Gumbel noise."""
    coins = rng.gumbel(size=tuple(log_distribution.shape))
    tokens: IntArray = (log_distribution.cpu().numpy() + coins).argmax(-1)
    return tokens
