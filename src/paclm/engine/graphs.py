"""The decode step as CUDA graphs: recorded once per batch size, then replayed with a single launch.

A graph has fixed shapes, so sequences are padded to the next recorded number; the padding writes to the scratch
block and is ignored. Inputs are two copies to the device, support and votes one copy back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import PlainStep, PromptChunk, StepOutput, TableArray, WorldsModel
from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.selection import support_of

_REACH_STEP = 128


class FusedStep(PlainStep):
    """The step with logits, support and votes by kernels."""

    def outcome(self, integers: Tensor, table: Tensor, numbers: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        hidden = self._model.decode(integers[0], integers[1], table, reach)  # (W, n, d)
        support = support_of(*public_keys(hidden[-1], self._model.head), self._support_size)
        return cast_votes(hidden, self._model.head, support, numbers)


@dataclass(frozen=True, slots=True)
class Recording:
    """One graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    integers: Tensor
    """(2, n) tokens and positions"""
    table: Tensor
    """(n, pages) int32"""
    numbers: Tensor
    """(n, k + 1) coins and temperature"""
    outcome: Tensor
    """(n, k + W) support and votes"""
    logits: Tensor
    """(n, W, k)"""
    staged_integers: Tensor
    staged_table: Tensor
    staged_numbers: Tensor
    staged_outcome: Tensor


def padded(n: int) -> int:
    """The number of sequences recorded for n: a power of two up to 16, then at most an eighth more than n."""
    power = 1 << (n - 1).bit_length()
    unit = 1 if n <= 1 else power if n <= 16 else power // 16
    return -(-n // unit) * unit


class GraphStep:
    """Replays a step; records it on first use of a batch size."""

    def __init__(self, step: FusedStep, model: WorldsModel, support_size: int, reads_whole_reach: bool) -> None:
        self._step = step
        self._model = model
        self._support_size = support_size
        self._reads_whole_reach = reads_whole_reach
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._pool: Any = None

    def public_logits(self, hidden: Tensor) -> Tensor:
        return self._step.public_logits(hidden)

    def prefill(self, chunk: PromptChunk) -> Tensor:
        return self._model.prefill(chunk)

    def warm_up(self, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Sizes are recorded on first use."""

    def collect(self) -> StepOutput:
        return self._output

    @torch.inference_mode()
    def launch(
        self, tokens: IntArray, positions: IntArray, table: TableArray, coins: FloatArray, temperature: FloatArray
    ) -> None:
        n, k = len(tokens), self._support_size
        recording = self.recording(n, int(positions.max()) + 1)
        recording.staged_integers.zero_()
        recording.staged_integers[0, :n] = torch.from_numpy(tokens)
        recording.staged_integers[1, :n] = torch.from_numpy(positions)
        recording.staged_table.zero_()
        pages = min(table.shape[1], recording.staged_table.shape[1])
        recording.staged_table[:n, :pages] = torch.from_numpy(table[:, :pages])
        recording.table.copy_(recording.staged_table, non_blocking=True)
        recording.staged_numbers[:n, :k] = torch.from_numpy(coins)
        recording.staged_numbers[:n, k] = torch.from_numpy(temperature)
        recording.integers.copy_(recording.staged_integers, non_blocking=True)
        recording.numbers.copy_(recording.staged_numbers, non_blocking=True)
        recording.graph.replay()
        recording.staged_outcome.copy_(recording.outcome, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        outcome = recording.staged_outcome[:n].numpy().astype(np.int64)  # a copy: the staging area is reused
        self._output = StepOutput(outcome[:, :k], outcome[:, k:], recording.logits[:n])

    def recording(self, n: int, reach: int) -> Recording:
        """The graph for n sequences with positions below reach, both padded."""
        size = padded(n)
        if self._reads_whole_reach:
            reach = min(-(-reach // _REACH_STEP) * _REACH_STEP, self._model.context)
        else:
            reach = self._model.context
        if (size, reach) not in self._recordings:
            self._recordings[size, reach] = self._record(size, reach)
        return self._recordings[size, reach]

    @torch.inference_mode()
    def _record(self, n: int, reach: int) -> Recording:
        device, k = self._model.head.device, self._support_size
        integers = torch.zeros(2, n, dtype=torch.long, device=device)
        numbers = torch.zeros(n, k + 1, device=device)

        table = torch.zeros(n, -(-reach // self._model.page), dtype=torch.int32, device=device)  # block 0 is scratch
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            # Warm-up: compiles kernels and lets libraries allocate, which must not happen while recording.
            self._step.outcome(integers, table, numbers, reach)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome, logits = self._step.outcome(integers, table, numbers, reach)
        self._pool = self._pool or graph.pool()
        return Recording(
            graph, integers, table, numbers, outcome, logits,
            torch.zeros(2, n, dtype=torch.long, pin_memory=True),
            torch.zeros(*table.shape, dtype=torch.int32, pin_memory=True),
            torch.zeros(n, k + 1, pin_memory=True),
            torch.zeros(n, outcome.shape[1], dtype=torch.int32, pin_memory=True),
        )  # fmt: skip
