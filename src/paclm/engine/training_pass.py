"""Losses and gradients of a batch: the part of a training step that a GPU can replay with one launch.

    batch ── forward ── loss ── backward ──► mean loss of each world (k,), gradient (k, p)

A pass is some 2,000 launches. For few worlds or short blocks the host takes longer for them than the GPU for the work,
so passes are recorded as CUDA graphs. A graph has fixed shapes; hence batches have one of a few (`loss.make_batch`).
The first pass of a shape is launched as usual, which compiles its kernels, and the second is recorded. Parameters and
gradient keep their place in memory, so that graphs serve all groups of worlds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paclm.engine.adapters import AdapterStack
from paclm.engine.loss import Batch, batch_loss, world_means
from paclm.engine.memory import available_memory, release_memory
from paclm.engine.optimizer import unflatten
from paclm.engine.training_forward import Forward

MOST_RECORDED = 2**14  # positions; a larger pass computes longer than its launches take. 0: nothing is recorded
_MOST_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    means: Tensor  # (k,)


class WorldsPass:
    """Passes over the first k of G worlds.

    `is_shared`: all worlds are one adapter, one row in memory; the gradients are still of each world (`dp_training`).
    `only_B`: A is not trained; `gradient` has columns for B only.
    """

    def __init__(
        self,
        forward: Forward,
        head: nn.Linear,
        like: AdapterStack,
        num_worlds: int,
        *,
        is_shared: bool = False,
        only_B: bool = False,
    ) -> None:
        self.forward = forward
        self.head = head
        rows = torch.zeros(1 if is_shared else num_worlds, like.num_parameters, device=head.weight.device)
        self.rows = rows.expand(num_worlds, -1)  # (G, p)
        self.only_B = only_B
        self._stack = unflatten(self.rows, like)
        self._leaves = self._new_leaves(num_worlds)  # rebuilt only when worlds finish: hundreds of tensors
        trained = sum(leaf[0].numel() for leaf in self._trained(self._leaves))
        self.gradient = torch.zeros(num_worlds, trained, device=rows.device)
        self.most_recorded = MOST_RECORDED if head.weight.is_cuda and forward.is_recordable else 0  # positions
        self.recordings: dict[tuple[int, ...], RecordedPass] = {}
        self._seen: set[tuple[int, ...]] = set()

    def __call__(self, batch: Batch) -> Tensor:
        """The mean loss of each world (k,); gradients are left in the first k rows of `gradient`."""
        try:
            return self._run(batch)
        except RuntimeError as error:  # out of memory, as graphs hold the memory of the largest; or not to be recorded
            if not self.most_recorded:
                raise
            reason = str(error).partition("\n")[0]
        warnings.warn(f"Training goes on without CUDA graphs, which may be slower: {reason}", stacklevel=2)
        self.most_recorded = 0
        self.recordings.clear()
        release_memory()
        return self._run(batch)

    def _run(self, batch: Batch) -> Tensor:
        if not (batch.is_fixed and batch.ids.numel() <= self.most_recorded):
            return self._compute(batch, self.leaves_of(batch.num_worlds))
        shape = (batch.num_worlds, *batch.ids.shape)
        recording = self.recordings.get(shape)
        if recording is None:
            if shape not in self._seen or not self._has_room():
                self._seen.add(shape)
                return self._compute(batch, self.leaves_of(batch.num_worlds))
            recording = self.recordings[shape] = self._record(batch)
        for name in ("ids", "targets", "weights"):  # the other tensors are the same for all batches of a shape
            getattr(recording.batch, name).copy_(getattr(batch, name))
        if recording.batch.stream is not None and batch.stream is not None:
            recording.batch.stream.states.copy_(batch.stream.states)
        recording.graph.replay()
        return recording.means.clone()  # the next replay overwrites it

    def _compute(self, batch: Batch, leaves: AdapterStack) -> Tensor:
        hidden = self.forward(batch.ids, leaves.A, leaves.B, leaves.spec.scale, batch.stream)  # (places, d)
        total, each = batch_loss(hidden, self.head, batch)
        gradients = torch.autograd.grad(total, self._trained(leaves))
        means = world_means(each, batch)
        torch.cat([gradient.flatten(1) for gradient in gradients], 1, out=self.gradient[: batch.num_worlds])
        return means

    def _trained(self, leaves: AdapterStack) -> list[Tensor]:
        each = [leaf for layer in leaves.layers for leaf in (leaves.A[layer], leaves.B[layer])]
        return each[1::2] if self.only_B else each

    def leaves_of(self, num_worlds: int) -> AdapterStack:
        """The adapters of the first k worlds, as autograd sees them."""
        if num_worlds != self._leaves.num_worlds:
            self._leaves = self._new_leaves(num_worlds)
        return self._leaves

    def _new_leaves(self, num_worlds: int) -> AdapterStack:
        leaves = trainable(self._stack, num_worlds)
        for A in leaves.A.values():
            A.requires_grad_(not self.only_B)
        return leaves

    def _has_room(self) -> bool:
        """Whether a graph may take as much memory as everything that torch holds by now."""
        device = self.rows.device
        return len(self.recordings) < _MOST_GRAPHS and available_memory(device) > torch.cuda.memory_reserved(device)

    def _record(self, batch: Batch) -> RecordedPass:
        leaves = self._new_leaves(batch.num_worlds)  # new ones: autograd ties used ones to their stream
        means = torch.zeros(batch.num_worlds, device=self.rows.device)
        pool = next((recording.graph.pool() for recording in self.recordings.values()), None)  # one for all
        return RecordedPass(capture(lambda: means.copy_(self._compute(batch, leaves)), pool), batch, means)


def capture(work: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of everything that `work` launches; its memory is reused by others of the pool."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def trainable(stack: AdapterStack, num_worlds: int) -> AdapterStack:
    """The first worlds of a stack as leaves of autograd, in the same memory."""
    return stack.map(lambda tensor: tensor[:num_worlds].detach().requires_grad_())
