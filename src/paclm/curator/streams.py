"""Requests and their answers while they grow. Knows no secret and no belief: a stream sees tokens that have left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self, TypedDict

from paclm.curator.text import TextStream, Tokenizer
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins

Mark = Literal["agreed", "disputed", "public"]
"""All worlds voted alike; they differed; or the budget was gone and the public model answered."""
FinishReason = Literal["stop", "length", "cancelled"]

_LONGEST_TAG = 200


class Options(TypedDict, total=False):
    """What a request may say beside its prompt and length; see `Curator.request`."""

    temperature: float | None
    greedy: bool | None
    stop: str | Sequence[str]
    coins_seed: int | None
    tag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answer that is asked for."""

    prompt: tuple[int, ...] = field(repr=False)
    max_new_tokens: int
    temperature: float
    """τ of the coupled Gumbel votes; 0 is greedy."""
    stop: tuple[str, ...] = field(default=(), repr=False)
    coins_seed: int | None = None
    """Sets the public coins, never the noise."""
    tag: str = ""
    """Whose charge it is in the ledger's figures."""

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be a whole number of at least 1, not {self.max_new_tokens!r}.")
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidInput(f"temperature must be a number of at least 0, not {self.temperature!r}.")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InvalidInput("A stop string must be a text of at least one character.")
        _check_tag(self.tag)


def _check_tag(tag: object) -> None:
    """The ledger writes it as UTF-8, in the middle of a step: what cannot be written must not get there."""
    if not isinstance(tag, str):
        raise InvalidInput(f"A tag must be a text, not {type(tag).__name__}.")
    if len(tag) > _LONGEST_TAG:
        raise InvalidInput(f"A tag has at most {_LONGEST_TAG} characters, not {len(tag)}.")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"The tag {tag!r} has characters that cannot be written as UTF-8. Leave them out.") from None


class Piece(NamedTuple):
    """One token that has left, and the text that may be shown by now; often that of an earlier token."""

    token: int
    text: str
    mark: Mark
    """How the worlds voted."""


class Arrival(NamedTuple):
    """A token that has been paid for, its text worked out, before anybody sees it."""

    piece: Piece
    units: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished answer, what it cost, and where the budget stands."""

    text: str
    """Without a stop string that ended it."""
    tokens: tuple[int, ...]
    """Every token that left, the end token included."""
    marks: tuple[Mark, ...]
    """One per token."""
    finish_reason: FinishReason
    """Why it ended; `stop` is the end token or a stop string."""
    private_tokens: int
    """Released from votes."""
    public_tokens: int
    """Of the public model alone, once the budget was gone."""
    charged_nats: float
    """For this answer."""
    spent_nats: float
    """So far, by everyone; never a guarantee."""
    total_nats: float
    """Committed."""
    remaining_tokens: int
    """At the price of one that is disputed."""
    mia_bound: float
    """At the committed total: no attack on whether a record was in the secretly drawn half succeeds more often."""
    world_id_bound: float
    """At the committed total: no attack on the realized world succeeds more often."""


class Stream:
    """One answer while it grows."""

    def __init__(self, request: Request, tokenizer: Tokenizer, worst_units: int) -> None:
        self.request = request
        self.coins = Coins(request.coins_seed)
        self.handle: int | None = None
        """In the engine; None while waiting for a place."""
        self.worst_units = worst_units
        """What one more token can cost at most, held free for it in advance; 0 where nothing is reserved."""
        self.charged_units = 0
        self.tokens: list[int] = []
        self.marks: list[Mark] = []
        self.finish_reason: FinishReason | None = None
        self._end = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, request.prompt, request.stop)
        self._said: list[str] = []
        self._ready: deque[Piece] = deque()

    @property
    def reserved_units(self) -> int:
        """The worst case of what is still to come."""
        left = 0 if self.finish_reason else self.request.max_new_tokens - len(self.tokens)
        return left * self.worst_units

    @property
    def text(self) -> str:
        """What may be shown so far."""
        return "".join(self._said)

    def rest(self) -> str:
        """Text of tokens that have left which is held back. From those tokens alone: one that was read may not have."""
        return TextStream.rest(self._tokenizer, self.request.prompt, self.request.stop, self.tokens)

    def read(self, token: int, mark: Mark, units: int) -> Arrival:
        """Work out the text of a token, and from public values whether it is the last. Shows nothing yet."""
        said = self._text.push(token)
        finish_reason: FinishReason | None = None
        if token == self._end or self._text.is_stopped:
            finish_reason = "stop"
        elif len(self.tokens) + 1 == self.request.max_new_tokens:
            finish_reason = "length"
        if finish_reason:
            said += self._text.finish()
        return Arrival(Piece(token, said, mark), units, finish_reason)

    def accept(self, arrival: Arrival) -> None:
        """Let a token be seen. The reason comes last: whoever finds one also finds every piece before it."""
        self.tokens.append(arrival.piece.token)
        self.marks.append(arrival.piece.mark)
        self.charged_units += arrival.units
        self._said.append(arrival.piece.text)
        self._ready.append(arrival.piece)
        self.finish_reason = arrival.finish_reason

    def take(self) -> list[Piece]:
        """The pieces that have come since the last call."""
        pieces: list[Piece] = []
        while (piece := self.take_one()) is not None:
            pieces.append(piece)
        return pieces

    def take_one(self) -> Piece | None:
        """The oldest piece that was not taken yet."""
        with suppress(IndexError):
            return self._ready.popleft()
        return None

    def __repr__(self) -> str:
        return f"<Stream {len(self.tokens)}/{self.request.max_new_tokens} tokens, {self.finish_reason or 'running'}>"


class Pieces:
    """The pieces of one stream, in order: an iterator that asks for steps when nothing is ready.

    Closing it ends the stream, whether or not a piece was ever asked for; so does losing it.
    """

    def __init__(self, stream: Stream, step: Callable[[], object], cancel: Callable[[Stream, bool], None]) -> None:
        self._stream = stream
        self._step = step
        self._cancel = cancel
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while not self._is_closed:
            is_finished = self._stream.finish_reason is not None  # asked first: see `Stream.accept`
            piece = self._stream.take_one()
            if piece is not None:
                return piece
            if is_finished:
                break
            self._step()
        raise StopIteration

    def close(self) -> None:
        """End the stream; pieces that were not taken are dropped."""
        self._is_closed = True
        self._cancel(self._stream, True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._stream.finish_reason is None:
            self._cancel(self._stream, False)
