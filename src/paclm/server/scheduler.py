"""Continuous batching: the one thread that calls the curator. Requests join and leave between two steps.

    event loop ── admit / cancel / ask ──► calls ─┐
                                                   ├─► scheduler thread: run calls, fill the batch, one step, repeat
    event loop ◄── pieces of a step, one message ──┘

The worst case of a request is reserved from its admission on (`Curator.hold`), so one that waits for room in the batch
never fails midway. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from paclm.curator.curator import Curator
from paclm.curator.streams import Piece, Request, Stream
from paclm.errors import BudgetExceeded, CuratorError
from paclm.privacy.accounting import units_up
from paclm.server.refusals import budget_exhausted, budget_reserved, queue_full, stopping

T = TypeVar("T")


class StepPieces(NamedTuple):
    """What one step released for one request."""

    at: float
    """When the step ended, by `time.perf_counter`."""
    by_answer: list[tuple[int, Piece]]
    """With the number of the answer, of those the request asked for."""


class Subscriber:
    """Receives the pieces of one request on the event loop; `None` means that no more will come."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.queue: asyncio.Queue[StepPieces | None] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.has_left = False
        """Read by the scheduler thread: a client that has left is not admitted."""

    def leave(self) -> None:
        """The client is gone: end the wait for pieces."""
        self.has_left = True
        self.queue.put_nowait(None)


class FairQueue(Generic[T]):
    """One queue per API key, served round-robin: a key with a hundred waiting entries delays another key by one."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # in the order of turns
        self._num = 0  # counted, because other threads read it while the queues change

    def __len__(self) -> int:
        return self._num

    def num_of(self, owner: str) -> int:
        """How many entries of this owner wait."""
        return len(self._queues.get(owner, ()))

    def put(self, owner: str, entry: T) -> None:
        """Append to the owner's queue."""
        self._queues.setdefault(owner, deque()).append(entry)
        self._num += 1

    def get(self) -> T:
        """The first entry of the owner whose turn it is; that owner goes to the end."""
        owner = next(iter(self._queues))
        waiting = self._queues.pop(owner)
        entry = waiting.popleft()
        self._num -= 1
        if waiting:
            self._queues[owner] = waiting
        return entry

    def remove(self, owner: str, entry: T) -> bool:
        """Stop waiting; False if the entry does not wait."""
        waiting = self._queues.get(owner, deque())
        if entry not in waiting:
            return False
        waiting.remove(entry)
        self._num -= 1
        if not waiting:
            del self._queues[owner]
        return True


