"""Threads for blocking work, shared fairly: one API key occupies a share of them at most."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_TOGETHER = 64
"""Writes of one owner in one transaction."""


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


Write = tuple[Callable[[], Any], asyncio.Future[Any]]


class Writer:
    """One thread for a database. All writes that wait are one transaction, so that many share one flush of the disk.

    An owner has a limited share of each transaction: another's write waits for two of them at most.
    """

    def __init__(self, together: Callable[[Sequence[Callable[[], Any]]], list[Any]]) -> None:
        self._together = together
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._waiting: defaultdict[str, deque[Write]] = defaultdict(deque)
        self._writing: asyncio.Task[None] | None = None

    async def run(self, owner: str, write: Callable[..., T], *arguments: object) -> T:
        """Do it with others; durable when this returns. A caller that is cancelled does not cancel it."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[owner].append((partial(write, *arguments), done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await done

    async def alone(self, work: Callable[[], T]) -> T:
        """Do something between two transactions."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.shutdown(wait=False)

    async def _write_all(self) -> None:
        while self._waiting:
            group = self._next_group()
            try:
                results = await self.alone(partial(self._together, [write for write, _ in group]))
            except Exception as error:
                results = [error] * len(group)
            for (_, done), result in zip(group, results, strict=True):
                if done.cancelled():
                    continue
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)
        self._writing = None

    def _next_group(self) -> list[Write]:
        group: list[Write] = []
        for owner, writes in list(self._waiting.items()):
            group += [writes.popleft() for _ in range(min(_MOST_TOGETHER, len(writes)))]
            if not writes:
                del self._waiting[owner]
        return group
