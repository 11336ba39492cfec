"""Limits of connections, before anybody has said who they are: how many there are, and how long one may be silent.

uvicorn waits for ever for a request that never comes and for a reader that never reads, and every connection costs a
file. Whoever takes all files of the process also takes those that the ledger needs: the next commit fails, and the
server ends. Knows no request.
"""

from __future__ import annotations

import asyncio
import json
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

from paclm.errors import ServiceError
from paclm.server.refusals import too_many_connections

_OTHER_FILES = 128
"""Ledger, witness, service books, models, and some to spare."""
_LINGER_SECONDS = 1.0
"""A client reads its refusal only if its request is taken from the wire before the connection ends."""


class Connection(H11Protocol):
    """One connection; `limited` makes the class that a server uses."""

    most: int
    """Connections at a time."""
    seconds: float
    """How long the head of a request may take to arrive, and a reader to take what waits for it."""

    _is_refused = False
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or say that there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._is_refused = True
            transport.write(_REFUSAL)
            self._head = self.loop.call_later(_LINGER_SECONDS, transport.abort)
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the first ones of a refused connection are its last."""
        if self._is_refused:
            self.transport.close()
            return
        super().data_received(data)
        if not self._is_between_requests:
            _cancel(self._head)

    def on_response_complete(self) -> None:
        """The next request may come, and may not take longer than the first."""
        super().on_response_complete()
        if self._is_between_requests:
            self._expect_request()

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        _cancel(self._stall)
        self._stall = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        _cancel(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        _cancel(self._head)
        _cancel(self._stall)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        _cancel(self._head)
        self._head = self.loop.call_later(self.seconds, self.transport.abort)


def limited(most: int, seconds: float) -> type[Connection]:
    """The class of a server's connections."""
    return type("LimitedConnection", (Connection,), {"most": most, "seconds": seconds})


def allow_files(connections: int) -> None:
    """Let this process open so many connections and still have files for its own work, or refuse to start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ServiceError(
            f"This process may open {hard:,} files, and max_connections = {connections:,} in [server] needs "
            f"{needed:,}. Raise the limit (ulimit -n), or lower max_connections."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
