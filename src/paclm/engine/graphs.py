"""Decode steps and prefill passes as CUDA graphs: recorded once per size, then replayed with a single launch.

A graph has fixed shapes, so sequences and prompt tokens are padded to the next recorded number; the padding runs in the
scratch block and is ignored. Inputs are copied to the device without waiting, and `collect` waits for the votes alone,
so that a prefill pass launched after a step runs while its votes are released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paclm.engine.decode_step import MaskArray, PlainStep, PromptChunk, StepOutput, TableArray, log_probabilities
from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.fused import FusedModel, lay_out, most_parts, views_of
from paclm.engine.kernels.ballots import cast_votes, public_keys
from paclm.engine.kernels.selection import support_of
from paclm.engine.stacked import StackedModel

_REACH_STEP = 128
_PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class FusedStep(PlainStep):
    """The step with logits, support and votes by kernels."""

    def outcome(
        self, integers: Tensor, numbers: Tensor, allowed: Tensor, reach: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """integers (2 + pages, n): tokens, positions and blocks; numbers (n, k + 1): coins and temperature.

        allowed (n, ⌈V / 32⌉): a bit for each token.
        Returns support and votes in one tensor (n, k + W) int32, logits (n, W, k), and logprobs (n, k) if W is 1.
        """
        hidden = self._model.decode(integers[0], integers[1], integers[2:].T, reach)  # (W, n, d)
        support = support_of(*public_keys(hidden[-1], self._model.head, allowed), self._support_size)
        outcome, logits = cast_votes(hidden, self._model.head, support, numbers)
        is_alone = self._model.num_worlds == 1
        return outcome, logits, log_probabilities(logits, self.public_logits(hidden[-1])) if is_alone else None


@dataclass(slots=True)
class StepRecording:
    """The graph of a decode step with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    integers: Tensor
    numbers: Tensor
    allowed: Tensor
    outcome: Tensor
    logits: Tensor
    logprobs: Tensor | None
    staged_integers: Tensor
    staged_numbers: Tensor
    staged_allowed: Tensor
    staged_outcome: Tensor
    staged_logprobs: Tensor | None
    done: torch.cuda.Event
    is_masked: bool = False
    """`allowed` is that of an earlier step, and not all ones."""


@dataclass(frozen=True, slots=True)
class PromptRecording:
    """The graph of a prefill pass: its input, laid out as in `lay_out`, and the hidden states."""

    graph: torch.cuda.CUDAGraph
    layout: Tensor
    hidden: Tensor


