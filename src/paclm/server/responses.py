"""From an admitted job to bytes on the wire, whole or as a stream, and what happens when the client leaves.

Without an Idempotency-Key a client that leaves frees its place at once; what was released stays charged. With one the
answer is brought to its end and kept, because the client that lost its connection will ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from paclm.errors import InvalidInput, RepliesFull, ReplyConflict
from paclm.server import logs
from paclm.server.idempotency import Fresh, InProgress, Stored, Ticket, body_digest
from paclm.server.jobs import Caller, Interrupted, Job
from paclm.server.middleware import route_of, unforeseen
from paclm.server.openai_format import Figures, Reply, cost_of, event
from paclm.server.refusals import NO_RETRY, Refused, cut_off, invalid
from paclm.server.scheduler import Token
from paclm.server.service import Service

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
BUDGET_GONE = {"paclm-budget": "exhausted"}
"""A header of answers by the public model."""
_KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": waiting\n\n"


class Production:
    """Makes the bytes of one answer, as a task of the service: it ends properly whatever the client does."""

    def __init__(self, service: Service, job: Job, reply: Reply, ticket: Ticket | None, request: Request) -> None:
        self._service = service
        self._job = job
        self._reply = reply
        self._ticket = ticket
        self._line = {"request": request.state.request_id, "key": job.caller.name, "route": route_of(request.url.path)}
        self._last: dict[int, float] = {}
        self._has_client = True
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Of a stream; None is the end."""

    async def whole(self) -> bytes:
        """The answer in one piece."""
        try:
            async for token in self._job.tokens():
                self._observe(token)
            body = self._reply.whole(self._job, await self._count())
            await self._keep(body, JSON)
        except Interrupted:
            await self._give_up()
            raise cut_off() from None
        except Exception:  # whatever it is must not leave anything held
            await self._give_up()
            raise
        self._log("answered", 200)
        return body

    async def stream(self) -> None:
        """The answer as events. The last ones come when everything is counted and kept."""
        sent: list[bytes] = []

        def emit(chunk: bytes) -> None:
            if self._ticket is not None:
                sent.append(chunk)
            self.chunks.put_nowait(chunk)

        try:
            for chunk in self._reply.opening(self._job):
                emit(chunk)
            async for token in self._job.tokens():
                self._observe(token)
                cost = await self._count() if self._job.is_complete else None
                for chunk in self._reply.events(token, cost):
                    emit(chunk)
            closing = self._reply.closing(self._job, await self._count())
            await self._keep(b"".join([*sent, closing]), EVENTS)
            self._log("answered", 200)
            self.chunks.put_nowait(closing)
        except Interrupted:
            await self._give_up()  # from here on nothing is added to the answers
            for chunk in self._reply.rest(self._job) if self._has_client else ():
                self.chunks.put_nowait(chunk)
            self.chunks.put_nowait(event(cut_off().body()))
        except Exception:  # whatever it is must not leave anything held, nor a stream that ends as if it were whole
            await self._give_up()
            self.chunks.put_nowait(event(unforeseen().body()))
            raise
        finally:
            self.chunks.put_nowait(None)

    @property
    def has_public_tokens(self) -> bool:
        """Whether the budget was gone before the answer was complete."""
        return self._job.public_tokens > 0

    async def _count(self) -> Figures:
        """Settle what the key used; from then on the cost is known."""
        await self._service.end(self._job)
        return cost_of(self._job, self._service.curator.figures())

    def client_left(self) -> None:
        """The connection is gone."""
        if not self._job.is_complete:
            self._has_client = False
            self._service.metrics.count_disconnect()
            if self._ticket is None:
                self._job.interrupt()

    async def _give_up(self) -> None:
        await self._service.end(self._job)
        if self._ticket is not None:
            await self._service.book(partial(self._service.replies.lose, self._ticket))
        self._log("failed" if self._has_client else "disconnected", None)

    async def _keep(self, body: bytes, media_type: str) -> None:
        if self._ticket is not None:
            keep = self._service.replies.finish
            await self._service.book(partial(keep, self._ticket, status=200, body=body, media_type=media_type))

    def _observe(self, token: Token) -> None:
        before = self._last.get(token.answer)
        self._last[token.answer] = token.at
        if before is not None:
            self._service.metrics.observe_between_tokens(token.at - before)
        elif len(self._last) == 1 and self._job.first_token_seconds is not None:
            self._service.metrics.observe_first_token(self._job.first_token_seconds)

    def _log(self, what: logs.EventName, status: int | None) -> None:
        job = self._job
        logs.write(
            logs.Entry(
                event=what,
                status=status,
                prompt_tokens=job.prompt_tokens(1),
                private_tokens=job.private_tokens,
                public_tokens=job.public_tokens,
                charged_nats=job.charged_nats,
                first_token_seconds=job.first_token_seconds,
                seconds=job.seconds,
                **self._line,
            )
        )


