"""What the two processes of a server tell each other: plain JSON with a length in front, over a socket pair.

    front ──► curator   Ready, Admit, Cancel, Query, Stop
    curator ──► front   hello, then replies and refusals by the number of the call; after every step all its pieces in
                        one `step`; `workers`, how many are waited for, when one is lost or back; at the end `ended`
                        (streams that will not finish) and `stopped`

The front is the less trusted side. The curator checks the form of its messages here and their values in
`curator.streams.Request`; a wrong form ends the server, a wrong value is refused. Knows no HTTP and no secret.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from paclm.config import PromiseName, ServerConfig
from paclm.curator.streams import BudgetFigures
from paclm.errors import ServiceError

MAX_BYTES = 2**26
"""Of one message. The longest is a request of many answers with long prompts."""
_READ_BYTES = 2**18
_BYTES_AT_A_TIME = 2**22
"""Read between two steps at most: a flood of messages must not keep the streams waiting."""
_SEND_SECONDS = 60.0
"""The front always reads. While its side is full the curator waits and steps no further, so that no token is lost."""

Served = PromiseName | Literal["student"]
"""What a server speaks of: a promise whose terms it keeps, or the claims of a student."""
Topic = Literal["figures", "usage", "leak"]
Reason = Literal["queue_full", "budget_exhausted", "budget_reserved", "stopping", "invalid", "failed"]
"""Why the curator refused a call: each has an HTTP response in `server.refusals`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the front is started with; part of the hello."""

    model_id: str
    settings: ServerConfig = field(default_factory=ServerConfig)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    """[runtime], to be shown."""
    is_loopback: bool = True
    """Only this machine can reach it."""
    unit: str = "a record was"
    """What the guarantee is about, as the sentence continues: a record, or the records of a group."""
    created: int = 0
    """When the model was made, in seconds since 1970."""


class BrokenLink(ServiceError):
    """The other process has ended, does not read, or sends what it never should."""


class RefusedCall(Exception):
    """A call of the front that is refused; nothing was charged."""

    def __init__(self, reason: Reason, *figures: int) -> None:
        super().__init__(reason)
        self.reason, self.figures = reason, figures


class Wanted(NamedTuple):
    """One answer of an `Admit`. Its values are checked by `curator.streams.Request`."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    stop: list[str]
    coins_seed: int | None
    num_logprobs: int | None
    grammar: str | None


class Ready(NamedTuple):
    """The front listens."""


class Admit(NamedTuple):
    """Reserve the worst case of these answers, all or none, and queue them."""

    call: int
    owner: str
    """Name of the API key: whose turn it is, and whose charge."""
    first: int
    """Number of the first stream; the others follow. Numbers only grow."""
    wanted: list[Wanted]


class Cancel(NamedTuple):
    """End these streams before the next step; after the reply their tokens are final."""

    call: int
    streams: list[int]


class Query(NamedTuple):
    """Figures between two steps."""

    call: int
    topic: Topic


class Stop(NamedTuple):
    """Stop after the current step."""

    call: int


FrontMessage = Ready | Admit | Cancel | Query | Stop


class DecoderState(TypedDict):
    """After the last step; each promise adds its own."""

    running: int
    waiting: int


class CoarseFigures(BudgetFigures):
    """What callers without the admin key see of the budget; see `scheduler.CoarseBudget`."""

    as_of: str


class BudgetState(BudgetFigures):
    """The budget after the last commit, with what the operator's pages need."""

    coarse: CoarseFigures
    tokens: int
    dissent_tokens: int
    charged_tokens: int
    total_units: int
    remaining_units: int
    reserved_units: int
    """The worst case of running and waiting streams."""


class CuratorState(BudgetState, DecoderState):
    """Of the promise `half`."""


def pack(message: object) -> bytes:
    """One message as it is sent."""
    content = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(content) > MAX_BYTES:
        raise BrokenLink(f"A message of {len(content):,} bytes is too long.")
    return len(content).to_bytes(4, "big") + content


class Unpacker:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete now, as JSON values."""
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if end > MAX_BYTES + 4:
                raise BrokenLink("A message of the other process is too long.")
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[4:end])
            del self._buffer[:end]
            try:
                yield json.loads(content)
            except (ValueError, RecursionError):
                raise BrokenLink("A message of the other process is not JSON.") from None


class Link:
    """The curator's end of the pair: blocking, for one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unpacker = Unpacker()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        end.settimeout(_SEND_SECONDS)

    def end_receiving(self) -> None:
        """From another thread: `receive`, also one that waits, raises `BrokenLink` from now on; `send` still works."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)

    def send(self, *message: object) -> None:
        """Hand over one message, whole."""
        try:
            self._end.sendall(pack(message))
        except TimeoutError:
            raise BrokenLink(f"The front has taken no message for {_SEND_SECONDS:.0f} s.") from None
        except OSError:
            raise BrokenLink("The front has ended.") from None

    def receive(self, *, wait: bool, seconds: float | None = None) -> Iterator[Any]:
        """The messages that have arrived; with `wait` it waits until something has, or for so long."""
        num_bytes, most = 0, None if seconds is None else 1000 * seconds
        while num_bytes < _BYTES_AT_A_TIME and self._poll.poll(most if wait and not num_bytes else 0):
            try:
                data = self._end.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise BrokenLink("The front has ended.")
            num_bytes += len(data)
            yield from self._unpacker.feed(data)


def read(message: Any) -> FrontMessage:
    """Check the form of a message from the front."""
    match message:
        case ["ready"]:
            return Ready()
        case ["admit", int(call), str(owner), int(first), [_, *_] as rows] if all(map(_is_wanted, rows)):
            return Admit(call, owner, first, [Wanted(*row) for row in rows])
        case ["cancel", int(call), [*streams]] if all(type(stream) is int for stream in streams):
            return Cancel(call, streams)
        case ["query", int(call), topic] if topic in get_args(Topic):
            return Query(call, topic)
        case ["stop", int(call)]:
            return Stop(call)
    raise BrokenLink("The front sent a message that is none of its kinds.")


def _is_wanted(row: Any) -> bool:
    match row:
        case [list(), int(), int() | float(), list(), int() | None, int() | None, str() | None]:
            return True
    return False
