"""An engine that steps only when a test lets it, and clients that ask while it stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from curator.deployments import ScriptedEngine
from server.live import Live


class SteppedEngine(ScriptedEngine):
    """Steps only when the test lets it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.permits = threading.Semaphore(0)
        self.is_free = False
        self.orders: list[list[int]] = []
        self.fails = False

    def step(self, handles: Sequence[int], coins: np.ndarray, temperature: Sequence[float]) -> Any:
        if not self.is_free:
            self.permits.acquire()
        if self.fails:
            raise RuntimeError("ZEBRA in an error")
        self.orders.append(list(handles))
        return super().step(handles, coins, temperature)

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self.permits.release()

    def run_free(self) -> None:
        self.is_free = True
        self.let(1000)

    def stand_still(self) -> None:
        self.is_free = False
        while self.permits.acquire(blocking=False):
            pass


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@contextmanager
def asking(engine: SteppedEngine) -> Iterator[ThreadPoolExecutor]:
    """Clients that ask at the same time; whatever happens, none is left waiting for an engine that stands still."""
    with ThreadPoolExecutor(16) as pool:
        try:
            yield pool
        finally:
            engine.run_free()


def num_known(live: Live) -> int:
    """Answers that run, wait, or have just reached the stepping thread."""
    return live.service.num_running + live.service.num_waiting + live.service.num_calls
