"""One decode step of all worlds: forward pass, support, votes. Plain torch here; `graphs` replays it as a CUDA graph.

    public row ──► logits over the whole vocabulary ──► support: top k of what the mask allows, ties to the smaller id
    every world ─► logits of those tokens only ───────► vote: argmax of logit + τ · coin, ties to the smaller token id

Coins and masks come in as arrays; nothing here draws randomness. A vote is always a member of the support. Where a mask
allows fewer than k tokens the support ends with -1, which is no token: no world can vote for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paclm.engine.determinism import FloatArray, IntArray
from paclm.errors import EngineError, InvalidInput

TableArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
MaskArray = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
"""(n, ⌈V / 32⌉): bit t % 32 of word t // 32 is set if token t is allowed."""

_LARGEST_ID = 2**31 - 1
_FORBIDDEN = -(2**63)
"""Below the key of every logit."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Parts of several prompts for one prefill pass, one after another in `tokens`."""

    tokens: IntArray = field(repr=False)  # (T,)
    starts: IntArray  # (s,) position of the first token of each part
    lengths: IntArray  # (s,), sums to T
    table: TableArray  # (s, pages): the blocks of each sequence, enough to cover starts + lengths


class WorldsModel(Protocol):
    """The forward pass: all worlds and the public model, which is the last of W, over a paged cache.

    Position p of a sequence is in block table[p // page] of its row. Block 0 is scratch: no sequence has it.
    `stacked` covers the GPT-2 and Llama families, `fused` does so by CUDA kernels, `generic` covers any decoder.
    """

    num_worlds: int  # W: the worlds and the public model
    context: int  # positions per sequence
    head: Tensor  # output embedding (V, d); a logit is its product with a hidden state
    page: int  # positions per block
    num_blocks: int  # of the pool

    def prefill(self, chunk: PromptChunk) -> Tensor:
        """Write keys and values of all parts; hidden states (W, T, d).

        A part may attend to blocks that an earlier part of the same chunk writes.
        """

    def decode(self, tokens: Tensor, positions: Tensor, table: Tensor, reach: int) -> Tensor:
        """One token (n,) for each of n sequences, at positions (n,), all below reach; table (n, pages) int32.

        Hidden states (W, n, d). Running the same token at the same position again changes nothing.
        """


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one step of n sequences; the public model is the last of W."""

    support: IntArray  # (n, k), -1 at the end where the mask allows fewer
    votes: IntArray  # (n, W)
    logits: Tensor  # (n, W, k), left on the device; the next step may overwrite it
    logprobs: FloatArray | None  # (n, k) of the public model inside its support; None where worlds vote beside


class DecodeStep(Protocol):
    """One step at a time, in the order of the calls: what `launch` began is computed before a later `prefill`."""

    def launch(
        self,
        tokens: IntArray,
        positions: IntArray,
        table: TableArray,
        coins: FloatArray,
        temperature: FloatArray,
        allowed: MaskArray | None,
    ) -> None:
        """Begin a step: tokens, positions and temperatures (n,), table (n, pages), coins (n, k); None allows all."""

    def collect(self) -> StepOutput:
        """The output of the launched step, rows in the order of its sequences."""

    def prefill(self, chunk: PromptChunk) -> Tensor:
        """As of the model; asynchronous where the device is. With workers, the hidden states of this rank alone."""

    def hidden_states(self, chunk: PromptChunk) -> Tensor:
        """`prefill` with the hidden states of all worlds (W, T, d)."""

    def logits(self, output: StepOutput) -> Tensor:
        """The logits (n, W, k) of all worlds behind the last output."""

    def check(self) -> None:
        """Raise `WorkerLost` if a worker does not answer. Not while a step is in flight."""

    def restore(self) -> None:
        """After `WorkerLost`: wait until all workers are back, with empty caches."""

    def warm_up(self, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Compile and record all that steps of up to so many sequences can need; progress(done, all)."""

    def public_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (n, d) → logits over the whole vocabulary (n, V), float32."""


class PlainStep:
    """The step in plain torch, on any device."""

    def __init__(self, model: WorldsModel, support_size: int) -> None:
        self._model = model
        self._support_size = support_size
        self._launched: tuple[IntArray, IntArray, TableArray, FloatArray, FloatArray] | None = None
        self._allowed: MaskArray | None = None
        self._output: StepOutput | None = None
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
        self,
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        coins: Tensor,
        temperature: Tensor,
        reach: int,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Support, votes, logits and logprobs from device tensors; all positions are below `reach`."""
        hidden = self._model.decode(tokens, positions, table, reach)  # (W, n, d)
        whole = self.public_logits(hidden[-1])  # (n, V)
        support = top_tokens(whole, self._support_size, allowed)  # (n, k)
        logits = support_logits(hidden, self._model.head, support)  # (n, W, k)
        logprobs = log_probabilities(logits, whole) if self._model.num_worlds == 1 else None
        return support, coupled_votes(logits, support, coins, temperature), logits, logprobs

    def launch(
        self,
        tokens: IntArray,
        positions: IntArray,
        table: TableArray,
        coins: FloatArray,
        temperature: FloatArray,
        allowed: MaskArray | None,
    ) -> None:
        """Keep the arguments: on a CPU nothing runs beside the caller, so `collect` computes."""
        self._launched = (tokens, positions, table, coins, temperature)
        self._allowed = allowed
        self._output = None

    def collect(self) -> StepOutput:
        output = self._output or self._compute()
        self._launched = self._output = None
        return output

    def prefill(self, chunk: PromptChunk) -> Tensor:
        if self._launched is not None and self._output is None:
            self._output = self._compute()  # its blocks may have been given to the sequences of this chunk since
        return self._model.prefill(chunk)

    def hidden_states(self, chunk: PromptChunk) -> Tensor:
        return self.prefill(chunk)

    def logits(self, output: StepOutput) -> Tensor:
        return output.logits

    def check(self) -> None:
        """There are no workers."""

    def restore(self) -> None:
        """There are no workers."""

    def warm_up(self, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Nothing is compiled here."""

    @torch.inference_mode()
    def _compute(self) -> StepOutput:
        if self._launched is None:
            raise EngineError("No step was launched.")
        device, positions = self._model.head.device, self._launched[1]
        where, at, table, drawn, tau = (torch.from_numpy(array).to(device) for array in self._launched)
        mask = None if self._allowed is None else torch.from_numpy(self._allowed.view(np.int32)).to(device)
        reach = int(positions.max()) + 1
        support, votes, logits, logs = self.run(where, at, table, drawn, tau, reach, mask)
        logprobs = None if logs is None else logs.cpu().numpy()
        return StepOutput(support.cpu().numpy(), votes.cpu().numpy(), logits, logprobs)


def top_tokens(logits: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """Ids of the k largest allowed logits per row, largest first, then -1; equal logits in order of token id.

    `torch.topk` does not define the order of equal values. Value and id are packed into one integer key, so that no two
    keys are equal and the result is the same on every device. allowed: (n, ⌈V / 32⌉) int32, a bit for each token.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise InvalidInput(f"A support of {k} tokens is not possible with a vocabulary of {logits.shape[-1]}.")
    bits = (logits.float() + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & _LARGEST_ID)).to(torch.int64)  # integers in the order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = (ordered << 32) | (_LARGEST_ID - ids)
    if allowed is not None:
        bits = (allowed[:, ids // 32] >> (ids % 32)) & 1
        keys = torch.where(bits.bool(), keys, _FORBIDDEN)
    best = torch.topk(keys, k, dim=-1).values
    return torch.where(best == _FORBIDDEN, -1, _LARGEST_ID - (best & _LARGEST_ID))


def support_logits(hidden: Tensor, head: Tensor, support: Tensor) -> Tensor:
    """Every world's logits inside the support: hidden (W, n, d), head (V, d), support (n, k) → (n, W, k) float32.

    -inf where the support has no token.
    """
    rows = head[support.clamp(min=0)].float()  # (n, k, d)
    logits = torch.bmm(hidden.transpose(0, 1).float(), rows.transpose(1, 2))
    return logits.masked_fill_((support < 0).unsqueeze(1), -torch.inf)


def log_probabilities(logits: Tensor, whole: Tensor) -> Tensor:
    """Logits (n, 1, k) of a support, less the normalizer of those over the vocabulary (n, V): (n, k), at most 0."""
    return (logits[:, 0] - torch.logsumexp(whole, -1, keepdim=True)).clamp(max=0.0)


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
