"""Text in research mode: the curator's streams, with tokens from `ResearchSessions`. NOT PRIVATE.

Reads prompts, batches, stop strings and the end token exactly as a deployment does; knows no ledger, and no secret but
those that a seed gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paclm.curator.decoder import Decoder
from paclm.curator.redacted import Redacted
from paclm.curator.research import ResearchSession
from paclm.curator.streams import Piece, Request, Stream, Tokenizer
from paclm.errors import InvalidInput
from paclm.privacy.belief import IntArray
from paclm.study.batched_sessions import ResearchSessions
from paclm.worlds.settings import Voting

if TYPE_CHECKING:
    from paclm.engine.engine import Ballot, Engine


class Chosen(NamedTuple):
    """One token each for some streams of a step."""

    tokens: list[int]
    is_dissent: list[bool]


Choose = Callable[[list[int], "Ballot", list[int]], Chosen]
"""From the numbers of streams, a ballot and the rows of these streams in it to their tokens."""


def by_model(is_public: bool) -> Choose:
    """The public model's own tokens, or those of the engine's first adapter."""

    def choose(numbers: list[int], ballot: Ballot, rows: list[int]) -> Chosen:
        tokens = ballot.public if is_public else ballot.votes[:, 0]
        return Chosen(tokens[rows].tolist(), [False] * len(rows))

    return choose


def by_fresh_sessions(sessions: ResearchSessions) -> Choose:
    """Stream i is released by session i, against its own secret."""

    def choose(numbers: list[int], ballot: Ballot, rows: list[int]) -> Chosen:
        done = sessions.release(_votes(ballot, rows), np.array(numbers))
        return Chosen(done.tokens.tolist(), done.is_dissent.tolist())

    return choose


def by_one_session(session: ResearchSession) -> Choose:
    """All streams are released one after another against one secret and one belief, in their order."""

    def choose(numbers: list[int], ballot: Ballot, rows: list[int]) -> Chosen:
        votes = _votes(ballot, rows)
        tokens, is_dissent = votes[:, 0].tolist(), (votes != votes[:, :1]).any(axis=1).tolist()
        for row, differs in enumerate(is_dissent):
            if differs:  # what all worlds agree on is released as it is, and moves no belief
                tokens[row] = session.release(votes[row]).token
        return Chosen(tokens, is_dissent)

    return choose


def _votes(ballot: Ballot, rows: list[int]) -> IntArray:
    votes: IntArray = ballot.votes[rows].astype(np.int64)
    return votes


class ResearchDecoder(Decoder[str]):
    """Streams whose tokens `choose` picks. Its streams are numbered in the order of submission, from 0."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, voting: Voting, choose: Choose) -> None:
        super().__init__(engine, tokenizer, voting)
        self._choose = choose
        self._numbers: dict[Stream, int] = {}
        self.num_dissent = 0
        """Tokens on which the worlds differed."""
        self.num_tokens = 0

    def write(self, requests: Sequence[Request], advance: Callable[[int], None] = lambda _: None) -> list[str]:
        """The texts that answer these requests, as many side by side as the engine has room for."""
        return [self.result(stream) for stream in self.finish(requests, advance)]

    def finish(self, requests: Sequence[Request], advance: Callable[[int], None] = lambda _: None) -> list[Stream]:
        """The finished streams of these requests."""
        streams = [self.submit(request) for request in requests]
        first = len(self._numbers)
        self._numbers.update((stream, first + i) for i, stream in enumerate(streams))
        while any(stream.finish_reason is None for stream in streams):
            if ended := sum(piece.finish_reason is not None for _, piece in self.step()):
                advance(ended)
        return streams

    def step(self) -> list[tuple[Stream, Piece]]:
        """The next token of every stream whose prompt is read: one engine step."""
        with self._guard.exclusive(), self._stops_on_failure():
            if not self._has_launched():
                return []
            coins = self._draw_coins()  # of the next step, while this one is computed
            in_flight, ballot = self._collect()
            rows = [row for row, stream in enumerate(in_flight) if stream.finish_reason is None]
            streams = [in_flight[row] for row in rows]
            tokens, is_dissent = self._choose([self._numbers[stream] for stream in streams], ballot, rows)
            self.num_tokens += len(tokens)
            self.num_dissent += sum(is_dissent)
            self._continue(streams, Redacted(tokens), coins)
            return self._deliver(streams, [("disputed" if one else "agreed", 0) for one in is_dissent], tokens)

    def result(self, stream: Stream) -> str:
        """The text of a finished stream."""
        if stream.finish_reason is None:
            raise InvalidInput("The stream is still running; call step() until it has a finish_reason.")
        return stream.text
