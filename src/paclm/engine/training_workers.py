"""Rank 0's side of a training with workers: each takes groups of worlds from the queue, as this process itself does.

    rank 0   SETUP: what is trained ─►                  TRAIN: a group, and where to continue it ─►
    worker   ◄─ PROOF: the hash of what it would train  ◄─ PROGRESS, positions … ◄─ ADAPTERS: the trained group

One thread per worker speaks with it. What comes back is kept as if this process had trained it, so that a stopped run
can be resumed with any number of workers. A worker that dies or is silent leaves its group, at its last position, to
the others; worlds are independent in training, and all of them are trained in the end. One that fails stops everything.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paclm.engine.checkpoint import Position
from paclm.engine.distributed import check_proof
from paclm.engine.training_queue import GroupQueue, GroupStep
from paclm.engine.wire import PROTOCOL, Array, Order, WireBroken, text_of
from paclm.engine.workers import WorkerGroup, WorkerNews, as_message

SILENT_SECONDS = 60.0
"""After which a worker counts as lost; it says how far it is every second."""
_END_SECONDS = 0.5


class TrainingWorkers:
    """Workers that train groups of worlds."""

    def __init__(self, workers: WorkerGroup, setup: dict[str, Any], identity: dict[str, Any]) -> None:
        """`setup`: what to train, and how. `identity`: base, device and versions, which must be the same everywhere."""
        self._workers = workers
        self._setup = setup
        self._identity = identity

    @contextmanager
    def help(self, queue: GroupQueue, run_id: str, how: dict[str, Any]) -> Iterator[None]:
        """Let the workers take groups from this queue meanwhile; at the end they are idle, after an error killed."""
        ranks = self._workers.ranks[: max(0, queue.num_left - 1)]  # this process takes a group too
        arguments = (queue, {"task": "train", "protocol": PROTOCOL, **self._setup, **how}, run_id)
        threads = {rank: threading.Thread(target=self._serve, args=(rank, *arguments), daemon=True) for rank in ranks}
        self._workers.start()
        for thread in threads.values():
            thread.start()
        try:
            yield
        except BaseException as error:
            queue.stop(error)
            raise
        finally:
            end = time.monotonic() + _END_SECONDS
            for rank, thread in threads.items():
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():  # it trains a group that nobody wants now, or starts still
                    self._workers.drop(rank)

    def _serve(self, rank: int, queue: GroupQueue, setup: dict[str, Any], run_id: str) -> None:
        number: int | None = None
        try:
            self._workers.connect([rank])
            self._workers.send(rank, Order.SETUP, [as_message(setup)])
            proof = json.loads(text_of(self._await(rank, Order.PROOF)[0]))
            check_proof(rank, proof, {**self._identity, "run": run_id})
            self._await(rank, Order.ANSWER)  # it has the states of the trunk
            while (number := queue.take()) is not None:
                self._train(rank, number, queue)
        except WireBroken as broken:
            if not queue.is_over:
                self._workers.drop(rank)
                if number is not None:
                    queue.give_back(number)
                said = f"Worker {rank} was lost ({broken}). The others train its worlds."
                self._workers.announce(WorkerNews("lost", rank, said))
        except BaseException as error:  # raised by rank 0, which trains in the main thread
            queue.stop(error)

    def _await(self, rank: int, kind: Order) -> list[Array]:
        while (message := self._workers.hear(rank)).kind != kind:
            pass
        return message.arrays

    def _train(self, rank: int, number: int, queue: GroupQueue) -> None:
        position = queue.position(number)
        begin = [np.array([number])] if position is None else arrays_of_position(position)
        self._workers.send(rank, Order.TRAIN, begin)
        while True:
            kind, _, arrays = self._workers.hear(rank)
            if kind == Order.POSITION:
                queue.save(position_of(arrays))
            elif kind == Order.PROGRESS and arrays:
                queue.note(number, GroupStep(*json.loads(text_of(arrays[0]))))
            elif kind == Order.ADAPTERS:
                queue.finish(number, {"rows": torch.from_numpy(arrays[0]), "figures": torch.from_numpy(arrays[1])})
                return


def arrays_of_position(position: Position) -> list[Array]:
    """A position as the arrays of a message."""
    tensors = (position.rows, position.first, position.second)
    return [np.array([position.group, position.num_steps]), *(tensor.detach().cpu().numpy() for tensor in tensors)]


def position_of(arrays: list[Array]) -> Position:
    """The position of a message."""
    group, num_steps = arrays[0].tolist()
    return Position(group, num_steps, *map(torch.from_numpy, arrays[1:]))
