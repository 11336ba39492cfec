"""Everything behind the endpoints: the link to the curator, API keys, stored replies, metrics. Knows no HTTP.

Work that must finish (counting what a key used, storing a reply) runs as a task of the service and not of the
connection, so that a client who disconnects cannot leave it half done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from paclm.curator.streams import Mark, Tokenizer
from paclm.errors import ServiceError, ServiceStopped
from paclm.privacy.accounting import units_up
from paclm.server import telemetry
from paclm.server.api_keys import KeyStore
from paclm.server.curator_client import CuratorClient, DecoderClient, Transcript
from paclm.server.grammar_checks import GrammarChecks
from paclm.server.idempotency import Replies
from paclm.server.messages import Served, Setup
from paclm.server.openai_format import Figures, cost_of
from paclm.server.prompt_length import PromptLength
from paclm.server.refusals import Refused
from paclm.server.repeats import Repeats
from paclm.server.telemetry import Metrics, Recent, log_error
from paclm.server.workers import Turns, Workers, Writer

if TYPE_CHECKING:
    from paclm.server.otel import Otel

T = TypeVar("T")

_HOUSEKEEPING_SECONDS = 60.0
_LOW_SHARE = 10
"""`budget_low` is logged when a tenth of the budget is left."""


class Service(ABC):
    """Start it inside the event loop, and close it there."""

    promise: Served
    has_logprobs = False

    @property
    def allows_forced_choice(self) -> bool:
        """Whether answers may be a choice between texts of the caller; where nothing is charged, always."""
        return self.promise != "half" or self.setup.settings.forced_choice

    def __init__(
        self,
        end: socket.socket,
        curator: DecoderClient,
        setup: Setup,
        tokenizer: Tokenizer,
        keys: KeyStore,
        replies: Replies,
    ) -> None:
        self.curator = curator
        self.curator.on_step = self._stepped
        self.curator.on_end = self._ended
        self.tokenizer = tokenizer
        self.prompt_length = PromptLength(tokenizer)
        self.setup = setup
        self.keys = keys
        self.replies = replies
        self.repeats = Repeats()
        self.metrics = Metrics(self.promise)
        self.grammars = GrammarChecks(tokenizer, curator.limits.vocabulary, self.metrics.count_grammar)
        self.otel: Otel | None = None
        """Where traces go, if anywhere."""
        self.recent = Recent()
        self.num_requests: Counter[str] = Counter()
        """Requests admitted since the start, by key name."""
        self.num_tokens: Counter[str] = Counter()
        """Tokens sent since the start, by key name."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called once, when a step has failed or the curator is gone, and only a restart helps."""
        self.has_failed = False
        self.is_draining = False
        self.tokenizing = Workers("tokenizer", num_threads=2, each=1)
        self.reading = Workers("keys", num_threads=1, each=64)
        self.writes = Writer(keys.database.together)
        keys.database.on_lost = self._database_lost
        self.large_bodies = Turns(each=2)
        self._end = end
        self._started = time.monotonic()
        self._logged: set[telemetry.EventName] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._retries: deque[Callable[[], None]] = deque()  # writes that the database could not take yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = asyncio.Event()

    # --- start and stop -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take requests, and delete expired replies."""
        self._loop = asyncio.get_running_loop()
        telemetry.write(telemetry.Entry(event="started", remaining_tokens=self.remaining_tokens))
        await self.curator.start(self._end)
        self._housekeeping = asyncio.create_task(self._keep_house())

    def drain(self) -> None:
        """Take no new requests; running ones have `shutdown_seconds` to finish and are cut off then."""
        if not self.is_draining:
            self.is_draining = True
            if self._loop is not None:  # a signal may come before the start
                self._loop.call_soon_threadsafe(self._begin_drain)  # a signal handler must not write a log line

    def _begin_drain(self) -> None:
        state = self.curator.state
        telemetry.write(telemetry.Entry(event="stopping", running=state["running"], queued=state["waiting"]))
        asyncio.get_running_loop().call_later(self.setup.settings.shutdown_seconds, self.curator.stop)

    async def close(self) -> None:
        """Finish all accounting, and stop the curator."""
        self.drain()
        self._housekeeping.cancel()
        while self._tasks:  # answers without a client too: their Idempotency-Key can ask for them later
            await asyncio.wait(self._tasks)
        self.curator.stop()
        await self._retry_writes()
        await self._has_ended.wait()
        self.curator.close()
        await self.grammars.close()
        for workers in (self.tokenizing, self.reading, self.writes):
            workers.close()
        telemetry.write(telemetry.Entry(event="stopped", seconds=self.uptime_seconds))

    @property
    def is_idle(self) -> bool:
        """Whether no answer is in progress, with or without a client."""
        return self.curator.is_over or (not self._tasks and not self.curator.num_open)  # `close` waits for the rest

    @property
    def state(self) -> str:
        """`serving`, `restoring` (a worker is waited for), `draining` or `stopped`."""
        if self.curator.is_over:
            return "stopped"
        if self.is_draining:
            return "draining"
        return "restoring" if self.curator.num_workers_lost else "serving"

    @property
    def uptime_seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    # --- what depends on the promise --------------------------------------------------------------------------------

    @abstractmethod
    def cost_of(self, streams: Sequence[Transcript], *, is_admin: bool) -> Figures:
        """The `privacy` object of a reply."""

    @property
    def remaining_tokens(self) -> int | None:
        """Tokens left if every one is charged; None where there is no budget."""
        return None

    @property
    def is_public_now(self) -> bool:
        """Whether the budget is spent and the public model answers."""
        return False

    # --- work -----------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something to its end; `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Refused):
            log_error("task failed", error)

    async def read(self, work: Callable[..., T], *arguments: object) -> T:
        """Read from the service database; in a thread where that waits for a network."""
        if self.keys.database.is_remote:
            return await self.reading.run("", work, *arguments)
        return work(*arguments)

    async def record(self, work: Callable[[], None], owner: str = "") -> None:
        """Write to the service database; a write it cannot take now is retried, and the request does not fail."""
        try:
            await self.writes.run(owner, work)
        except ServiceStopped as error:  # at its next start a server counts all that was reserved as used
            log_error("database", error)
        except ServiceError as error:
            log_error("database", error)
            self._retries.append(work)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            await asyncio.shield(self.spawn(self._retry_writes()))  # cancelled in the middle it would lose a write
            try:
                await self.writes.alone(self.replies.forget_expired)
            except ServiceError as error:  # tried again in the next round: private text must not stay
                log_error("database", error)

    async def _retry_writes(self) -> None:
        for _ in range(len(self._retries)):
            await self.record(self._retries.popleft())

    def _database_lost(self) -> None:
        """From any thread: no quota and no reply can be kept any more, so the server ends."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.curator.close)  # the curator ends with an error, and says so

    # --- from the curator -------------------------------------------------------------------------------------------

    def _stepped(self, tokens: Mapping[tuple[str, Mark], int], seconds: float, commit_seconds: float | None) -> None:
        self.metrics.step_seconds.observe(seconds)
        if commit_seconds is not None:
            self.metrics.commit_seconds.observe(commit_seconds)
        marks: Counter[Mark] = Counter()
        for (key_name, mark), num in tokens.items():
            self.metrics.count_tokens(key_name, mark, num)
            self.num_tokens[key_name] += num
            marks[mark] += num
        self.recent.add(marks)

    def _ended(self, has_failed: bool) -> None:
        """What was released is in the ledger; nothing more is released before a restart."""
        self.has_failed = has_failed
        self._has_ended.set()
        if has_failed:
            self.on_failure()


class HalfService(Service):
    """Of the promise `half`."""

    promise = "half"
    curator: CuratorClient

    def cost_of(self, streams: Sequence[Transcript], *, is_admin: bool) -> Figures:
        """What a request cost, and the state of the budget."""
        price = None if is_admin else self.curator.worst_price
        return cost_of(streams, self.curator.figures(is_admin=is_admin), price)

    @property
    def remaining_tokens(self) -> int:
        """Tokens left if every one is charged."""
        return self.curator.state["remaining_tokens"]

    @property
    def is_public_now(self) -> bool:
        """Whether the budget is spent and the public model answers."""
        return self.remaining_tokens == 0 and self.curator.config.on_exhausted == "public"

    async def start(self) -> None:
        """Take requests; say so if little is left."""
        await super().start()
        self._watch_budget()

    def _stepped(self, tokens: Mapping[tuple[str, Mark], int], seconds: float, commit_seconds: float | None) -> None:
        super()._stepped(tokens, seconds, commit_seconds)
        self._watch_budget()

    def _watch_budget(self) -> None:
        """Log `budget_low` at a tenth and `budget_exhausted`, once per process."""
        left = self.remaining_tokens
        event: telemetry.EventName = "budget_low" if left else "budget_exhausted"
        total = self.curator.state["total_units"] // units_up(self.curator.config.per_token)
        if left * _LOW_SHARE <= total and event not in self._logged:
            self._logged.add(event)
            on_exhausted = self.curator.config.on_exhausted
            telemetry.write(
                telemetry.Entry(event=event, remaining_tokens=left, on_exhausted=on_exhausted), logging.WARNING
            )
