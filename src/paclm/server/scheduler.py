"""The one thread that touches the curator: it takes calls, starts streams, steps, and hands tokens to their requests.

    event loop ── admit / cancel / ask ──► calls ─┐
                                                   ├─► stepping thread: calls, then places, then one step, and again
    event loop ◄── tokens of a step, at once ─────┘

Requests join and leave between steps. What a request may cost is held free from its admission on (`Curator.hold`), so
one that waits for a place never dies midway. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

from paclm.curator.curator import Curator, Delivery
from paclm.curator.streams import FinishReason, Piece, Request, Stream
from paclm.errors import BudgetExceeded, CuratorError
from paclm.privacy.accounting import units_up
from paclm.server.fair_queue import Lines
from paclm.server.refusals import budget_exhausted, budget_held, queue_full, stopping

T = TypeVar("T")


class Token(NamedTuple):
    """One token for one request; `at` is when its step ended."""

    answer: int
    """Which of the request's answers it belongs to."""
    piece: Piece
    finish_reason: FinishReason | None
    at: float


class Audience:
    """The request that a group of streams answers to. Lives on the event loop; `None` means: nothing more will come."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.tokens: asyncio.Queue[Token | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def hear(self, news: Sequence[tuple[Audience, Token | None]]) -> None:
        """Called from the stepping thread: pass on what a step had for everybody on this loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_pass_on, news)


def _pass_on(news: Sequence[tuple[Audience, Token | None]]) -> None:
    for audience, token in news:
        audience.tokens.put_nowait(token)


class Seat(NamedTuple):
    """Where a stream's tokens go."""

    audience: Audience
    answer: int


class Observer(Protocol):
    """Who wants to know about steps; called in the stepping thread."""

    def stepped(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """A step ended."""

    def failed(self, error: BaseException) -> None:
        """A step failed: there will be no other."""


class Stepper:
    """Steps the curator while there is anything to do."""

    def __init__(self, curator: Curator, max_waiting: int, observer: Observer) -> None:
        self._curator = curator
        self._max_waiting = max_waiting
        self._observer = observer
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lines: Lines[Stream] = Lines()
        self._seats: dict[Stream, Seat] = {}
        self._is_over = False
        self._gate = threading.RLock()  # no call is put into the queue of a thread that has left it
        self._thread = threading.Thread(target=self._run, name="stepping", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has stopped, on purpose or not."""
        return self._is_over

    @property
    def num_running(self) -> int:
        """Streams with a place in the batch."""
        return max(0, len(self._seats) - len(self._lines))

    @property
    def num_waiting(self) -> int:
        """Streams without one."""
        return len(self._lines)

    @property
    def num_calls(self) -> int:
        """Calls that wait for the end of the step under way."""
        return self._calls.qsize()

    # --- from the event loop ------------------------------------------------------------------------------------

    async def ask(self, work: Callable[[Curator], T]) -> T:
        """Do something with the curator between two steps."""
        return await asyncio.wrap_future(self._post(lambda: work(self._curator)))

    async def admit(self, audience: Audience, requests: Sequence[Request]) -> list[Stream]:
        """Hold the worst case of all these answers, or refuse them all."""
        future = self._post(lambda: self._admit(audience, requests))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # the client left; whatever is admitted meanwhile has nobody to hear it
            future.add_done_callback(self._drop)
            raise

    async def cancel(self, streams: Sequence[Stream]) -> None:
        """End these streams before the next step; when it returns their tokens are final."""
        await asyncio.shield(asyncio.wrap_future(self._post(lambda: self._cancel(streams))))

    def stop(self) -> None:
        """Stop after the step under way; streams that have not ended hear that nothing more will come."""
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
            except Exception as error:  # whatever it is belongs to the caller, not to the stepping thread
                future.set_exception(error)

        with self._gate:
            if self._is_over:
                future.set_exception(CuratorError("The curator has stopped; start the server again."))
            else:
                self._calls.put(call)
        return future

    def _drop(self, future: Future[list[Stream]]) -> None:
        if not future.cancelled() and future.exception() is None:
            streams = future.result()
            self._post(lambda: self._cancel(streams))

    # --- in the stepping thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._take_calls()
                self._fill_places()
                if self._curator.num_active and not self._is_over:
                    self._step()
        except Exception as error:  # the curator has stopped itself by now: say so, and let the process be restarted
            self._stop()
            self._observer.failed(error)
        finally:
            self._leave()

    def _take_calls(self) -> None:
        """All that is there; wait for one when there is nothing else to do."""
        is_idle = not self._seats
        while not self._is_over:
            try:
                self._calls.get(block=is_idle)()
            except queue.Empty:
                return
            is_idle = False

    def _admit(self, audience: Audience, requests: Sequence[Request]) -> list[Stream]:
        if self._is_over:
            raise stopping()
        if self._is_full_for(audience.owner, len(requests)):
            raise queue_full(len(self._lines))
        try:
            streams = self._curator.hold(requests)
        except BudgetExceeded:  # its sentence is for the operator
            raise self._refusal(requests) from None
        for answer, stream in enumerate(streams):
            self._seats[stream] = Seat(audience, answer)
            self._lines.join(audience.owner, stream)
        return streams

    def _is_full_for(self, owner: str, wanted: int) -> bool:
        """One key cannot fill the queue for the others: who has none waiting is let in, up to twice the limit."""
        limit = self._max_waiting * (1 if self._lines.num_of(owner) else 2)
        return len(self._lines) + wanted > limit + self._curator.num_free

    def _refusal(self, requests: Sequence[Request]) -> Exception:
        """Whether it is worth waiting: it is while others hold what this request lacks."""
        wanted = sum(request.max_new_tokens for request in requests)
        account, per_token = self._curator.account, self._curator.config.per_token
        left = account.remaining_tokens(per_token)
        if wanted > left:
            return budget_exhausted(left, is_gone=account.remaining_units == 0)
        return budget_held((account.remaining_units - self._curator.reserved_units) // units_up(per_token))

    def _fill_places(self) -> None:
        while len(self._lines) and self._curator.num_free:
            self._curator.start(self._lines.next())

    def _step(self) -> None:
        started = time.perf_counter()
        deliveries = self._curator.step()
        now = time.perf_counter()
        news = [
            (seat.audience, Token(seat.answer, piece, stream.finish_reason, now))
            for stream, piece in deliveries
            if (seat := self._seats.get(stream)) is not None
        ]
        for stream, _ in deliveries:
            if stream.finish_reason is not None:
                self._seats.pop(stream, None)
        if news:
            news[0][0].hear(news)
        self._observer.stepped(deliveries, now - started)

    def _cancel(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            seat = self._seats.pop(stream, None)
            if seat is not None:
                self._lines.leave(seat.audience.owner, stream)
                self._curator.cancel(stream)

    def _stop(self) -> None:
        self._is_over = True

    def _leave(self) -> None:
        """Nobody waits for ever: calls are answered with an error, audiences hear the end."""
        with self._gate:
            self._is_over = True
            while not self._calls.empty():
                self._calls.get()()
        audiences = {seat.audience for seat in self._seats.values()}
        self._cancel(list(self._seats))
        for audience in audiences:
            audience.hear([(audience, None)])
