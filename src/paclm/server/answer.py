"""One request from its Idempotency-Key to its last byte, whole or streamed.

An `Answer` runs as a task of the service, so it always finishes its accounting; the client can only leave. Without an
Idempotency-Key a client that leaves cancels its streams, and what was released stays charged. With one the answer is
completed and stored, because that client will ask again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from paclm.curator.streams import Piece, Request
from paclm.errors import (
    CuratorError,
    KeyRefused,
    PaclmError,
    QuotaExceeded,
)
from paclm.server import telemetry
from paclm.server.access import Caller, route_of
from paclm.server.curator_client import Transcript
from paclm.server.idempotency import Fresh, InProgress, Stored, Ticket, body_digest
from paclm.server.openai_format import Figures, Reply, headers_of
from paclm.server.refusals import (
    Refused,
    cut_off,
    database_unavailable,
    internal_error,
    quota_exhausted,
    stopping,
    unknown_key,
)
from paclm.server.repeats import first_failed, look_up, reply_lost
from paclm.server.service import Service
from paclm.server.telemetry import log_error
from paclm.server.web_server import EVENTS, KEEP_ALIVE_SECONDS, EventStream, Outbox, unless_client_leaves

if TYPE_CHECKING:
    from paclm.server.otel import Trace

JSON = "application/json"
BUDGET_GONE = {"paclm-budget": "exhausted"}
"""A header of answers that hold tokens of the public model."""
REPLAYED = {"idempotent-replayed": "true"}
"""A header of answers to an earlier request with the same Idempotency-Key."""


class Interrupted(Exception):
    """The streams ended before they were complete: the client left, or the server stops."""


class Answer:
    """Answers one HTTP request and owns its streams: while the curator runs, nothing else cancels them."""

    def __init__(
        self, service: Service, caller: Caller, requests: Sequence[Request], reply: Reply, *, is_stream: bool
    ) -> None:
        self._service = service
        self._caller = caller
        self._requests = requests
        self._reply = reply
        self._is_stream = is_stream
        self._idempotency_key: str | None = None
        self._ticket: Ticket | None = None
        self._turn: asyncio.Future[None] | None = None
        self._has_client = True
        self._is_admitted = False
        self._is_settled = False
        self._is_over = False
        self._streams: list[Transcript] = []
        self._num_open = len(requests)
        self._last: tuple[int, Piece] | None = None
        self._finished = asyncio.Event()  # all pieces are there, or none will come any more
        self._error: Exception | None = None
        self._trace: Trace | None = None
        self._started = time.perf_counter()
        self._first_token_seconds: float | None = None
        self._last_token: dict[int, float] = {}
        self._response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._sent: list[bytes] = []
        self.outbox = Outbox()
        """Events of a stream that were not sent yet."""

    async def respond(self, http: HttpRequest, body: bytes) -> Response:
        """Start the task and return its response: once admitted for a stream, once complete otherwise."""
        if keys := http.headers.getlist("idempotency-key"):
            self._idempotency_key = ",".join(keys)
        self._service.spawn(self._run(http, body))
        try:
            response: Response | None = await unless_client_leaves(self._response, http.receive)
        except asyncio.CancelledError:
            self.client_left()
            raise
        if response is None:
            self.client_left()
        return response or Response()

    def client_left(self) -> None:
        """Note that the connection is gone. With an Idempotency-Key the answer is completed without it."""
        if not self._is_over and self._has_client:
            self._has_client = False
            self._service.metrics.disconnects.inc()
            if self._turn is not None and not self._turn.done():
                self._turn.set_result(None)
            if self._idempotency_key is None:
                self.interrupt()
                if self._streams and not self._is_admitted:  # else the task does: it must not get into the next step
                    self._service.spawn(self._cancel())

    # --- pieces, from the curator's client --------------------------------------------------------------------------

    def receive(self, at: float, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Make events of the pieces of a step; the last one waits for its cost."""
        if self._error is not None:
            return
        try:
            for answer, piece in pieces:
                self._observe(answer, at)
                self._num_open -= piece.finish_reason is not None
                if self._is_stream and self._num_open:
                    self._emit(self._reply.events(answer, piece))
            if not self._num_open:
                self._last = pieces[-1]
                self._finished.set()
        except Exception as error:
            self._error = error
            self._finished.set()

    def interrupt(self) -> None:
        """No more pieces will come, or the client does not want them."""
        if not self._finished.is_set():
            self._error = Interrupted()
            self._finished.set()

    def _emit(self, events: bytes) -> None:
        if self._ticket is not None:
            self._sent.append(events)
        self.outbox.put(events)

    # --- the task -------------------------------------------------------------------------------------------------

    async def _run(self, http: HttpRequest, body: bytes) -> None:
        try:
            await self._answer(http, body)
        finally:
            self._is_over = True
            self.outbox.close()
            if self._ticket is not None:
                self._service.repeats.end(self._ticket.id)

    async def _answer(self, http: HttpRequest, body: bytes) -> None:
        try:
            stored = await self._begin(http, body)
            if stored is not None:
                self._is_over = True
                if self._response.done():  # the stream of a repeat has begun
                    self.outbox.put(bytes(stored.body))
                self._set_response(stored)
                return
            await self._admit()
        except Exception as error:  # nothing was charged, so the idempotency key may be used again
            self._is_over = True
            await self._end_ticket(self._service.replies.abandon)
            if not isinstance(error, PaclmError | Refused):
                log_error("task failed", error)
            self._set_error(error)
            return
        self._trace = http.state.trace
        if self._trace is not None:
            self._trace.has_answer = True
        line = {"request": http.state.request_id, "key": self._caller.name, "route": route_of(http.url.path)}
        try:
            await (self._stream() if self._is_stream else self._whole())
            self._log("answered", 200, line)
        except Exception as error:
            await self._give_up()  # tokens are final from here on
            refusal = self._refusal_for(error)
            self._log("failed" if self._has_client else "disconnected", None, {**line, "code": refusal.code})
            self._fail(error, refusal)

    async def _begin(self, http: HttpRequest, body: bytes) -> Response | None:
        """Take a ticket for the Idempotency-Key, if there is one, or return the stored response."""
        key = self._idempotency_key
        if key is None:
            return None
        service, name = self._service, self._caller.name
        digest = body_digest(f"{service.promise} {http.method} {http.url.path}", body)
        while True:
            found = await look_up(service.writes, service.replies, name, key, digest)
            match found:
                case InProgress(request):
                    await self._wait_for(service.repeats.wait_for(request, name))
                case Fresh(ticket):
                    self._ticket = ticket
                    service.repeats.begin(ticket.id)
                    if self._turn is not None and self._response.done():  # its headers promise the first answer
                        raise first_failed()
                    return None
                case Stored(status, stored, media_type, headers):
                    service.metrics.replays.inc()
                    entry = telemetry.Entry(event="replayed", request=http.state.request_id, key=name, status=status)
                    telemetry.write(entry)
                    return Response(stored, status, headers | self._known() | REPLAYED, media_type=media_type)
                case _:
                    raise reply_lost()

    async def _wait_for(self, turn: asyncio.Future[None]) -> None:
        """Wait until the request under way is over, or the client leaves; a stream begins, and is kept alive."""
        self._turn = turn
        if not self._has_client:
            turn.set_result(None)
        if self._is_stream:
            await asyncio.wait({turn}, timeout=KEEP_ALIVE_SECONDS)
            if not turn.done():
                self._set_response(EventStream(self, headers=REPLAYED))
        await turn
        if not self._has_client:
            raise stopping()

    async def _admit(self) -> None:
        """Reserve quota and budget for the worst case of all answers, or refuse."""
        if self._service.state in ("draining", "stopped"):
            raise stopping()
        for grammar in dict.fromkeys(request.grammar for request in self._requests if request.grammar is not None):
            await self._service.grammars.check(grammar, self._caller.name)  # here too: nothing untried may pass
        if self._caller.key is not None:
            try:
                name = self._caller.name
                await self._service.writes.run(name, self._service.keys.reserve, name, self._max_tokens)
            except QuotaExceeded as error:
                raise quota_exhausted(error) from None
            except KeyRefused:  # revoked since it was identified
                raise unknown_key(is_needed=True) from None
        try:
            if self._error is not None:  # the client has left
                raise stopping()
            if self._is_stream:
                self._emit(self._reply.opening(len(self._requests)))
            await self._service.curator.admit(self, self._requests, into=self._streams)
        except Exception:
            await self._settle()
            raise
        self._is_admitted = True
        if self._error is None:
            self._service.num_requests[self._caller.name] += 1

    async def _whole(self) -> None:
        await self._complete()
        cost = await self._settle()
        body = self._reply.whole(self._streams, cost)
        headers = self._headers(cost)
        await self._store(body, JSON, headers)
        self._set_response(Response(body, media_type=JSON, headers=headers))

    async def _stream(self) -> None:
        """Emit events: the cost when everything is settled, [DONE] when the reply is stored."""
        headers = self._known() | (BUDGET_GONE if self._service.is_public_now else {})
        self._set_response(EventStream(self, headers=headers))
        answer, piece = await self._complete()
        cost = await self._settle()
        self._emit(self._reply.events(answer, piece, cost))
        closing = self._reply.closing(self._streams, cost)
        await self._store(b"".join([*self._sent, closing]), EVENTS, self._headers(cost))
        self.outbox.put(closing)

    async def _complete(self) -> tuple[int, Piece]:
        """Wait for all pieces; returns the last one."""
        await self._finished.wait()
        if self._error is not None:
            raise self._error
        assert self._last is not None
        return self._last

    async def _cancel(self) -> None:
        with suppress(CuratorError):  # it has stopped, and with it every stream
            await self._service.curator.cancel(self._streams)

    async def _give_up(self) -> None:
        """Cancel what still runs and count what was released."""
        await self._cancel()
        await self._settle()
        await self._end_ticket(self._service.replies.lose if self._has_started else self._service.replies.abandon)

    # --- parts ----------------------------------------------------------------------------------------------------

    @property
    def _has_started(self) -> bool:
        return any(stream.has_started for stream in self._streams)

    @property
    def _max_tokens(self) -> int:
        return sum(request.max_new_tokens for request in self._requests)

    async def _settle(self) -> Figures:
        """Count what the key used, once, and return the cost as the caller may see it."""
        cost = self._service.cost_of(self._streams, is_admin=self._caller.is_admin)
        if self._caller.key is not None and not self._is_settled:
            self._is_settled = True
            settle = partial(self._service.keys.settle, self._caller.name, reserved=self._max_tokens)
            used = sum(stream.num_private + stream.num_unknown for stream in self._streams)
            await self._service.record(partial(settle, used=used), self._caller.name)
        return cost

    def _known(self) -> dict[str, str]:
        """What holds now, whatever this answer costs. A bound that was weakened since holds for a stored reply too."""
        return headers_of(self._service.cost_of((), is_admin=self._caller.is_admin), is_complete=False)

    def _headers(self, cost: Figures) -> dict[str, str]:
        """Of a whole answer."""
        is_public = any(stream.num_public for stream in self._streams)
        return headers_of(cost) | (BUDGET_GONE if is_public else {})

    async def _store(self, body: bytes, media_type: str, headers: dict[str, str]) -> None:
        reply = Stored(200, body, media_type, headers)
        await self._end_ticket(partial(self._service.replies.finish, reply=reply))

    async def _end_ticket(self, end: Callable[..., None]) -> None:
        if self._ticket is not None:
            await self._service.record(partial(end, self._ticket), self._caller.name)

    def _set_response(self, response: Response) -> None:
        if not self._response.done():
            self._response.set_result(response)

    def _set_error(self, error: Exception) -> None:
        if self._has_client and not self._response.done():
            self._response.set_exception(error)
        elif self._has_client and self._turn is not None:  # the stream of a repeat has begun
            refusal = error if isinstance(error, Refused) else database_unavailable()
            self.outbox.put(self._reply.failure(refusal))

    def _refusal_for(self, error: Exception) -> Refused:
        if isinstance(error, Interrupted):
            return cut_off() if self._has_started else stopping()
        log_error("task failed", error)
        return internal_error()

    def _fail(self, error: Exception, refusal: Refused) -> None:
        """Tell the client that the answer broke off: an error event in a stream, an error response otherwise."""
        if not self._is_stream:
            self._set_error(refusal)
            return
        if self._has_client and isinstance(error, Interrupted):
            self.outbox.put(self._reply.held_back(self._streams))
        self.outbox.put(self._reply.failure(refusal))

    def _observe(self, answer: int, at: float) -> None:
        before = self._last_token.get(answer)
        self._last_token[answer] = at
        if before is not None:
            self._service.metrics.between_tokens_seconds.observe(at - before)
        elif self._first_token_seconds is None:
            self._first_token_seconds = at - self._started
            self._service.metrics.first_token_seconds.observe(self._first_token_seconds)

    def _log(self, what: telemetry.EventName, status: int | None, line: dict[str, Any]) -> None:
        entry = telemetry.Entry(
            event=what,
            status=status,
            prompt_tokens=sum(len(request.prompt) for request in self._requests),
            private_tokens=sum(stream.num_private for stream in self._streams),
            public_tokens=sum(stream.num_public for stream in self._streams),
            charged_nats=self._service.cost_of(self._streams, is_admin=True).get("charged_nats"),
            first_token_seconds=self._first_token_seconds,
            seconds=time.perf_counter() - self._started,
            **line,
        )
        telemetry.write(entry)
        if self._trace is not None:
            self._trace.answered(entry, [stream.finish_reason for stream in self._streams])