class EventStream(Response):
    """Sends what a production makes; the connection's end is noticed at once, not at the next token."""

    def __init__(self, service: Service, production: Production) -> None:
        super().__init__(media_type=EVENTS, headers=BUDGET_GONE if service.is_public_now else None)
        del self.headers["content-length"]
        self._production = production
        service.spawn(production.stream())  # from here on it comes to its end, whether or not anybody is sent to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        try:
            await unless_client_leaves(self._send_all(send), receive)
        finally:
            self._production.client_left()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while (chunk := await self._next_chunk()) is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next_chunk(self) -> bytes | None:
        try:
            return await asyncio.wait_for(self._production.chunks.get(), _KEEP_ALIVE_SECONDS)
        except TimeoutError:
            return _KEEP_ALIVE


async def send_whole(service: Service, production: Production, request: Request) -> Response:
    """The answer in one piece, as a response."""
    task = service.spawn(production.whole())
    try:
        body = await unless_client_leaves(asyncio.shield(task), request.receive)
    finally:
        production.client_left()
    return Response(body or b"", media_type=JSON, headers=BUDGET_GONE if production.has_public_tokens else None)


async def unless_client_leaves(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of the work, or None once the connection is gone."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_end(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def begin_once(
    service: Service, caller: Caller, request: Request, body: bytes
) -> tuple[Ticket | None, Response | None]:
    """By the Idempotency-Key: a ticket for a new request, or the reply that was given before."""
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None, None
    digest = body_digest(f"{request.method} {request.url.path}", body)
    try:
        answer = await asyncio.to_thread(service.replies.begin, caller.name, ",".join(keys), digest)
    except InvalidInput as error:
        raise invalid(str(error), code="invalid_idempotency_key") from None
    except ReplyConflict as error:
        raise _conflict(str(error), "idempotency_key_reused", NO_RETRY) from None
    except RepliesFull as error:
        raise Refused(
            503, str(error), code="replies_full", headers={"retry-after": "60"}, reason="idempotency"
        ) from None
    match answer:
        case Fresh(ticket):
            return ticket, None
        case Stored(status, stored, media_type):
            service.metrics.count_replay()
            logs.write(logs.Entry(event="replayed", request=request.state.request_id, key=caller.name, status=status))
            headers = {"idempotent-replayed": "true"}
            return None, Response(stored, status, headers, media_type=media_type)
        case InProgress():
            headers = {"retry-after": "1", "x-should-retry": "true"}
            raise _conflict("The first request with this key is under way.", "idempotency_in_progress", headers)
        case _:
            raise _conflict(
                "A request with this key was charged, or may have been, and its text is gone. Send a new "
                "Idempotency-Key; the request is then charged again.",
                "idempotency_reply_lost",
                NO_RETRY,
            )


def _conflict(message: str, code: str, headers: dict[str, str]) -> Refused:
    return Refused(409, message, code=code, headers=headers, reason="idempotency")
