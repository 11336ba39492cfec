"""Threads for blocking work, shared fairly: one API key occupies a share of them at most."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Turns(defaultdict[str, asyncio.Semaphore]):
    """By owner: at most `each` of an owner's tasks hold a turn at a time; the others wait in their order."""

    def __init__(self, each: int) -> None:
        super().__init__(lambda: asyncio.Semaphore(each))


class Workers:
    """The threads for one kind of work, of which an owner has at most `each`."""

    def __init__(self, name: str, num_threads: int, each: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns = Turns(each)

    async def run(self, owner: str, work: Callable[..., T], *arguments: object) -> T:
        """Do it in a thread once it is the owner's turn."""
        turn = self._turns[owner]
        await turn.acquire()
        job = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        job.add_done_callback(lambda _: turn.release())  # a caller that is cancelled leaves its thread at work
        return await asyncio.shield(job)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown(wait=False)
