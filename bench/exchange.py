"""The exchange between rank 0 and its workers alone: a decode step over real processes in which nothing is computed.

Every rank answers at once with the shapes of a real step, so what is left is sending the order, waiting for the answers
and joining them. Run as a program it is such a worker.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from paclm.engine.decode_step import StepOutput
from paclm.engine.wire import find_store, join
from paclm.engine.worker import Worker
from paclm.engine.workers import DistributedStep, Split, WorkerGroup

VOCABULARY, PAGE = 49152, 16


class IdleStep:
    """A decode step that computes nothing: always the same support and votes."""

    def __init__(self, worlds: int, support_size: int) -> None:
        self._worlds, self._support_size, self._n = worlds, support_size, 0
        self._outputs: dict[int, StepOutput] = {}

    def launch(self, tokens: Any, positions: Any, table: Any, coins: Any, temperature: Any, allowed: Any) -> None:
        self._n = len(tokens)

    def collect(self) -> StepOutput:
        if self._n not in self._outputs:
            generator = np.random.default_rng(0)
            support = generator.integers(0, VOCABULARY, (self._n, self._support_size))
            votes = support[:, :1].repeat(self._worlds + 1, axis=1)
            self._outputs[self._n] = StepOutput(support, votes, torch.empty(0), None)
        return self._outputs[self._n]


@contextmanager
def idle_group(workers: int, worlds: int, support_size: int) -> Iterator[DistributedStep]:
    """So many ranks, this process among them, that compute nothing."""
    split = Split(worlds, workers)

    def start(rank: int, address: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, str(rank), address, str(split.size), str(support_size)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    with WorkerGroup(workers, start=start) as group:
        group.connect()
        yield DistributedStep(IdleStep(split.size, support_size), group, split)  # type: ignore[arg-type]


def exchange_of(step: DistributedStep, streams: int, support_size: int, context: int) -> Callable[[], object]:
    """One step of so many sequences at this context: the order, and all answers."""
    generator = np.random.default_rng(1)
    tokens, positions = generator.integers(0, VOCABULARY, streams), np.full(streams, context - 1)
    table = generator.integers(1, 9999, (streams, -(-context // PAGE))).astype(np.int32)
    coins = generator.gumbel(size=(streams, support_size)).astype(np.float32)
    return partial(_step, step, tokens, positions, table, coins, np.ones(streams, dtype=np.float32), None)


def _step(step: DistributedStep, *arrays: Any) -> None:
    step.launch(*arrays)
    step.collect()


def main() -> None:
    """Be a worker."""
    rank, address, size, support_size = sys.argv[1:]
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    worker = Worker(None, int(rank), join(find_store(host, int(port), 60.0), int(rank), host))  # type: ignore[arg-type]
    worker._step, worker._size = IdleStep(int(size), int(support_size)), int(size)  # type: ignore[assignment]
    worker.run()


if __name__ == "__main__":
    main()
