"""Ordinary decoding: one adapter answers in the place of the public model, and nothing is charged.

What leaves is post-processing of the adapter's training, so there is no secret, no belief and no ledger of tokens here,
the coins may be chosen by the caller, and log-probabilities may leave. Whether the adapter may answer is decided before
the first token, by `DpDecoder` and `StudentDecoder`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paclm.curator.decoder import Decoder
from paclm.curator.redacted import Redacted
from paclm.curator.streams import FinishReason, Logprobs, Mark, Piece, PromiseFigures, Stream, StudentFigures, Tokenizer
from paclm.curator.vote_source import VoteSource
from paclm.errors import EngineError, InvalidInput, LedgerError
from paclm.worlds.settings import Voting

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.engine import Ballot


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainGeneration:
    """A finished answer of the adapter, and what is promised about the corpus."""

    text: str
    """Without a stop string that ended it."""
    tokens: tuple[int, ...]
    """The end token included."""
    logprobs: tuple[Logprobs, ...]
    """One per token, if the request asked for them."""
    finish_reason: FinishReason
    """Why it ended; `stop` is the end token, a stop string or a complete form."""
    figures: PromiseFigures | StudentFigures


class PlainDecoder(Decoder[PlainGeneration]):
    """Streams of one adapter."""

    mark: Mark = "dp"
    """Of every token."""

    def __init__(self, engine: VoteSource, tokenizer: Tokenizer, voting: Voting) -> None:
        super().__init__(engine, tokenizer, voting)
        self.voting = voting
        self.cautions: list[str] = []
        """Warnings for the owner."""

    @property
    def epoch(self) -> int | None:
        """What writes to a database of keys and replies must name; None where that is a file."""
        return None

    @abstractmethod
    def promise_figures(self) -> PromiseFigures | StudentFigures:
        """What is promised now."""

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Call this, from another thread and once, if another process takes over."""

    def step(self) -> list[tuple[Stream, Piece]]:
        """The next token of every stream whose prompt is read: one engine step.

        Empty when no stream is active, and when none is ready yet: then a chunk of prompts was read.
        """
        with self._guard.exclusive(), self._stops_on_failure():
            if not self._has_launched():
                return []
            coins = self._draw_coins()  # of the next step, while this one is computed
            in_flight, ballot = self._collect()
            rows = [row for row, stream in enumerate(in_flight) if stream.finish_reason is None]
            streams, tokens = [in_flight[row] for row in rows], ballot.public[rows].tolist()
            self._continue(streams, Redacted(tokens), coins)
            logprobs = [_logprobs(ballot, row, in_flight[row].request.num_logprobs) for row in rows]
            return self._deliver(streams, [(self.mark, 0)] * len(streams), tokens, logprobs)

    def result(self, stream: Stream) -> PlainGeneration:
        """A finished stream as a whole."""
        if stream.finish_reason is None:
            raise InvalidInput("The stream is still running; call step() until it has a finish_reason.")
        return PlainGeneration(
            text=stream.text,
            tokens=tuple(stream.tokens),
            logprobs=tuple(stream.logprobs),
            finish_reason=stream.finish_reason,
            figures=self.promise_figures(),
        )


def check_plain(engine: VoteSource, support_size: int) -> None:
    """Refuse an engine in which an adapter does not take the place of the public model, or that does not repeat."""
    from paclm.engine.determinism import check_repeatable

    found = (engine.num_worlds, engine.support_size)
    if found != (0, support_size):
        raise EngineError(
            f"The engine has {found[0]} worlds and a support of {found[1]}; one adapter takes the place of the public "
            f"model, with no world beside it and a support of {support_size}."
        )
    check_repeatable(engine)


def _logprobs(ballot: Ballot, row: int, num_top: int | None) -> Logprobs | None:
    """Of the token drawn in a row, and of the most likely ones inside the support."""
    if num_top is None or ballot.logprobs is None:
        return None
    support, values = ballot.support[row].tolist(), ballot.logprobs[row].tolist()
    top = [(token, value) for token, value in zip(support[:num_top], values, strict=False) if token >= 0]
    return Logprobs(values[support.index(int(ballot.public[row]))], top)
