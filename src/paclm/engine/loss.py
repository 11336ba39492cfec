"""Next-token loss of every world, without holding the logits of a whole batch.

The output layer is frozen, so the gradient of the hidden states is computed together with the loss, a chunk of
positions at a time; padding costs nothing. Knows tokens and weights of positions, not records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paclm.engine.training_forward import ResidualStream
from paclm.engine.training_order import NOTHING, Blocks, IntArray
from paclm.engine.trunk_states import TrunkStates

LENGTH_STEP = 8  # Rows of a batch have a multiple of it: a CPU compiles products for each shape and keeps them.
_SMALLEST_CHUNK = 64
_CHUNK_STEP = 16
_CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**31}  # of float32 logits; a CPU keeps them in its cache


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of k worlds, world by world, and the positions whose successor is to be predicted."""

    ids: Tensor  # (k · rows, length); zeros right of a block's end, which causal attention keeps out of it
    where: Tensor  # (N,): positions that predict, as places in the flattened ids
    targets: Tensor  # (N,): the token after each
    weights: Tensor  # (N,) float32: 1 / predictions of the same world, so that a world's loss is its own mean
    worlds: Tensor  # (N,): which of the k worlds
    num_worlds: int
    num_tokens: int  # predicted
    is_fixed: bool  # whether `where` and `worlds` are those of every batch of this shape
    stream: ResidualStream | None = None  # what the trunk makes of the ids, where that is stored


def make_batch(
    blocks: Blocks,
    picks: IntArray,
    device: torch.device | str = "cpu",
    most_fixed: int = 0,
    *,
    length: int | None = None,
    counts: IntArray | None = None,
    states: TrunkStates | None = None,
) -> Batch:
    """Lay out the blocks `picks` (k, batch) of k worlds.

    A batch that has at most `most_fixed` places when padded to one of a few lengths gets a fixed layout: all places
    predict, those without a successor with weight 0. With a `length`, it is padded to it and fixed whatever its size.
    `counts` (k,) are the predictions that a world's loss is the mean of, if it has more than those in this batch.
    With `states`, which are those of these blocks, passes begin behind the trunk.
    """
    picks = picks[:, (picks != NOTHING).any(axis=0)]  # (k, rows): short batches are short at the end
    num_worlds, rows = picks.shape
    chosen, known = picks.ravel(), blocks.lengths
    lengths = np.where(chosen == NOTHING, 0, known[chosen])  # (k · rows,)
    is_fixed = length is not None
    if length is None:
        longest, limit = int(lengths.max()), int(known.max())
        fixed = min(padded_length(longest), limit)
        is_fixed = fixed * len(chosen) <= most_fixed
        length = fixed if is_fixed else min(round_up(longest, LENGTH_STEP), limit)
    places = np.arange(length)
    is_token = places < lengths[:, None]  # (k · rows, length)
    ids = np.zeros((len(chosen), length), dtype=np.int64)
    starts = np.where(chosen == NOTHING, 0, blocks.starts[chosen])
    ids[is_token] = blocks.tokens[(starts[:, None] + places)[is_token]]
    predicts = (places + 1 < lengths[:, None]).ravel()  # (k · rows · length,)
    where = np.arange(ids.size) if is_fixed else np.flatnonzero(predicts)  # (N,)
    worlds = where // (rows * length)  # (N,)
    if counts is None:
        counts = np.bincount(worlds, predicts[where], minlength=num_worlds)  # (k,)
    weights = (predicts[where] / counts[worlds]).astype(np.float32)
    targets = np.roll(ids.ravel(), -1)[where]

    def put(array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if torch.device(device).type != "cuda":
            return tensor.to(device)
        # A copy from pageable memory would make the host wait for all earlier kernels. torch keeps the pinned buffer
        # until the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)

    tensors = put(ids), put(where), put(targets), put(weights), put(worlds)
    stream = None if states is None else states.at((starts[:, None] + places).ravel())
    return Batch(*tensors, num_worlds, int(predicts.sum()), is_fixed, stream)


def padded_length(length: int) -> int:
    """The next of a few lengths: multiples of 64 up to 512, then four between powers of two."""
    return round_up(length, max(64, (1 << (length - 1).bit_length()) // 8))


def round_up(number: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-number // step) * step


def batch_loss(hidden: Tensor, head: nn.Linear, batch: Batch) -> tuple[Tensor, Tensor]:
    """From hidden states (places, d): the sum of all worlds' mean losses, differentiable, and the loss of each position
    (N,)."""
    total, each = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, batch.where, batch.targets, batch.weights
    )
    return total, each


def world_means(each: Tensor, batch: Batch) -> Tensor:
    """Mean loss of each of the k worlds."""
    return torch.zeros(batch.num_worlds, device=each.device).index_add_(0, batch.worlds, each * batch.weights)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, weight: Tensor, bias: Tensor | None, where: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        needs_gradient = bool(ctx.needs_input_grad[0])
        gradient = torch.zeros_like(flat) if needs_gradient else None
        each = torch.empty(len(targets), device=flat.device)  # (N,)
        most = max(_SMALLEST_CHUNK, _CHUNK_BYTES.get(flat.device.type, 2**26) // (4 * weight.shape[0]))
        num_chunks = -(-len(targets) // most) or 1
        # Equal ones, the last one padded, so that a world's place does not change its rounding.
        chunk = round_up(-(-len(targets) // num_chunks) or 1, _CHUNK_STEP)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            used = len(targets[part])
            own = (functional.pad(x[part], (0, chunk - used)) for x in (where, targets, weights))
            places, successors, shares = own  # (chunk,) each
            logits = functional.linear(flat[places], weight, bias)  # (chunk, V)
            loss, slope = _kernel(flat.device.type)(logits, successors, shares, needs_gradient)
            each[part] = loss[:used]
            if gradient is not None:
                gradient[where[part]] = (slope @ weight)[:used]
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(each)
        return (each * weights).sum(), each

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None


Kernel = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@cache
def _kernel(device: str) -> Kernel:
    return torch.compile(_nll_and_slope) if device == "cuda" else _nll_and_slope_in_place


def _nll_and_slope(logits: Tensor, targets: Tensor, weights: Tensor, needs_slope: bool) -> tuple[Tensor, Tensor]:
    """Loss (chunk,) of the targets, and the gradient (chunk, V) of the weighted sum with respect to the logits.

    Written as one expression per logit, which compiles into two passes over them.
    """
    log_probabilities = functional.log_softmax(logits, -1, dtype=torch.float32)  # (chunk, V)
    places = targets.unsqueeze(1)
    loss = -log_probabilities.gather(1, places).squeeze(1)
    if not needs_slope:
        return loss, loss
    is_target = torch.arange(logits.shape[1], device=logits.device) == places  # (chunk, V)
    slope = (log_probabilities.exp() - is_target.float()) * weights.unsqueeze(1)
    return loss, slope.to(logits.dtype)


def _nll_and_slope_in_place(
    logits: Tensor, targets: Tensor, weights: Tensor, needs_slope: bool
) -> tuple[Tensor, Tensor]:
    """As `_nll_and_slope`, in place, where nothing is compiled."""
    log_probabilities = functional.log_softmax(logits, -1, dtype=torch.float32)  # (chunk, V)
    places = targets.unsqueeze(1)
    loss = -log_probabilities.gather(1, places).squeeze(1)
    if not needs_slope:
        return loss, loss
    slope = log_probabilities.exp_().mul_(weights.unsqueeze(1))
    slope.scatter_add_(1, places, -weights.unsqueeze(1))
    return loss, slope.to(logits.dtype)
