"""The front's side of the link: calls to the curator process, and the pieces that come back. Knows no HTTP routes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from paclm.config import MechanismConfig
from paclm.curator.streams import BudgetFigures, FinishReason, Limits, Logprobs, Mark, Piece, Request, UsageFigures
from paclm.errors import CuratorError
from paclm.ledger.events import Usage
from paclm.server.messages import BrokenLink, CuratorState, DecoderState, Reason, Topic, Unpacker, pack
from paclm.server.refusals import (
    budget_exhausted,
    budget_reserved,
    internal_error,
    queue_full,
    stopping,
    waiting_for_workers,
)


class Transcript:
    """What was released of one answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.num_tokens = 0
        self.num_public = 0
        self.num_unknown = 0
        """Tokens that may have been charged without a message: of the last step before the curator failed."""
        self.charged_units = 0
        self.finish_reason: FinishReason | None = None
        self.has_started = False
        """Whether it got into the batch, so that tokens may have been charged."""
        self.held_back = ""
        """Text of an answer that was cut off which could have become a stop string."""
        self.logprobs: list[tuple[int, Logprobs]] = []
        """Of each token, by its id, where they were asked for."""
        self._texts: list[str] = []

    def add(self, piece: Piece) -> None:
        """Count and keep a piece."""
        self.has_started = True
        self.num_tokens += 1
        self.num_public += piece.mark == "public"
        self.charged_units += piece.units
        self.finish_reason = piece.finish_reason
        self._texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs.append((piece.token, piece.logprobs))

    @property
    def num_private(self) -> int:
        """Tokens that the quota of a key counts."""
        return self.num_tokens - self.num_public

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return "".join(self._texts)


class Subscriber(Protocol):
    """Receives the pieces of one request, on the event loop."""

    def receive(self, at: float, pieces: Sequence[tuple[int, Piece]]) -> None:
        """What one step released, with the number of the answer; `at` is by `time.perf_counter`."""

    def interrupt(self) -> None:
        """No more will come: the curator has stopped."""


StepObserver = Callable[[Mapping[tuple[str, Mark], int], float, float | None], None]
"""Called after every step: tokens by key and mark, seconds of the step and of its commit."""


