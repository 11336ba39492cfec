"""Requests and their answers while they grow. Knows no secret and no belief: a stream sees tokens that have left."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paclm.curator.text import TextStream, Tokenizer
from paclm.errors import InvalidInput
from paclm.privacy.randomness import Coins

Mark = Literal["agreed", "disputed", "public"]
"""All worlds voted alike; they differed; or the budget was gone and the public model answered."""
FinishReason = Literal["stop", "length", "cancelled"]

_LONGEST_TAG = 200


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
        if isinstance(self.max_new_tokens, bool) or self.max_new_tokens < 1:
            raise InvalidInput(f"max_new_tokens must be at least 1, not {self.max_new_tokens!r}.")
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidInput(f"temperature must be a number of at least 0, not {self.temperature!r}.")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise InvalidInput("A stop string must be a text of at least one character.")
        if len(self.tag) > _LONGEST_TAG:
            raise InvalidInput(f"A tag has at most {_LONGEST_TAG} characters, not {len(self.tag)}.")


class Piece(NamedTuple):
    """One token that has left, and the text that may be shown by now; often that of an earlier token."""

    token: int
    text: str
    mark: Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished answer, what it cost, and where the budget stands."""

    text: str
    tokens: tuple[int, ...]
    """Every token that left, the end token included."""
    marks: tuple[Mark, ...]
    """One per token."""
    finish_reason: FinishReason
    private_tokens: int
    public_tokens: int
    charged_nats: float
    spent_nats: float
    """So far, by everyone; never a guarantee."""
    total_nats: float
    remaining_tokens: int
    mia_bound: float
    """At the committed total: no attack on a record's membership succeeds more often."""
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

    def receive(self, token: int, mark: Mark, units: int) -> Piece:
        """Take a token that has been paid for; decides from public values whether it was the last."""
        self.tokens.append(token)
        self.marks.append(mark)
        self.charged_units += units
        said = self._text.push(token)
        if token == self._end or self._text.is_stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            said += self._text.finish()
        self._said.append(said)
        self._ready.append(Piece(token, said, mark))
        return self._ready[-1]

    def take(self) -> list[Piece]:
        """The pieces that have come since the last call."""
        pieces = list(self._ready)
        self._ready.clear()
        return pieces

    def __repr__(self) -> str:
        return f"<Stream {len(self.tokens)}/{self.request.max_new_tokens} tokens, {self.finish_reason or 'running'}>"
