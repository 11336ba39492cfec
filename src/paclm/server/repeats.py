"""Repeats of a request that is under way, by its Idempotency-Key: they wait for its answer and are not charged.

A repeat that is woken looks into the database again: it gets what it would get if it were sent now, the stored reply, a
turn of its own (the first was refused and nothing was charged) or a refusal. Waiting takes a connection and no thread.
Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from paclm.errors import InvalidInput, RepliesFull, ReplyConflict
from paclm.server.idempotency import Found, Replies
from paclm.server.refusals import NO_RETRY, Refused, invalid
from paclm.server.workers import Writer

MOST_WAITING = 64
"""Repeats of one API key that wait at a time."""


class Repeats:
    """Requests with an Idempotency-Key that this process answers, and who waits for them. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}
        self._num_waiting: Counter[str] = Counter()

    def begin(self, request: bytes) -> None:
        """A request is under way; `end` must follow."""
        self._waiting.setdefault(request, set())  # it was under way before if its API key was revoked meanwhile

    def end(self, request: bytes) -> None:
        """It is over, and the database says how: wake all that wait for it."""
        for waiting in self._waiting.pop(request, ()):
            if not waiting.done():
                waiting.set_result(None)

    def wait_for(self, request: bytes, owner: str) -> asyncio.Future[None]:
        """Done when the request is over. A repeat that leaves sets the result itself."""
        waiting = self._waiting.get(request)
        if waiting is None or self._num_waiting[owner] >= MOST_WAITING:  # None: its end could not be written yet
            headers = {"retry-after": "1", "x-should-retry": "true"}
            raise _conflict("The first request with this key is in progress.", "idempotency_in_progress", headers)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.add(turn)
        self._num_waiting[owner] += 1
        turn.add_done_callback(partial(self._left, waiting, owner))
        return turn

    def _left(self, waiting: set[asyncio.Future[None]], owner: str, turn: asyncio.Future[None]) -> None:
        waiting.discard(turn)
        self._num_waiting[owner] -= 1
        if not self._num_waiting[owner]:
            del self._num_waiting[owner]


async def look_up(writes: Writer, replies: Replies, owner: str, key: str, digest: bytes) -> Found:
    """What the database knows of an Idempotency-Key, or a refusal."""
    try:
        return await writes.run(owner, replies.begin, owner, key, digest)
    except InvalidInput as error:
        raise invalid(str(error), code="invalid_idempotency_key") from None
    except ReplyConflict as error:
        raise _conflict(str(error), "idempotency_key_reused", NO_RETRY) from None
    except RepliesFull as error:
        headers = {"retry-after": "60"}
        raise Refused(503, str(error), code="replies_full", headers=headers, reason="idempotency") from None


def reply_lost() -> Refused:
    """It was charged, or may have been, and cannot be repeated."""
    return _conflict(
        "A request with this key was charged, or may have been, and its text is lost. Send a new Idempotency-Key; the "
        "request is then charged again.",
        "idempotency_reply_lost",
        NO_RETRY,
    )


def first_failed() -> Refused:
    """For a repeat that has been told that it gets the first answer."""
    return _conflict(
        "The first request with this key ended without an answer, and nothing was charged. Send it again.",
        "idempotency_first_failed",
        {},
    )


def _conflict(message: str, code: str, headers: dict[str, str]) -> Refused:
    return Refused(409, message, code=code, headers=headers, reason="idempotency")
