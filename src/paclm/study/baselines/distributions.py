"""Full-vocabulary distributions of every shard model and the public one along a text, and their divergences as tensors.

Tensors because a vocabulary times all shard models is worth a GPU; float64 throughout. `renyi` is the same in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import top_tokens
from paclm.privacy.belief import IntArray
from paclm.study.eval_text import Passage

if TYPE_CHECKING:
    from paclm.engine.engine import Engine

# Log probabilities held in float64, 1 GiB on a GPU: 21 positions of 128 shard models with a vocabulary of 49,152. All
# other memory is a small multiple of it.
_NUMBERS_AT_ONCE = {"cpu": 2**23, "cuda": 2**27}


@dataclass(frozen=True, slots=True)
class Distributions:
    """A few positions of a text."""

    log_shards: Tensor  # (c, N, V) float64
    log_public: Tensor  # (c, V) float64
    support: Tensor  # (c, k) the public model's top tokens, best first
    truth: Tensor  # (c,) the token that follows in the text
    log_norms: Tensor  # (c, N + 1) float64: logits are log probabilities plus these; the public model's last
    passage: IntArray  # (c,)

    @property
    def num_positions(self) -> int:
        return int(self.truth.shape[0])


@torch.inference_mode()
def text_distributions(engine: Engine, passages: Sequence[Passage], support_size: int = 200) -> Iterator[Distributions]:
    """Walk the passages; position i predicts tokens[i + 1], and only scored targets are returned."""
    head = engine.head.float()
    at_once = max(1, _NUMBERS_AT_ONCE[head.device.type] // ((engine.num_worlds + 1) * engine.vocabulary))
    for passage in passages:
        scored = torch.tensor(passage.is_scored[1:], device=head.device)
        truth = torch.tensor(passage.tokens[1:], device=head.device)
        done = 0
        for hidden in engine.windows(passage.tokens, len(passage.tokens)):  # (W, c, d)
            count = hidden.shape[1]
            rows = torch.nonzero(scored[done : done + count])[:, 0]
            for part in torch.split(rows, at_once):
                logs, norms = log_distributions(hidden[:, part], head)
                public = logs[:, -1]
                support = top_tokens(public, min(support_size, engine.vocabulary))
                where: IntArray = np.full(len(part), passage.document, dtype=np.int64)
                yield Distributions(logs[:, :-1], public, support, truth[done + part], norms, where)
            done += count


def log_distributions(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities (n, W, V) and log normalizers (n, W) in float64 from last hidden states (W, n, d).

    Logits are formed in float32.
    """
    logits = torch.matmul(hidden.float().transpose(0, 1), head.T)  # (n, W, V)
    logs = torch.log_softmax(logits.double(), -1)
    return logs, logits[..., 0].double() - logs[..., 0]  # a normalizer is the same at every token


def divergence(log_p: Tensor, log_q: Tensor, order: float) -> Tensor:
    """D_a(P‖Q) along the last axis, for distributions with the same support and a finite order above 1."""
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
