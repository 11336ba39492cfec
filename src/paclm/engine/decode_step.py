"""One decode step of all worlds: forward pass, support, votes. Plain torch here; `graphs` replays it as a CUDA graph.

    public row ──► logits over the whole vocabulary ──► support: top k, ties to the smaller token id
    every world ─► logits of those k tokens only ─────► vote: argmax of logit + τ · coin, ties to the smaller token id

Coins come in as arrays; nothing here draws randomness. A vote is always a member of the support.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paclm.engine.determinism import FloatArray, IntArray
from paclm.errors import InvalidInput

_LARGEST_ID = 2**31 - 1


class WorldsModel(Protocol):
    """The forward pass: all worlds and the public model, which is the last of W, over sequences in slots.

    `stacked` covers the GPT-2 and Llama families, `fused` does so by CUDA kernels, `generic` covers any decoder.
    """

    num_worlds: int  # W: the worlds and the public model
    num_slots: int  # most sequences that can run together
    context: int  # positions per sequence
    head: Tensor  # output embedding (V, d); a logit is its product with a hidden state

    def prefill(self, tokens: Tensor, start: int, slot: int) -> Tensor:
        """Tokens (c,) of one sequence at positions start … start+c; hidden states (W, c, d)."""

    def prefill_many(self, tokens: Tensor, slot: int) -> Tensor:
        """Tokens (s, c) of s sequences from their start, in the slots from `slot` on; hidden states (W, s, c, d)."""

    def decode(self, tokens: Tensor, positions: Tensor, reach: int) -> Tensor:
        """One token for each of the first n slots, at positions (n,), all below reach; hidden states (W, n, d).

        Running the same token at the same position again changes nothing.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step for the first n slots; the public model is the last of W."""

    support: IntArray  # (n, k)
    votes: IntArray  # (n, W)
    logits: Tensor  # (n, W, k), left on the device


class DecodeStep(Protocol):
    """Tokens (n,) at positions (n,) of the first n slots, coins (n, k) and temperatures (n,) → its output."""

    def __call__(
        self, tokens: IntArray, positions: IntArray, coins: FloatArray, temperature: FloatArray
    ) -> StepOutput: ...

    def public_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, d) → logits over the whole vocabulary (n, V), float32."""


class PlainStep:
    """The step in plain torch, on any device."""

    def __init__(self, model: WorldsModel, support_size: int) -> None:
        self._model = model
        self._support_size = support_size
        head = model.head
        # Logits are always float32, because bfloat16 ones have many ties. CUDA returns float32 from a bfloat16 head;
        # the CPU needs a float32 copy of the head.
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
        """Support, votes and logits from device tensors; all positions are below `reach`."""
        hidden = self._model.decode(tokens, positions, reach)  # (W, n, d)
        support = top_tokens(self.public_logits(hidden[-1]), self._support_size)  # (n, k)
        logits = support_logits(hidden, self._model.head, support)  # (n, W, k)
        return support, coupled_votes(logits, support, coins, temperature), logits

    def outcome(self, integers: Tensor, numbers: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """As `run`, in the form of a CUDA graph: integers (2, n) are tokens and positions, numbers (n, k + 1) coins and
        temperature; returns support and votes in one tensor (n, k + W) int32, and logits."""
        k = self._support_size
        coins, temperature = numbers[:, :k].contiguous(), numbers[:, k].contiguous()
        support, votes, logits = self.run(integers[0], integers[1], coins, temperature, reach)
        return torch.cat([support, votes], 1).int(), logits

    @torch.inference_mode()
    def __call__(self, tokens: IntArray, positions: IntArray, coins: FloatArray, temperature: FloatArray) -> StepOutput:
        device = self._model.head.device
        where, at, drawn, tau = (torch.from_numpy(a).to(device) for a in (tokens, positions, coins, temperature))
        support, votes, logits = self.run(where, at, drawn, tau, reach=int(positions.max()) + 1)
        return StepOutput(support.cpu().numpy(), votes.cpu().numpy(), logits)


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits per row, largest first; equal logits in order of token id.

    `torch.topk` does not define the order of equal values. Value and id are packed into one integer key, so that no two
    keys are equal and the result is the same on every device.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise InvalidInput(f"A support of {k} tokens is not possible with a vocabulary of {logits.shape[-1]}.")
    bits = (logits.float() + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & _LARGEST_ID)).to(torch.int64)  # integers in the order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered << 32) | (_LARGEST_ID - ids)
    return _LARGEST_ID - (torch.topk(keys, k, dim=-1).values & _LARGEST_ID)


def support_logits(hidden: Tensor, head: Tensor, support: Tensor) -> Tensor:
    """Every world's logits inside the support: hidden (W, n, d), head (V, d), support (n, k) → (n, W, k) float32."""
    rows = head[support].float()  # (n, k, d)
    return torch.bmm(hidden.transpose(0, 1).float(), rows.transpose(1, 2))


def pick(scores: Tensor, support: Tensor) -> Tensor:
    """The token with the best score in each row: scores (n, W, k), support (n, k) → (n, W); ties to the smaller id."""
    best = scores == scores.amax(-1, keepdim=True)
    return torch.where(best, support.unsqueeze(1), _LARGEST_ID).amin(-1)


def coupled_votes(logits: Tensor, support: Tensor, coins: Tensor | None, temperature: Tensor | float = 0.0) -> Tensor:
    """Coupled Gumbel votes: the same coins (n, k) for all worlds; temperature 0, or no coins, is greedy. (n, W) ids.

    The argmax of logit + τ·coin is that of logit/τ + coin, and stays finite as τ → 0. Coins are added in float32 or
    wider, whatever the type of the forward pass.
    """
    if coins is None:
        return pick(logits, support)
    tau = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).reshape(-1, 1, 1)
    return pick(logits.float() + tau * coins.unsqueeze(1).to(torch.promote_types(coins.dtype, torch.float32)), support)