class DecoderClient(asyncio.Protocol):
    """Calls wait for the end of the current step. Start it inside the event loop."""

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self.limits = Limits(hello["vocabulary"], hello["context"])
        self.default_temperature: float = hello["default_temperature"]
        """Of a request that names none; 0 is greedy."""
        self.num_places: int = hello["num_places"]
        """Streams that the batch holds."""
        self.cautions: list[str] = hello["cautions"]
        self.state: DecoderState = hello["state"]
        """As of the last step, or of the last time it was asked for."""
        self.on_step: StepObserver = lambda tokens, seconds, commit_seconds: None
        self.on_end: Callable[[bool], None] = lambda has_failed: None
        """Called once, when the curator has stopped; whether it failed."""
        self.is_over = False
        self.num_workers_lost = 0
        """Workers that the curator waits for: no step ends meanwhile, and no call is answered."""
        self._unpacker = Unpacker()
        self._transport: asyncio.WriteTransport | None = None
        self._next_call = 0
        self._next_stream = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._queries: set[asyncio.Future[Any]] = set()  # those of the calls that need not wait for a lost worker
        self._open: dict[int, tuple[Subscriber, int, Transcript]] = {}

    async def start(self, end: socket.socket) -> None:
        """Begin, over the front's end of the pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        self._send("ready")

    # --- calls ----------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Streams that run or wait."""
        return len(self._open)

    async def admit(self, subscriber: Subscriber, requests: Sequence[Request], into: list[Transcript]) -> None:
        """Reserve the worst case of all these answers, or refuse them all; `into` has their transcripts at once.

        Call it from a task of the service: were the caller cancelled, its streams would have no owner.
        """
        first = self._next_stream
        self._next_stream += len(requests)
        into += map(Transcript, requests)
        self._open.update((first + n, (subscriber, n, transcript)) for n, transcript in enumerate(into))
        rows = [
            (
                r.prompt,
                r.max_new_tokens,
                r.temperature,
                r.stop,
                r.coins_seed,
                r.num_logprobs,
                r.grammar and r.grammar.text,
            )
            for r in requests
        ]
        try:
            await self._call("admit", requests[0].tag, first, rows)
        except BaseException:
            into.clear()
            for number in range(first, first + len(requests)):
                self._open.pop(number, None)
            raise

    async def cancel(self, transcripts: Sequence[Transcript]) -> None:
        """End these streams before the next step; when it returns their tokens are final."""
        ids = set(map(id, transcripts))
        numbers = [number for number, (_, _, transcript) in self._open.items() if id(transcript) in ids]
        if numbers:
            await self._call("cancel", numbers)
            for number in numbers:
                self._open.pop(number, None)

    def stop(self) -> None:
        """Ask it to stop after the current step; subscribers of unfinished streams are interrupted."""
        if not self.is_over:
            self._send("stop", self._new_call()[0])

    def close(self) -> None:
        """End the link."""
        if self._transport is not None:
            self._transport.close()

    async def _ask(self, topic: Topic) -> Any:
        if self.num_workers_lost:
            raise waiting_for_workers()
        future = self._begin_call("query", topic)
        self._queries.add(future)
        future.add_done_callback(self._queries.discard)
        return await future

    async def _call(self, kind: str, *content: object) -> Any:
        return await self._begin_call(kind, *content)

    def _begin_call(self, kind: str, *content: object) -> asyncio.Future[Any]:
        if self.is_over:
            raise CuratorError("The curator has stopped; start the server again.")
        number, future = self._new_call()
        self._send(kind, number, *content)
        return future

    def _new_call(self) -> tuple[int, asyncio.Future[Any]]:
        number, future = self._next_call, asyncio.get_running_loop().create_future()
        self._next_call += 1
        self._calls[number] = future
        return number, future

    def _send(self, *message: object) -> None:
        if self._transport is not None:
            self._transport.write(pack(message))

    # --- what comes back ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The link is there."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Messages of the curator."""
        for kind, *content in self._unpacker.feed(data):
            match kind:
                case "step":
                    self._stepped(*content)
                case "reply":
                    self._replied(*content)
                case "refused":
                    self._refused(*content)
                case "workers":
                    self._workers_changed(*content)
                case "ended":
                    self._ended(*content)
                case "stopped":
                    self._stop(has_failed=content[0])

    def connection_lost(self, exc: Exception | None) -> None:
        """The curator has ended; without `stopped`, what it did last is not known."""
        if self._transport is not None:  # a failed write ends the link before all that was sent is read
            with suppress(OSError, BrokenLink):
                while data := os.read(self._transport.get_extra_info("socket").fileno(), 2**18):
                    self.data_received(data)
        for _, _, transcript in self._open.values():
            transcript.has_started = True
        self._stop(has_failed=True)

    def _stepped(self, pieces: list[Any], state: DecoderState, seconds: float, commit_seconds: float | None) -> None:
        self.state = state
        now = time.perf_counter()
        tokens: Counter[tuple[str, Mark]] = Counter()
        batches: dict[Subscriber, list[tuple[int, Piece]]] = {}
        for number, *row in pieces:
            piece = Piece(*row)
            if piece.logprobs is not None:
                piece = piece._replace(logprobs=Logprobs(*piece.logprobs))
            subscriber, answer, transcript = self._open.pop(number) if piece.finish_reason else self._open[number]
            transcript.add(piece)
            tokens[transcript.request.tag, piece.mark] += 1
            if subscriber in batches:
                batches[subscriber].append((answer, piece))
            else:
                batches[subscriber] = [(answer, piece)]
        for subscriber, batch in batches.items():
            subscriber.receive(now, batch)
        self.on_step(tokens, seconds, commit_seconds)

    def _replied(self, call: int, result: Any) -> None:
        future = self._calls.pop(call)
        if not future.done():
            future.set_result(result)

    def _refused(self, call: int, reason: Reason, *figures: int) -> None:
        future = self._calls.pop(call)
        if not future.done():
            future.set_exception(_refusal(reason, *figures))

    def _workers_changed(self, num_lost: int) -> None:
        self.num_workers_lost = num_lost
        for query in [query for query in self._queries if num_lost and not query.done()]:
            query.set_exception(waiting_for_workers())

    def _ended(self, rows: list[tuple[int, bool, str]]) -> None:
        for number, has_started, held_back in rows:
            _, _, transcript = self._open[number]
            transcript.has_started, transcript.held_back = has_started, held_back

    def _stop(self, *, has_failed: bool) -> None:
        if self.is_over:
            return
        self.is_over = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(CuratorError("The curator has stopped; start the server again."))
                future.exception()  # some have no caller who would look
        self._calls.clear()
        interrupted = dict.fromkeys(subscriber for subscriber, _, _ in self._open.values())
        for _, _, transcript in self._open.values():
            transcript.num_unknown = int(has_failed and transcript.has_started)
        self._open.clear()
        for subscriber in interrupted:
            subscriber.interrupt()
        self.on_end(has_failed)


class CuratorClient(DecoderClient):
    """Of the promise `half`: there is a budget."""

    state: CuratorState

    def __init__(self, hello: Mapping[str, Any]) -> None:
        super().__init__(hello)
        self.config = MechanismConfig(**hello["config"])
        self.num_worlds: int = hello["num_worlds"]
        self.worst_price: int = hello["worst_price"]
        """The highest price of one private token, in units."""
        self.are_promises_mixed: bool = hello["are_promises_mixed"]
        """Whether the corpus is served under the other promise too."""

    async def ask_state(self) -> CuratorState:
        """The state between two steps, with exact reservations."""
        self.state = await self._ask("figures")
        return self.state

    async def ask_usage(self) -> UsageFigures:
        """Usage by key name and by hour, from the ledger."""
        tables = await self._ask("usage")
        return UsageFigures(*({name: Usage(name, *counts) for name, counts in table.items()} for table in tables))

    async def ask_leak(self) -> float:
        """Estimated leak in nats, to three digits; for the operator only."""
        return float(await self._ask("leak"))

    def figures(self, *, is_admin: bool) -> BudgetFigures:
        """The state of the budget, in the names of the command line's JSON: exact for the admin, coarse for others."""
        state = self.state if is_admin else self.state["coarse"]
        return BudgetFigures(**{name: state[name] for name in BudgetFigures.__annotations__})  # type: ignore


def _refusal(reason: Reason, *figures: int) -> Exception:
    match reason, figures:
        case "queue_full", (waiting,):
            return queue_full(waiting)
        case "budget_exhausted", (is_gone, is_spent):
            return budget_exhausted(is_gone=bool(is_gone), is_spent=bool(is_spent))
        case "budget_reserved", _:
            return budget_reserved()
        case "stopping", _:
            return stopping()
        case "invalid", _:  # the front has checked with the same code
            return internal_error()
    return CuratorError("A call to the curator failed.")
