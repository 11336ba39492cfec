"""Full-vocabulary distributions of every shard model and the public one along a text, a few positions at a time."""

from __future__ import annotations

from collections import deque
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

_NUMBERS_AT_ONCE = {"cpu": 2**23, "cuda": 2**28}
"""Log probabilities held in float64; everything else is a small multiple of it."""


@dataclass(frozen=True, slots=True)
class Distributions:
    """A few positions of a text."""

    log_shards: Tensor  # (c, N, V) float64
    log_public: Tensor  # (c, V) float64
    support: Tensor  # (c, k) the public favourites, best first
    truth: Tensor  # (c,) the token that really came next
    passage: IntArray  # (c,)

    @property
    def num_positions(self) -> int:
        """c"""
        return int(self.truth.shape[0])


@torch.inference_mode()
def text_distributions(engine: Engine, passages: Sequence[Passage], support_size: int = 200) -> Iterator[Distributions]:
    """Walk the passages; position i is about tokens[i + 1], and only scored targets are given out."""
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
                logs = log_distributions(hidden[:, part], head)
                public = logs[:, -1]
                support = top_tokens(public, min(support_size, engine.vocabulary))
                where: IntArray = np.full(len(part), passage.document, dtype=np.int64)
                yield Distributions(logs[:, :-1], public, support, truth[done + part], where)
            done += count


def log_distributions(hidden: Tensor, head: Tensor) -> Tensor:
    """Log probabilities (n, W, V) in float64 from last hidden states (W, n, d); logits are formed in float32."""
    logits = torch.matmul(hidden.float(), head.T)  # (W, n, V)
    return torch.log_softmax(logits.transpose(0, 1).double(), -1)


@torch.inference_mode()
def next_distributions(engine: Engine, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """After a context: (N, V) and (V,) float64. Reads the whole context again: for research, not for speed."""
    ((_, hidden),) = deque(engine.hidden_states(tokens), maxlen=1)
    logs = log_distributions(hidden[:, -1:], engine.head.float())[0]
    return logs[:-1], logs[-1]
