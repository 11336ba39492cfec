"""The service: one curator, the thread that steps it, and the books of keys and replies. Knows no HTTP.

Whatever must come to its end (counting what a key used, storing a reply) runs as a task of the service and not of the
connection, so that a client who leaves cannot leave it half done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from paclm.config import RuntimeConfig, ServerConfig
from paclm.curator.curator import Curator, Delivery
from paclm.curator.streams import Request
from paclm.errors import KeyRefused, PaclmError, QuotaExceeded, ServiceError
from paclm.server import logs
from paclm.server.api_keys import KeyStore
from paclm.server.idempotency import Replies
from paclm.server.jobs import Caller, Job
from paclm.server.metrics import Metrics
from paclm.server.recent import Recent
from paclm.server.refusals import Refused, quota_exhausted, stopping, unknown_key
from paclm.server.scheduler import Audience, Stepper
from paclm.server.thrift import Thrift

T = TypeVar("T")

_HOUSEKEEPING_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a service is started with."""

    model_id: str
    settings: ServerConfig = field(default_factory=ServerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    is_loopback: bool = True
    """Only this machine can reach it."""
    unit: str = "a record was"
    """What the guarantee is about, as a sentence goes on: a record, or the records of a group."""
    created: int = 0
    """When the model came to be, in seconds since 1970."""


class Service:
    """Everything behind the endpoints. Start it inside the event loop, and close it there."""

    def __init__(self, curator: Curator, setup: Setup, keys: KeyStore, replies: Replies) -> None:
        curator.usage()  # the first call reads the ledger's whole table: now, while nobody waits for a step
        self.curator = curator
        self.setup = setup
        self.keys = keys
        self.replies = replies
        self.metrics = Metrics()
        self.recent = Recent()
        self.num_requests: Counter[str] = Counter()
        """Requests for answers since the start, by key name."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called once, from another thread, when a step has failed and only a restart helps."""
        self.has_failed = False
        self.is_draining = False
        self._started = time.monotonic()
        self._stepper = Stepper(curator, setup.settings.max_waiting, self)
        self._thrift = Thrift(curator)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._owed: deque[Callable[[], None]] = deque()  # what the books could not take yet
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to step, and to forget replies whose time is over."""
        self._loop = asyncio.get_running_loop()
        logs.write(logs.Entry(event="started", remaining_tokens=self._thrift.remaining_tokens))
        self._thrift.look()
        self._stepper.start()
        self._housekeeping = asyncio.create_task(self._keep_house())

    def drain(self) -> None:
        """Take no new requests; those under way go on for `shutdown_seconds`, then each hears that it is cut off."""
        if not self.is_draining:
            self.is_draining = True
            if self._loop is not None:  # a signal may come before the start
                self._loop.call_soon_threadsafe(self._begin_to_end)  # a signal handler must not write a log line

    def _begin_to_end(self) -> None:
        logs.write(logs.Entry(event="stopping", running=self.num_running, queued=self.num_waiting))
        asyncio.get_running_loop().call_later(self.setup.settings.shutdown_seconds, self._stepper.stop)

    async def close(self) -> None:
        """Stop after the step under way, count everything, and let the next writer in."""
        self.drain()
        self._housekeeping.cancel()
        while self._tasks:  # also answers without a connection, which somebody will ask for by their Idempotency-Key
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._stepper.close)
        await self._pay_what_is_owed()
        await asyncio.to_thread(self.curator.close)
        logs.write(logs.Entry(event="stopped", seconds=self.uptime_seconds))

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way, with or without a client; one that is admitted has a place or waits."""
        return not self._tasks and not self.num_running and not self.num_waiting

    @property
    def state(self) -> str:
        """`serving`, `draining` or `stopped`."""
        if self.has_failed or self._stepper.is_over:
            return "stopped"
        return "draining" if self.is_draining else "serving"

    @property
    def is_public_now(self) -> bool:
        """Whether the budget is gone and the public model answers."""
        return self._thrift.is_exhausted and self.curator.config.on_exhausted == "public"

    @property
    def uptime_seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    @property
    def num_running(self) -> int:
        """Answers with a place in the batch."""
        return self._stepper.num_running

    @property
    def num_waiting(self) -> int:
        """Answers without one."""
        return self._stepper.num_waiting

    @property
    def num_calls(self) -> int:
        """Admissions, cancellations and questions that wait for the end of the step under way."""
        return self._stepper.num_calls

    # --- work ---------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something to its end, whoever stops waiting for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused):  # a refusal whose client is gone is nobody's concern
            _log_error("task failed", error)

    async def ask(self, work: Callable[[Curator], T]) -> T:
        """Do something with the curator between two steps."""
        if self.state == "stopped":
            raise stopping()
        return await self._stepper.ask(work)

    async def admit(self, caller: Caller, requests: Sequence[Request]) -> Job:
        """Hold quota and budget for the worst case of all these answers, or refuse."""
        if self.state != "serving":
            raise stopping()
        admission = self.spawn(self._admit(caller, requests))
        try:
            return await asyncio.shield(admission)
        except asyncio.CancelledError:  # whatever is admitted has nobody to hear it
            self.spawn(self._undo(admission))
            raise

    async def end(self, job: Job) -> None:
        """Stop what still runs and count what was used."""
        await job.end(self._stepper, self.keys, self.book)

    async def book(self, work: Callable[[], None]) -> None:
        """Bring something into the books. What they cannot take now is tried again: a request does not fail for it."""
        try:
            await asyncio.to_thread(work)
        except ServiceError as error:
            _log_error("books", error)
            self._owed.append(work)

    async def _admit(self, caller: Caller, requests: Sequence[Request]) -> Job:
        started, reserved = time.perf_counter(), sum(request.max_new_tokens for request in requests)
        if caller.key is not None:
            await self._reserve(caller, reserved)
        audience = Audience(caller.name)
        try:
            streams = await self._stepper.admit(audience, requests)
        except BaseException:
            if caller.key is not None:
                await self.book(partial(self.keys.settle, caller.name, reserved=reserved, used=0))
            raise
        self.num_requests[caller.name] += 1
        return Job(caller, streams, audience, reserved=reserved, started=started)

    async def _reserve(self, caller: Caller, tokens: int) -> None:
        try:
            await asyncio.to_thread(self.keys.reserve, caller.name, tokens)
        except QuotaExceeded as error:
            raise quota_exhausted(error) from None
        except KeyRefused:  # revoked since it was identified
            raise unknown_key(is_needed=True) from None

    async def _undo(self, admission: asyncio.Task[Job]) -> None:
        with suppress(Refused, PaclmError):
            await self.end(await admission)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            await self._pay_what_is_owed()
            try:
                await asyncio.to_thread(self.replies.forget_expired)
            except ServiceError as error:  # the next round tries again: private text must not stay for good
                _log_error("books", error)

    async def _pay_what_is_owed(self) -> None:
        for _ in range(len(self._owed)):
            await self.book(self._owed.popleft())

    # --- from the stepping thread -------------------------------------------------------------------------------

    def stepped(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Count a step."""
        self.metrics.observe_step(seconds)
        self.metrics.observe_commit(self.curator.commit_seconds)
        for stream, piece in deliveries:
            self.metrics.count_token(stream.request.tag, piece.mark)
        self.recent.add([piece.mark for _, piece in deliveries])
        self._thrift.look()

    def failed(self, error: BaseException) -> None:
        """A step failed: what left is in the ledger, and nothing more will leave before a restart."""
        self.has_failed = True
        _log_error("step failed", error)
        self.on_failure()


def _log_error(what: str, error: BaseException) -> None:
    logging.getLogger(logs.LOGGER).error(what, exc_info=error)  # the formatter keeps type and place only
