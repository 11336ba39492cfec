"""One decode step from tokens to votes, as one function: plain here, as a replayed CUDA graph in `graphs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.model import WorldsModel
from paclm.engine.votes import coupled_votes, support_logits, top_tokens


@dataclass(frozen=True, slots=True)
class Tally:
    """What one step found, for the first n slots; the public model is the last of W."""

    support: IntArray
    """(n, k)"""
    votes: IntArray
    """(n, W)"""
    logits: Tensor
    """(n, W, k), left on the device"""


class Step(Protocol):
    """Tokens (n,) at positions (n,) of the first n slots, coins (n, k) and temperatures (n,) → a tally."""

    def __call__(self, tokens: IntArray, positions: IntArray, coins: FloatArray, temperature: FloatArray) -> Tally: ...

    def public_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, d) → logits over the whole vocabulary (n, V), float32."""


class PlainStep:
    """The step in plain torch, on any device."""

    def __init__(self, model: WorldsModel, support_size: int) -> None:
        self._model = model
        self._support_size = support_size
        head = model.head
        # bfloat16 logits tie in whole groups: they are always formed in float32. CUDA accumulates and returns float32
        # from a bfloat16 head; the CPU needs the head itself widened, once.
        self._wide_head = head.float() if head.dtype != torch.float32 and head.device.type == "cpu" else None

    def public_logits(self, hidden: Tensor) -> Tensor:
        head = self._model.head
        if self._wide_head is not None:
            return hidden.float() @ self._wide_head.T
        if head.dtype == torch.float32:
            return hidden @ head.T
        return torch.mm(hidden, head.T, out_dtype=torch.float32)

    def run(
        self, tokens: Tensor, positions: Tensor, coins: Tensor, temperature: Tensor, reach: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Support, votes and logits from device tensors; every position lies below `reach`."""
        hidden = self._model.decode(tokens, positions, reach)  # (W, n, d)
        support = top_tokens(self.public_logits(hidden[-1]), self._support_size)  # (n, k)
        logits = support_logits(hidden, self._model.head, support)  # (n, W, k)
        return support, coupled_votes(logits, support, coins, temperature), logits

    def outcome(self, integers: Tensor, numbers: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """Support and votes in one tensor (n, k + W) int32, and logits, from what a graph reads: integers (2, n) are
        tokens and positions, numbers (n, k + 1) coins and temperature."""
        k = self._support_size
        coins, temperature = numbers[:, :k].contiguous(), numbers[:, k].contiguous()
        support, votes, logits = self.run(integers[0], integers[1], coins, temperature, reach)
        return torch.cat([support, votes], 1).int(), logits

    @torch.inference_mode()
    def __call__(self, tokens: IntArray, positions: IntArray, coins: FloatArray, temperature: FloatArray) -> Tally:
        device = self._model.head.device
        where, at, drawn, tau = (torch.from_numpy(a).to(device) for a in (tokens, positions, coins, temperature))
        support, votes, logits = self.run(where, at, drawn, tau, reach=int(positions.max()) + 1)
        return Tally(support.cpu().numpy(), votes.cpu().numpy(), logits)
