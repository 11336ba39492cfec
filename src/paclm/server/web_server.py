"""uvicorn with limits: how many connections there are, how long one may be silent, and a stop that waits for answers.

uvicorn itself waits without limit for a request that never comes and for a reader that never reads, and each connection
takes a file descriptor. Connections that take all descriptors of the process would fail the ledger's next commit.

Where a place is needed, the connection that has waited longest for its client is closed: for a request, for the rest of
a body, or for a reader. One address holds at most seven eighths of the places; while all of those are at work, it gets
more only for `/health` and for callers with keys.

Here is also how an answer in events is sent: a client that leaves is noticed at once, not at the next token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from paclm.config import ServerConfig
from paclm.server.refusals import too_many_connections
from paclm.server.service import Service

EVENTS = "text/event-stream; charset=utf-8"
KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": waiting\n\n"
_FLUSH_SECONDS = 3
"""To send what is ready once every answer is complete or cut off; then uvicorn closes the connections."""
_LINGER_SECONDS = 1.0
"""A client reads its refusal only if its request was read before the connection closes."""
_MOST_LINGERING = 32
"""Refused connections that may wait for that; more are closed without a word."""
_KEPT_SHARE = 8
"""One place in so many is kept from the address that holds all others."""
_ACCEPTED_TOGETHER = 16
"""In one round of the event loop: a flood of connections must not hold up what is under way."""
_BACKLOG = 512
"""Connections that wait to be accepted."""
_ROUNDS_TO_SPEAK = 3
"""Of the event loop: by then it has read what a client had sent when the connection was made."""


class LimitedProtocol(H11Protocol):
    """One connection; `limited` sets the limits."""

    most: int
    """Connections at a time."""
    seconds: float
    """How long request headers may take to arrive, and a reader to accept what is sent."""

    address: str
    is_refused = False
    waits_since = 0.0
    """When it last began to wait for its client."""
    _is_new = True
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept it, or refuse it if there are too many and all are at work."""
        super().connection_made(transport)
        self.address = _address(self.client)
        self._count_down(_ROUNDS_TO_SPEAK)
        if self._find_place():
            self._expect_request()
            return
        self.is_refused = True
        if len(self.connections) > self.most + _MOST_LINGERING:
            transport.abort()
        else:
            transport.write(_REFUSAL)
            self._head = self.loop.call_later(_LINGER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; a refused connection closes after its first bytes."""
        if self.is_refused:
            self.transport.close()
            return
        super().data_received(data)
        if not self._is_between_requests:
            _cancel(self._head)

    def on_response_complete(self) -> None:
        """Start the timer for the next request."""
        super().on_response_complete()
        if self._is_between_requests:
            self._expect_request()

    def pause_writing(self) -> None:
        """The reader does not keep up."""
        super().pause_writing()
        self.waits_since = self.loop.time()
        _cancel(self._stall)
        self._stall = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        _cancel(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._stall)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_open(self) -> bool:
        """Whether it takes a place."""
        return not (self.is_refused or self.transport.is_closing())

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its client, to send a whole request or to read, and not its client for an answer."""
        is_waiting = self._is_between_requests or self.cycle.more_body or self.flow.write_paused
        return is_waiting and not self._is_new

    def _count_down(self, rounds: int) -> None:
        self._is_new = rounds > 0
        if self._is_new:
            self.loop.call_soon(self._count_down, rounds - 1)

    def _find_place(self) -> bool:
        """Whether there is a place; one that waits for its client makes room."""
        others = [c for c in self.connections if isinstance(c, LimitedProtocol) and c is not self and c.is_open]
        own = [other for other in others if other.address == self.address]
        is_full, is_over_share = len(others) >= self.most, len(own) >= self.most - self.most // _KEPT_SHARE
        if not (is_full or is_over_share):
            return True
        waiting = [other for other in (own if is_over_share else others) if other.is_waiting]
        if not waiting:
            self.app_state = {**self.app_state, "is_kept_place": True}
            return not is_full
        num_of = Counter(other.address for other in waiting)
        last = min(waiting, key=lambda other: (-num_of[other.address], other.cycle is not None, other.waits_since))
        last.transport.abort()
        return True

    def _expect_request(self) -> None:
        self.waits_since = self.loop.time()
        _cancel(self._head)
        self._head = self.loop.call_later(self.seconds, self.transport.abort)


class Outbox:
    """Bytes on their way to a client. The sender is woken once, however many were put in."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._is_closed = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> None:
        """Add bytes, possibly none."""
        if chunk:
            self._chunks.append(chunk)
            self._wake()

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        self._wake()

    async def get(self) -> bytes:
        """All there is, once there is something; nothing at the end."""
        if not self._chunks and not self._is_closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        chunks, self._chunks = self._chunks, []
        return b"".join(chunks)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Streamed(Protocol):
    """An answer in events."""

    outbox: Outbox

    def client_left(self) -> None:
        """The connection is gone."""


class EventStream(Response):
    """Sends the events of an answer; a disconnect is noticed immediately, not at the next token."""

    def __init__(self, answer: Streamed, headers: dict[str, str]) -> None:
        super().__init__(media_type=EVENTS, headers=headers)
        del self.headers["content-length"]
        self._answer = answer
        self._is_silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        sending = asyncio.ensure_future(self._send_all(send))
        keeping_alive = asyncio.ensure_future(self._keep_alive())
        try:
            await unless_client_leaves(sending, receive)
        finally:
            keeping_alive.cancel()
            self._answer.client_left()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while chunk := await self._answer.outbox.get():
            self._is_silent = False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._is_silent:
                self._answer.outbox.put(_KEEP_ALIVE)


async def unless_client_leaves(work: asyncio.Future[Any], receive: Receive) -> Any:
    """The result of the work, or None once the connection is gone; the work is then cancelled."""
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        watching.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WebServer(uvicorn.Server):
    """Refuses new requests after a stop signal, and keeps the port open (`/health`) while answers are in progress."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        service.on_failure = self._stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # asyncio has set it to the number that it accepts together

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop."""
        self._service.drain()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end. uvicorn closes the port when it ends, so answers in progress are waited for here."""
        is_stopping = await super().on_tick(counter)
        return is_stopping and (self.force_exit or self._service.is_idle)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike the original, does not raise the signal again: the process still has to finish its accounting."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self.should_exit = True


def web_server(app: ASGIApp, service: Service, settings: ServerConfig) -> WebServer:
    """uvicorn over the app, without access log and without trust in proxy headers."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=limited(settings.max_connections, settings.read_seconds),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        backlog=_ACCEPTED_TOGETHER,
    )
    return WebServer(config, service)


def limited(most: int, seconds: float) -> type[LimitedProtocol]:
    """The connection class with these limits."""
    return type("Connection", (LimitedProtocol,), {"most": most, "seconds": seconds})


def _address(client: tuple[str, int] | None) -> str:
    """Whose places a connection takes: an address, or the 64 bits of an IPv6 address that name a network."""
    host = client[0] if client else ""
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False)) if ":" in host else host


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _refusal_bytes() -> bytes:
    refusal = too_many_connections()
    body = json.dumps(refusal.body()).encode()
    headers = {**refusal.headers, "content-type": "application/json", "content-length": str(len(body))}
    lines = [f"HTTP/1.1 {refusal.status} Service Unavailable", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


_REFUSAL = _refusal_bytes()