def padded(n: int) -> int:
    """The number of sequences recorded for n: a power of two up to 16, then at most an eighth more than n."""
    power = 1 << (n - 1).bit_length()
    unit = 1 if n <= 1 else power if n <= 16 else power // 16
    return -(-n // unit) * unit


class GraphStep:
    """Replays steps and prefill passes; what `warm_up` did not record is recorded on first use."""

    def __init__(self, step: FusedStep, model: StackedModel, support_size: int, prefill_chunk: int) -> None:
        self._step = step
        self._model = model
        self._support_size = support_size
        self._pages = -(-model.context // model.page)
        self._prompt_sizes = [size for size in _PROMPT_SIZES if size < prefill_chunk]
        self._prompt_sizes.append(-(-prefill_chunk // 16) * 16)
        self._steps: dict[tuple[int, int], StepRecording] = {}
        self._prompts: dict[int, PromptRecording] = {}
        self._launched: tuple[StepRecording, int] | None = None
        self._pool: Any = None

    def public_logits(self, hidden: Tensor) -> Tensor:
        return self._step.public_logits(hidden)

    def warm_up(self, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        """Compile every kernel and record every size up to so many sequences; later ones of a long reach excepted."""
        sizes = sorted({padded(n) for n in range(1, max_sequences + 1)}, reverse=True)  # the largest takes the memory
        prompt_sizes = self._prompt_sizes[::-1] if isinstance(self._model, FusedModel) else []
        total = len(prompt_sizes) + len(sizes)
        for done, size in enumerate(prompt_sizes):
            progress(done, total)
            self._prompt_recording(size)
        for done, size in enumerate(sizes, len(prompt_sizes)):
            progress(done, total)
            self._step_recording(size, 1)
        torch.cuda.synchronize()
        progress(total, total)

    # --- decode -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(
        self,
        tokens: IntArray,
        positions: IntArray,
        table: TableArray,
        coins: FloatArray,
        temperature: FloatArray,
        allowed: MaskArray | None,
    ) -> None:
        n, k, pages = len(tokens), self._support_size, table.shape[1]
        recording = self._step_recording(padded(n), int(positions.max()) + 1)
        integers, numbers = recording.staged_integers.numpy(), recording.staged_numbers.numpy()
        integers[: 2 + pages, n:] = 0  # padding runs in the scratch block
        integers[0, :n], integers[1, :n], integers[2 : 2 + pages, :n] = tokens, positions, table.T
        numbers[:n, :k], numbers[:n, k] = coins, temperature
        recording.integers[: 2 + pages].copy_(recording.staged_integers[: 2 + pages], non_blocking=True)
        recording.numbers.copy_(recording.staged_numbers, non_blocking=True)
        if allowed is not None or recording.is_masked:
            masks = recording.staged_allowed.numpy()
            masks[:] = -1
            if allowed is not None:
                masks[:n] = allowed.view(np.int32)
            recording.allowed.copy_(recording.staged_allowed, non_blocking=True)
            recording.is_masked = allowed is not None
        recording.graph.replay()
        recording.staged_outcome.copy_(recording.outcome, non_blocking=True)
        if recording.logprobs is not None and recording.staged_logprobs is not None:
            recording.staged_logprobs.copy_(recording.logprobs, non_blocking=True)
        recording.done.record()
        self._launched = recording, n

    def collect(self) -> StepOutput:
        assert self._launched is not None
        (recording, n), k = self._launched, self._support_size
        self._launched = None
        recording.done.synchronize()
        outcome = recording.staged_outcome[:n].numpy().astype(np.int64)  # a copy: the staging area is reused
        logprobs = None if recording.staged_logprobs is None else recording.staged_logprobs[:n].numpy().copy()
        return StepOutput(outcome[:, :k], outcome[:, k:], recording.logits[:n], logprobs)

    def _step_recording(self, size: int, reach: int) -> StepRecording:
        """The graph for so many sequences with positions below reach; the kernels read as far as each needs."""
        is_fused = isinstance(self._model, FusedModel)
        reach = self._model.context if is_fused else min(-(-reach // _REACH_STEP) * _REACH_STEP, self._model.context)
        if (size, reach) not in self._steps:
            self._steps[size, reach] = self._record_step(size, reach)
        return self._steps[size, reach]

    def _record_step(self, n: int, reach: int) -> StepRecording:
        device, k = self._model.head.device, self._support_size
        integers = torch.zeros(2 + self._pages, n, dtype=torch.int32, device=device)
        numbers = torch.zeros(n, k + 1, device=device)
        words = -(-self._model.head.shape[0] // 32)
        allowed = torch.full((n, words), -1, dtype=torch.int32, device=device)
        graph, (outcome, logits, logprobs) = self._record(lambda: self._step.outcome(integers, numbers, allowed, reach))
        return StepRecording(
            graph, integers, numbers, allowed, outcome, logits, logprobs,
            torch.zeros(integers.shape, dtype=torch.int32, pin_memory=True),
            torch.zeros(n, k + 1, pin_memory=True),
            torch.zeros(n, words, dtype=torch.int32, pin_memory=True),
            torch.zeros(n, outcome.shape[1], dtype=torch.int32, pin_memory=True),
            None if logprobs is None else torch.zeros(n, k, pin_memory=True),
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )  # fmt: skip

    # --- prefill ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, chunk: PromptChunk) -> Tensor:
        if not isinstance(self._model, FusedModel):
            return self._model.prefill(chunk)
        hidden = [self._replay_prompts(part) for part in _passes(chunk, self._prompt_sizes[-1])]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)

    def hidden_states(self, chunk: PromptChunk) -> Tensor:
        return self.prefill(chunk)

    def logits(self, output: StepOutput) -> Tensor:
        return output.logits

    def check(self) -> None:
        """There are no workers."""

    def restore(self) -> None:
        """There are no workers."""

    def _replay_prompts(self, chunk: PromptChunk) -> Tensor:
        used = len(chunk.tokens)
        size = next(size for size in self._prompt_sizes if size >= used and most_parts(size) >= len(chunk.starts))
        recording = self._prompt_recording(size)
        layout = torch.from_numpy(lay_out(chunk, size, self._pages)).pin_memory()
        recording.layout.copy_(layout, non_blocking=True)
        recording.graph.replay()
        return recording.hidden[:, :used].clone()

    def _prompt_recording(self, size: int) -> PromptRecording:
        model = self._model
        if size not in self._prompts and isinstance(model, FusedModel):
            none = np.zeros(0, dtype=np.int64)
            empty = PromptChunk(none, none, none, np.zeros((0, self._pages), dtype=np.int32))
            layout = torch.from_numpy(lay_out(empty, size, self._pages)).to(model.head.device)
            inputs = views_of(layout, size, self._pages)
            graph, hidden = self._record(lambda: model.read(*inputs))
            self._prompts[size] = PromptRecording(graph, layout, hidden)
        return self._prompts[size]

    @torch.inference_mode()
    def _record(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()  # compiles kernels and lets libraries allocate, which must not happen while recording
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = self._pool or graph.pool()
        return graph, result


def _passes(chunk: PromptChunk, most: int) -> list[PromptChunk]:
    """The chunk in passes of at most so many tokens."""
    if len(chunk.tokens) <= most and len(chunk.starts) <= most_parts(most):
        return [chunk]
    passes, first, begin = [], 0, 0
    while first < len(chunk.starts):
        last, end = first, begin
        while last < min(len(chunk.starts), first + most_parts(most)) and end - begin + chunk.lengths[last] <= most:
            end += int(chunk.lengths[last])
            last += 1
        parts = slice(first, last)
        passes.append(
            PromptChunk(chunk.tokens[begin:end], chunk.starts[parts], chunk.lengths[parts], chunk.table[parts])
        )
        first, begin = last, end
    return passes