class Scheduler:
    """Steps the curator while any stream is active. `on_step` and `on_failure` are called in its thread."""

    def __init__(
        self,
        curator: Curator,
        max_waiting: int,
        on_step: Callable[[Sequence[tuple[Stream, Piece]], float], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._curator = curator
        self._max_waiting = max_waiting
        self._on_step = on_step
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: FairQueue[Stream] = FairQueue()
        self._subscribers: dict[Stream, tuple[Subscriber, int]] = {}
        self._is_over = False
        self._gate = threading.RLock()  # no call is queued for a thread that has ended
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has stopped, on purpose or not."""
        return self._is_over

    @property
    def num_running(self) -> int:
        """Streams in the batch."""
        return max(0, len(self._subscribers) - len(self._waiting))

    @property
    def num_waiting(self) -> int:
        """Streams that wait for room in the batch."""
        return len(self._waiting)

    @property
    def num_calls(self) -> int:
        """Calls that wait for the end of the current step."""
        return self._calls.qsize()

    # --- from the event loop ------------------------------------------------------------------------------------

    async def ask(self, work: Callable[[Curator], T]) -> T:
        """Do something with the curator between two steps."""
        return await asyncio.wrap_future(self._post(lambda: work(self._curator)))

    async def admit(self, subscriber: Subscriber, requests: Sequence[Request]) -> list[Stream]:
        """Reserve the worst case of all these answers, or refuse them all.

        Call it from a task of the service: were the caller cancelled, its streams would have no owner.
        """
        return await asyncio.wrap_future(self._post(lambda: self._admit(subscriber, requests)))

    async def cancel(self, streams: Sequence[Stream]) -> None:
        """End these streams before the next step; when it returns their tokens are final."""
        await asyncio.wrap_future(self._post(lambda: self._cancel(streams)))

    def stop(self) -> None:
        """Stop after the current step; subscribers of unfinished streams get None."""
        with self._gate:
            self._calls.put(self._stop)

    def close(self) -> None:
        """Stop, and wait until it has."""
        self.stop()
        self._thread.join()

    def _post(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # any error belongs to the caller, not to the scheduler thread
                future.set_exception(error)
            except BaseException as error:  # a panic of a native library: as an Exception, which every caller handles
                future.set_exception(CuratorError(f"A call to the curator failed ({type(error).__name__})."))

        with self._gate:
            if self._is_over:
                future.set_exception(CuratorError("The curator has stopped; start the server again."))
            else:
                self._calls.put(call)
        return future

    # --- in the scheduler thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._run_calls()
                self._fill_batch()
                if self._curator.num_active and not self._is_over:
                    self._step()
        except BaseException as error:  # the curator has stopped itself: report it so that the process is restarted
            self._stop()
            self._on_failure(error)
        finally:
            self._end()

    def _run_calls(self) -> None:
        """Run all queued calls; wait for one when no stream is active."""
        is_idle = not self._subscribers
        while not self._is_over:
            try:
                self._calls.get(block=is_idle)()
            except queue.Empty:
                return
            is_idle = False

    def _admit(self, subscriber: Subscriber, requests: Sequence[Request]) -> list[Stream]:
        if self._is_over or subscriber.has_left:
            raise stopping()
        if self._is_full_for(subscriber.owner, len(requests)):
            raise queue_full(len(self._waiting))
        try:
            streams = self._curator.hold(requests)
        except BudgetExceeded:  # its message is for the operator
            raise self._refusal(requests) from None
        for answer, stream in enumerate(streams):
            self._subscribers[stream] = (subscriber, answer)
            self._waiting.put(subscriber.owner, stream)
        return streams

    def _is_full_for(self, owner: str, wanted: int) -> bool:
        """The queue takes `max_waiting` answers, and up to twice that from keys that have none waiting."""
        limit = self._max_waiting * (1 if self._waiting.num_of(owner) else 2)
        return len(self._waiting) + wanted > limit + self._curator.num_free

    def _refusal(self, requests: Sequence[Request]) -> Exception:
        """Retrying helps only while other requests have reserved what this one lacks."""
        wanted = sum(request.max_new_tokens for request in requests)
        account, per_token = self._curator.account, self._curator.config.per_token
        left = account.remaining_tokens(per_token)
        if wanted > left:
            return budget_exhausted(left, is_spent=account.remaining_units == 0)
        return budget_reserved((account.remaining_units - self._curator.reserved_units) // units_up(per_token))

    def _fill_batch(self) -> None:
        while len(self._waiting) and self._curator.num_free:
            self._curator.start(self._waiting.get())

    def _step(self) -> None:
        started = time.perf_counter()
        released = self._curator.step()
        now = time.perf_counter()
        batches: dict[Subscriber, StepPieces] = {}
        for stream, piece in released:
            found = self._subscribers.pop(stream, None) if piece.finish_reason else self._subscribers.get(stream)
            if found is not None:
                subscriber, answer = found
                batches.setdefault(subscriber, StepPieces(now, [])).by_answer.append((answer, piece))
        _send(batches)
        self._on_step(released, now - started)

    def _cancel(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if (found := self._subscribers.pop(stream, None)) is not None:
                self._waiting.remove(found[0].owner, stream)
                self._curator.cancel(stream)

    def _stop(self) -> None:
        self._is_over = True

    def _end(self) -> None:
        """Leave no caller waiting: calls get an error, subscribers get None."""
        with self._gate:
            self._is_over = True
            while not self._calls.empty():
                self._calls.get()()
        subscribers = {subscriber for subscriber, _ in self._subscribers.values()}
        self._cancel(list(self._subscribers))
        _send(dict.fromkeys(subscribers))


def _send(messages: dict[Subscriber, StepPieces] | dict[Subscriber, None]) -> None:
    """Hand one step's messages to the event loop in one call."""
    loop = next((subscriber.loop for subscriber in messages), None)
    if loop is not None and not loop.is_closed():
        loop.call_soon_threadsafe(_put, messages)


def _put(messages: dict[Subscriber, StepPieces] | dict[Subscriber, None]) -> None:
    for subscriber, message in messages.items():
        subscriber.queue.put_nowait(message)
