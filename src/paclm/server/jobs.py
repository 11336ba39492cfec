"""One HTTP request while it is answered: its streams, what its key has on hold, and the count when it ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from paclm.curator.streams import Stream
from paclm.errors import CuratorError
from paclm.privacy.accounting import nats_up
from paclm.server.api_keys import LOCAL, KeyInfo, KeyStore
from paclm.server.scheduler import Audience, Stepper, Token


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of an API key, or `local`."""

    name: str
    is_admin: bool
    key: KeyInfo | None
    """None for `local`, which has no quota."""

    @classmethod
    def local(cls) -> Caller:
        """Somebody on this machine, where no key is needed."""
        return cls(LOCAL, False, None)


Book = Callable[[Callable[[], None]], Awaitable[None]]
"""Brings something into the service's books, now or as soon as they answer."""


class Interrupted(Exception):
    """The answers ended before they were complete: the client left, or the server stops."""


class Job:
    """The answers to one request."""

    def __init__(
        self, caller: Caller, streams: Sequence[Stream], audience: Audience, *, reserved: int, started: float
    ) -> None:
        self.caller = caller
        self.streams = streams
        """In the order of the requests: all answers to the first prompt, then those to the second."""
        self.started = started
        self.first_token_seconds: float | None = None
        self.seconds: float | None = None
        self._audience = audience
        self._reserved = reserved
        self._num_open = len(streams)
        self._is_ended = False

    async def tokens(self) -> AsyncIterator[Token]:
        """Tokens of all answers as they come, to the last."""
        while self._num_open:
            token = await self._audience.tokens.get()
            if token is None:
                raise Interrupted
            if self.first_token_seconds is None:
                self.first_token_seconds = token.at - self.started
            self._num_open -= token.finish_reason is not None
            yield token

    def interrupt(self) -> None:
        """Nobody wants the rest."""
        self._audience.tokens.put_nowait(None)

    async def end(self, stepper: Stepper, keys: KeyStore, book: Book) -> None:
        """Stop what still runs and count what was used; a second call does nothing."""
        if self._is_ended:
            return
        self._is_ended = True
        self.seconds = time.perf_counter() - self.started
        if not self.is_complete:  # a whole answer is final: it need not wait for the step that others are in
            with suppress(CuratorError):  # it has stopped, and with it every stream
                await stepper.cancel(self.streams)
        if self.caller.key is not None:
            await book(partial(keys.settle, self.caller.name, reserved=self._reserved, used=self.private_tokens))

    @property
    def is_complete(self) -> bool:
        """Whether every answer has reached its end."""
        return self._num_open == 0

    @property
    def private_tokens(self) -> int:
        """Tokens released from votes."""
        return self.num_tokens - self.public_tokens

    @property
    def public_tokens(self) -> int:
        """Tokens of the public model alone."""
        return sum(stream.marks.count("public") for stream in self.streams)

    @property
    def num_tokens(self) -> int:
        """All that left."""
        return sum(len(stream.tokens) for stream in self.streams)

    def prompt_tokens(self, answers_each: int) -> int:
        """Tokens of the prompts, each counted once however many answers it has."""
        return sum(len(stream.request.prompt) for stream in self.streams[::answers_each])

    @property
    def charged_nats(self) -> float:
        """What it cost."""
        return nats_up(sum(stream.charged_units for stream in self.streams))
