"""Streams in and out of an engine: all of decoding that knows no secret, budget or ledger.

`Curator` (promise `half`) and `DpDecoder` (promise `corpus`) say in `step` which token of a ballot leaves, and when.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

import numpy as np

from paclm.config import MechanismConfig
from paclm.curator.call_guard import CallGuard
from paclm.curator.grammar import Grammar, Grammars, json_schema_grammar
from paclm.curator.redacted import Redacted, redact_traceback
from paclm.curator.streams import (
    Limits,
    Logprobs,
    Mark,
    Options,
    Piece,
    Pieces,
    Request,
    Stream,
    Tokenizer,
    encode_prompt,
)
from paclm.curator.vote_source import VoteSource
from paclm.errors import CuratorError, InvalidInput, PaclmError, UnsoundState
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import next_gumbel
from paclm.worlds.settings import Voting

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.decode_step import MaskArray
    from paclm.engine.engine import Ballot

_WAIT_SECONDS = 0.01
"""For a grammar, while there is nothing else to do; then others are looked after."""

Answer = TypeVar("Answer")
"""A finished stream as a whole."""


class Decoder(ABC, Generic[Answer]):
    """Running streams over one engine. Use it as a context manager."""

    def __init__(self, engine: VoteSource, tokenizer: Tokenizer, voting: MechanismConfig | Voting) -> None:
        self._engine = engine
        self._voting = voting
        self._running: list[Stream] = []  # in the order of submission, which is the order of their releases
        self._waiting: list[Stream] = []
        self._held: list[Stream] = []  # reserved, not yet started
        self._in_flight: list[Stream] = []  # those of the step that the engine computes; some may have ended since
        self._masks: MaskArray | None = None  # of the step in flight
        self._grammars = Grammars(tokenizer, engine.vocabulary)
        self._failure: str | None = None
        self._guard = CallGuard()
        self.tokenizer = tokenizer
        """The base model's."""

    @abstractmethod
    def step(self) -> list[tuple[Stream, Piece]]:
        """Release the next token of every stream whose prompt is read: one engine step.

        Empty when no stream is active, and when none is ready yet: then a chunk of prompts was read.
        """

    @abstractmethod
    def result(self, stream: Stream) -> Answer:
        """A finished stream as a whole."""

    # --- one request --------------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, **options: Unpack[Options]) -> Answer:
        """Return one whole answer; other streams advance meanwhile. For the options see `request`."""
        stream = self.submit(self.request(prompt, max_new_tokens, **options))
        with Pieces(stream, self.step, self._cancel_when_free) as pieces:
            for _ in pieces:
                pass
        return self.result(stream)

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int, **options: Unpack[Options]) -> Pieces:
        """Return one answer piece by piece; closing the iterator early cancels it. For the options see `request`."""
        stream = self.submit(self.request(prompt, max_new_tokens, **options))
        return Pieces(stream, self.step, self._cancel_when_free)

    # --- many requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float | None = None,
        greedy: bool | None = None,
        stop: str | Sequence[str] = (),
        coins_seed: int | None = None,
        tag: str = "",
        num_logprobs: int | None = None,
        grammar: Grammar | None = None,
        json_schema: dict[str, Any] | None = None,
    ) -> Request:
        """Check a request; defaults come from [mechanism]. Costs nothing.

        `coins_seed` sets the public coins; the noise cannot be set. `tag` names whose tokens they are. `num_logprobs`:
        see `Request`; without the promise `corpus` there are none. `json_schema`: the answer is JSON that it accepts,
        unless max_new_tokens ends it before; `grammar`: any other form, from `paclm.curator.grammar`.
        """
        if greedy and temperature:
            raise InvalidInput(f"Choose greedy or temperature {temperature!r}, not both.")
        if json_schema is not None:
            if grammar is not None:
                raise InvalidInput("Choose grammar or json_schema, not both.")
            grammar = json_schema_grammar(json_schema)
        is_greedy = self._voting.decoder == "greedy" and temperature is None if greedy is None else greedy
        tau = 0.0 if is_greedy else self._voting.temperature if temperature is None else temperature
        return Request(
            prompt=self._encode(prompt),
            max_new_tokens=max_new_tokens,
            temperature=float(tau),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            coins_seed=coins_seed,
            tag=tag,
            num_logprobs=num_logprobs,
            grammar=grammar,
            limits=self.limits,
        )

    def submit(self, request: Request) -> Stream:
        """Queue a request. Under on_exhausted = refuse its worst case must fit into the budget, and is reserved."""
        with self._guard.exclusive():
            grammar = None if request.grammar is None else self._grammars.start(request.grammar)
            (stream,) = self._new_streams([request])
            stream.grammar = grammar
            self._waiting.append(stream)
            self._fill_batch()
            return stream

    def hold(self, requests: Sequence[Request]) -> list[Stream]:
        """Reserve for these answers, all or none, without queueing them: for callers with a queue of their own.

        Reserves what `submit` would. Then `start` or `cancel` each stream. Their grammars must have been tried: they
        are built while other streams go on, and one that cannot be built stops the decoder.
        """
        with self._guard.exclusive():
            streams = self._new_streams(requests)
            self._held += streams
            return streams

    def start(self, stream: Stream) -> None:
        """Queue a stream of `hold`; its prompt is read from the next step on if there is room for it (`num_free`)."""
        with self._guard.exclusive():
            self._refuse_if_stopped()
            if stream not in self._held:
                raise InvalidInput("Only a held stream can be started, and only once.")
            if stream.request.grammar is not None:
                stream.building = self._grammars.begin(stream.request.grammar, stream.request.tag)
            self._waiting.append(stream)  # briefly in both, so that its reservation is never missing
            self._held.remove(stream)
            self._fill_batch()

    def cancel(self, stream: Stream) -> None:
        """End a stream and free its reservation. Does nothing to one that has ended.

        From inside a step (a signal handler, a finalizer) the stream ends when the step does.
        """
        self._cancel_when_free(stream, may_wait=True)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.context

    @property
    def limits(self) -> Limits:
        """What a request may hold."""
        return Limits(self._engine.vocabulary, self._engine.context)

    @property
    def engine_summary(self) -> str:
        """Device, arithmetic and room of the engine in one line."""
        return self._engine.summary

    @property
    def engine_memory(self) -> str:
        """What the engine takes of its device at most."""
        return self._engine.memory

    @property
    def num_active(self) -> int:
        """Streams that run or wait for room in the batch."""
        return len(self._running) + len(self._waiting)

    @property
    def num_free(self) -> int:
        """Sequences that can still be started; 0 while a stream waits for room, because none may overtake it."""
        return 0 if self._waiting else self._engine.num_free

    @property
    def capacity(self) -> int:
        """Tokens of all running streams together, prompts and most new tokens, that the engine holds."""
        return self._engine.capacity

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _has_launched(self) -> bool:
        """Whether a step is in flight; begins one if a stream is ready. Reads one chunk of the prompts that wait."""
        self._fill_batch()
        # In the device's order after the step in flight, which so waits for nothing, and before the next, which so
        # waits for one chunk. Where prompts are read at once, the last step's pieces have left before.
        self._engine.prefill()
        if all(stream.finish_reason for stream in self._in_flight):
            self._drop_flight()
            self._launch(self._draw_coins())
        if not self._in_flight and all(stream.awaits_grammar for stream in self._running):
            wait([s.building for s in self._running if s.building is not None], _WAIT_SECONDS, FIRST_COMPLETED)
        return bool(self._in_flight)

    def _fill_batch(self) -> None:
        """Streams in the order of submission, as far as the engine has room for their worst case."""
        with self._stops_on_failure():
            while self._waiting:
                stream, request = self._waiting[0], self._waiting[0].request
                if self._running and not self._engine.has_room(request.most_tokens):
                    return  # an empty engine has room for it, or `add` says why not
                stream.handle = self._engine.add(request.prompt, request.max_new_tokens, request.tag)
                stream.is_in_engine = True
                self._running.append(stream)  # briefly in both, so that its reservation is never missing
                self._waiting.remove(stream)

    def _draw_coins(self) -> FloatArray:
        """Coins of the next step for every running stream, (n, k): before its votes, hence before any noise."""
        coins = np.zeros((len(self._running), self._engine.support_size))
        rows = [row for row, stream in enumerate(self._running) if stream.request.temperature]
        coins[rows] = next_gumbel([self._running[row].coins for row in rows], self._engine.support_size)
        return coins

    def _launch(self, coins: FloatArray) -> None:
        """Begin a step of the running streams whose prompt is read and whose grammar is built.

        `coins` has a row for each running stream.
        """
        ready = [
            (row, stream, stream.handle)
            for row, stream in enumerate(self._running)
            if stream.is_in_engine and stream.handle is not None
            if self._engine.is_ready(stream.handle) and not stream.awaits_grammar
        ]
        if not ready:
            return
        rows, streams, handles = map(list, zip(*ready, strict=True))
        self._masks = self._masks_of(streams)
        self._engine.launch(handles, coins[rows], [stream.request.temperature for stream in streams], self._masks)
        for stream in streams:
            stream.coins.step += 1
        self._in_flight = streams

    def _masks_of(self, streams: list[Stream]) -> MaskArray | None:
        """The tokens that each stream's grammar allows: a function of the request and of its released tokens alone."""
        if all(stream.grammar is None for stream in streams):
            return None
        masks: MaskArray = np.full((len(streams), -(-self._engine.vocabulary // 32)), 2**32 - 1, dtype=np.uint32)
        for row, stream in enumerate(streams):
            if stream.grammar is not None:
                masks[row] = stream.grammar.allowed
        return masks

    def _collect(self) -> tuple[list[Stream], Ballot]:
        """Wait for the step in flight: its streams, some of which may have ended, and the ballot on them."""
        in_flight, self._in_flight = self._in_flight, []
        ballot = self._engine.collect()
        if self._masks is not None:
            rows = [row for row, stream in enumerate(in_flight) if stream.finish_reason is None]
            if not are_allowed(self._masks[rows], ballot.votes[rows], ballot.public[rows]):
                raise UnsoundState("The engine returned a vote that the grammar forbids. Nothing was released.")
        return in_flight, ballot

    def _drop_flight(self) -> None:
        """Wait for a step whose streams have all ended; its votes are not read."""
        if self._in_flight:
            self._in_flight = []
            self._engine.collect()

    @redact_traceback
    def _continue(self, streams: list[Stream], tokens: Redacted[list[int]], coins: FloatArray) -> None:
        """Begin the next step before the commit of this one. No traceback may carry these tokens yet."""
        for stream, token in zip(streams, tokens.reveal(), strict=True):
            if stream.grammar is not None:
                stream.grammar.advance(token)
            if stream.is_last(token):
                self._leave_engine(stream)
            elif stream.handle is not None:
                self._engine.append(stream.handle, token)
        self._launch(coins)

    def _deliver(
        self,
        streams: list[Stream],
        charges: Sequence[tuple[Mark, int]],
        tokens: list[int],
        logprobs: Sequence[Logprobs | None] | None = None,
    ) -> list[tuple[Stream, Piece]]:
        """Do first, for all streams, what can fail; then show the pieces."""
        rows = zip(streams, charges, tokens, logprobs or [None] * len(streams), strict=True)
        pieces = [(stream, stream.read(token, *charge, logs)) for stream, charge, token, logs in rows]
        for stream, piece in pieces:
            if piece.finish_reason:
                self._end(stream)
        for stream, piece in pieces:
            stream.accept(piece)
        return pieces

    def _cancel_when_free(self, stream: Stream, may_wait: bool) -> None:
        self._guard.when_free(lambda: self._cancel(stream), may_wait=may_wait)

    def _cancel(self, stream: Stream) -> None:
        for queue in (self._held, self._waiting):
            if stream in queue:
                queue.remove(stream)
        if stream.building is not None:
            stream.building.cancel()
        self._end(stream)
        stream.finish_reason = stream.finish_reason or "cancelled"

    def _end(self, stream: Stream) -> None:
        if stream in self._running:
            self._running.remove(stream)
            self._leave_engine(stream)

    def _leave_engine(self, stream: Stream) -> None:
        if stream.is_in_engine and stream.handle is not None:
            stream.is_in_engine = False
            if self._failure is None:  # after a failure the engine is in an unknown state
                self._engine.remove(stream.handle)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _new_streams(self, requests: Sequence[Request]) -> list[Stream]:
        self._refuse_if_stopped()
        return [Stream(request, self.tokenizer) for request in requests]

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, (bytes, bytearray, memoryview)):  # a sequence of small integers, not of token ids
            raise InvalidInput(
                f"A prompt is a string or a sequence of token ids, not {type(prompt).__name__}. Decode it first: "
                'prompt.decode("utf-8").'
            )
        tokens = () if isinstance(prompt, str) else tuple(prompt)
        return tokens or tuple(encode_prompt(self.tokenizer, prompt if isinstance(prompt, str) else ""))

    @contextmanager
    def _stops_on_failure(self) -> Iterator[None]:
        self._refuse_if_stopped()
        try:
            yield
        except BaseException as failure:
            self._failure = type(failure).__name__
            for stream in self._running:
                stream.grammar = None  # it may have followed a token that is not committed
            raise

    def _refuse_if_stopped(self) -> None:
        if self._failure == "closed":
            raise CuratorError("This decoder is closed. Open the workspace again.")
        if self._failure is not None:
            raise CuratorError(
                f"An earlier step failed ({self._failure}), so this decoder stopped. Close it and open the workspace "
                "again: what was committed is kept."
            )

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile and record what steps will need, so that no stream waits for it later; progress(done, all)."""
        with self._guard.exclusive():
            with suppress(PaclmError):  # requests with a grammar are refused then, and told why
                self._grammars.warm_up()
            self._engine.warm_up(progress)

    def time_step(self, prompt: Sequence[int], max_new_tokens: int, most: int) -> tuple[float, int]:
        """Seconds of a step of streams half-way through such an answer, and their number, `most` or fewer.

        Of votes on a repeated prompt, which are dropped. Call it while no stream runs.
        """
        with self._guard.exclusive(), self._stops_on_failure():
            engine, half = self._engine, max_new_tokens // 2
            text, rest = [*prompt, *islice(cycle(prompt), half)], max_new_tokens - half
            reserved = [engine.add(text, rest)]
            while len(reserved) < most and engine.has_room(len(text) + rest):
                reserved.append(engine.add(text, rest))
            for handle in reserved:  # unread: only their number is needed
                engine.remove(handle)
            handles = [engine.add(text, rest, "timing") for _ in reserved]  # of one owner: the text is read once
            while not all(map(engine.is_ready, handles)):
                engine.prefill()
            coins, seconds = np.zeros((len(handles), engine.support_size)), []
            for _ in range(4):
                began = time.perf_counter()
                engine.launch(handles, coins, [0.0] * len(handles), None)
                engine.collect()
                seconds.append(time.perf_counter() - began)
            for handle in handles:
                engine.remove(handle)
            return median(seconds[1:]), len(handles)  # the first step may compile

    def check_engine(self) -> None:
        """Wait until workers that are lost are back; for a caller that has nothing to step."""
        with self._guard.exclusive(), self._stops_on_failure():
            if not self._in_flight:
                self._engine.check()

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all streams and let go of what is held. From inside a step: when the step has ended."""
        self._guard.when_free(self._close)

    def _close(self) -> None:
        try:
            for stream in (*self._running, *self._waiting, *self._held):
                self._cancel(stream)
            if self._failure is None:
                self._drop_flight()
        finally:
            self._grammars.close()
            self._failure = self._failure or "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def are_allowed(masks: MaskArray, votes: IntArray, public: IntArray) -> bool:
    """Whether every vote (n, m), and the public model's (n,), is of a token whose bit is set in its row."""
    votes = np.concatenate([votes, public[:, None]], axis=1)
    if votes.min(initial=0) < 0 or votes.max(initial=0) >= 32 * masks.shape[1]:
        return False
    words = np.take_along_axis(masks, votes >> 5, axis=1)
    return bool((words >> (votes & 31).astype(np.uint32) & 1).all())
