"""The curator: votes in, tokens out. Nothing leaves before its charge and the belief are durable.

    step:  engine votes for all streams ─► charges, from the votes alone ─► releases, one after another, each against
           the belief the last one left ─► the engine begins the next step ─► one durable commit ─► pieces of text are
           handed out, finished streams end

The next step is computed while this one is committed and handed out. Until the commit its tokens are known to the
engine alone. A stream that ends with a step in flight is dropped from it: its votes are neither priced nor released.

If anything in a step fails, the curator stops for good: memory may then be ahead of the ledger, and only reopening
finds out what was committed. What was released is charged even if the launch that follows fails: whether it does may
depend on the token. Everything that can fail comes before the first piece is handed out, so a step is handed
out as a whole or not at all; only an interrupt in the middle of handing out can cut it short.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Self, Unpack

import numpy as np

from paclm.curator.custody import CallGuard, Custody, named_witness, open_custody
from paclm.curator.preflight import cautions, deployment_cautions, load_models, training_cautions
from paclm.curator.redacted import Redacted, redact_traceback
from paclm.curator.secret import leak_to_three_digits
from paclm.curator.step import Charge, Releaser, usage_by_tag
from paclm.curator.streams import (
    BudgetFigures,
    Generation,
    Limits,
    Options,
    Piece,
    Pieces,
    Request,
    Stream,
    Tokenizer,
    UsageFigures,
    encode_prompt,
)
from paclm.curator.vote_source import VoteSource
from paclm.errors import BudgetExceeded, CuratorError, InvalidInput, UnsoundState
from paclm.privacy.accounting import Account, nats_up
from paclm.privacy.belief import FloatArray, IntArray
from paclm.privacy.randomness import next_gumbel
from paclm.worlds.workspace import Workspace


class Curator:
    """Single writer over one secret. Open it with `Curator.open`, use it as a context manager."""

    def __init__(
        self, custody: Custody, engine: VoteSource, tokenizer: Tokenizer, more_cautions: Sequence[str] = ()
    ) -> None:
        self._custody = custody
        self._more_cautions = more_cautions
        self._engine = engine
        self._running: list[Stream] = []  # in the order of submission, which is the order of their releases
        self._waiting: list[Stream] = []
        self._held: list[Stream] = []  # reserved, not yet started
        self._in_flight: list[Stream] = []  # those of the step that the engine computes; some may have ended since
        self._failure: str | None = None
        self._guard = CallGuard()
        self.tokenizer = tokenizer
        """The base model's."""
        self.config = custody.ledger.settings
        self._releaser = Releaser(custody.secret, self.config)

    @classmethod
    def open(
        cls,
        workspace: Workspace | str | Path,
        *,
        engine: VoteSource | None = None,
        tokenizer: Tokenizer | None = None,
        witness: str | Path | None = None,
    ) -> Curator:
        """Take the lock, restore account and belief, load the models and check that they are deterministic.

        The workspace is read again from its path; base model and adapters are hashed in full, under the lock, right
        before they are loaded. `engine`: one that is loaded already; the caller vouches that it has these worlds.
        `witness`: a second file, best on another disk, that records how far the ledger got; else PACLM_WITNESS.
        """
        path = workspace.path if isinstance(workspace, Workspace) else workspace
        opened = Workspace.open(path)
        custody = open_custody(opened, named_witness(witness))
        try:
            ledger = custody.ledger
            more = [*training_cautions(opened), *deployment_cautions(opened, ledger.ledger_id, ledger.state.tokens)]
            curator = cls(custody, *load_models(path, custody.ledger, engine, tokenizer), more)
            for sentence in curator.cautions:
                warnings.warn(sentence, stacklevel=2)
            return curator
        except BaseException:
            custody.ledger.close()
            raise

    # --- one request ----------------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, **options: Unpack[Options]) -> Generation:
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

    # --- many requests --------------------------------------------------------------------------------------------

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
    ) -> Request:
        """Check a request; defaults come from [mechanism]. Costs nothing.

        `coins_seed` sets the public coins; the noise cannot be set. `tag` names whose charge it is.
        """
        if greedy and temperature:
            raise InvalidInput(f"Choose greedy or temperature {temperature!r}, not both.")
        is_greedy = self.config.decoder == "greedy" and temperature is None if greedy is None else greedy
        tau = 0.0 if is_greedy else self.config.temperature if temperature is None else temperature
        return Request(
            prompt=self._encode(prompt),
            max_new_tokens=max_new_tokens,
            temperature=float(tau),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            coins_seed=coins_seed,
            tag=tag,
            limits=self.limits,
        )

    def submit(self, request: Request) -> Stream:
        """Queue a request. Under on_exhausted = refuse its worst case must fit into the budget, and is reserved."""
        with self._guard.exclusive():
            (stream,) = self._new_streams([request])
            self._waiting.append(stream)
            self._fill_batch()
            return stream

    def hold(self, requests: Sequence[Request]) -> list[Stream]:
        """Reserve for these answers, all or none, without queueing them: for callers with a queue of their own.

        Reserves what `submit` would. Then `start` or `cancel` each stream.
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
            self._waiting.append(stream)  # briefly in both, so that its reservation is never missing
            self._held.remove(stream)
            self._fill_batch()

    def cancel(self, stream: Stream) -> None:
        """End a stream and free its reservation. Does nothing to one that has ended.

        From inside a step (a signal handler, a finalizer) the stream ends when the step does.
        """
        self._cancel_when_free(stream, may_wait=True)

    def step(self) -> list[tuple[Stream, Piece]]:
        """Release the next token of every stream whose prompt is read: one engine step, one commit.

        Empty when no stream is active, and when none is ready yet: then a chunk of prompts was read.
        """
        with self._guard.exclusive(), self._stops_on_failure():
            self._fill_batch()
            # In the device's order after the step in flight, which so waits for nothing, and before the next, which so
            # waits for one chunk. Where prompts are read at once, the last step's pieces have left before.
            self._engine.prefill()
            if all(stream.finish_reason for stream in self._in_flight):
                self._drop_flight()
                self._launch(self._draw_coins())
            if not self._in_flight:
                return []
            coins = self._draw_coins()  # of the next step, while this one is computed
            streams, votes, public = self._collect()
            charges = self._releaser.charges(votes, self.account)
            tokens, belief = self._releaser.release(votes, public, charges, self._custody.begin())
            try:
                self._continue(streams, tokens, coins)
            finally:  # whether it fails may depend on the tokens: they are charged all the same
                self._custody.commit(usage_by_tag([stream.request.tag for stream in streams], charges), belief)
            return self._deliver(streams, charges, tokens.reveal())

    def result(self, stream: Stream) -> Generation:
        """A finished stream as a whole."""
        if stream.finish_reason is None:
            raise InvalidInput("The stream is still running; call step() until it has a finish_reason.")
        num_public = stream.marks.count("public")
        return Generation(
            text=stream.text,
            tokens=tuple(stream.tokens),
            marks=tuple(stream.marks),
            finish_reason=stream.finish_reason,
            private_tokens=len(stream.tokens) - num_public,
            public_tokens=num_public,
            charged_nats=nats_up(stream.charged_units),
            **self.figures(),
        )

    # --- state ----------------------------------------------------------------------------------------------------

    def figures(self) -> BudgetFigures:
        """The state of the budget, in the names of the command line's JSON. Bounds are at the committed total."""
        account, bounds = self.account, self._custody.ledger.bounds
        return BudgetFigures(
            spent_nats=account.spent_nats,
            total_nats=account.total_nats,
            remaining_tokens=account.remaining_tokens(self.config.per_token),
            mia_bound=bounds.mia,
            world_id_bound=bounds.world_id,
        )

    @property
    def account(self) -> Account:
        """The budget after the last commit."""
        return self._custody.ledger.account

    @property
    def cautions(self) -> list[str]:
        """Warnings for the owner about the committed total and the settings."""
        return [*cautions(nats_up(self._custody.ledger.state.committed_units)), *self._more_cautions]

    @property
    def has_witness(self) -> bool:
        """Whether a second file records how far the ledger got, so that a rollback is detected."""
        return self._custody.ledger.state.witness is not None

    def usage(self) -> UsageFigures:
        """Usage by tag and by hour, from the ledger."""
        return UsageFigures(self._custody.ledger.by_key(), self._custody.ledger.by_hour())

    def leak_estimate(self) -> float:
        """Estimated leak in nats, to three digits; for the owner only."""
        return leak_to_three_digits(self._custody.belief)

    @property
    def commit_seconds(self) -> float:
        """Duration of the last commit."""
        return self._custody.commit_seconds

    @property
    def context(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.context

    @property
    def limits(self) -> Limits:
        """What a request may hold."""
        return Limits(self._engine.vocabulary, self._engine.context)

    @property
    def num_worlds(self) -> int:
        """m."""
        return self._custody.secret.num_worlds

    @property
    def engine_summary(self) -> str:
        """Device, arithmetic, room and memory of the engine in one line."""
        return self._engine.summary

    @property
    def worst_price(self) -> int:
        """The highest price of one private token, in units."""
        return self._releaser.price(is_dissent=True)

    @property
    def reserved_units(self) -> int:
        """The worst case of running, waiting and held streams; in memory only."""
        return sum(stream.reserved_units for stream in (*self._running, *self._waiting, *self._held))

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

    # --- the parts of a step --------------------------------------------------------------------------------------

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
        """Begin a step of the running streams whose prompt is read; `coins` has a row for each running stream."""
        ready = [
            (row, stream, stream.handle)
            for row, stream in enumerate(self._running)
            if stream.is_in_engine and stream.handle is not None and self._engine.is_ready(stream.handle)
        ]
        if not ready:
            return
        rows, streams, handles = map(list, zip(*ready, strict=True))
        self._engine.launch(handles, coins[rows], [stream.request.temperature for stream in streams])
        for stream in streams:
            stream.coins.step += 1
        self._in_flight = streams

    def _collect(self) -> tuple[list[Stream], IntArray, IntArray]:
        """The streams in flight that still run, all worlds' votes on them (n, m), and the public model's (n,)."""
        in_flight, self._in_flight = self._in_flight, []
        ballot = self._engine.collect()
        votes = self._releaser.checked(ballot.votes, ballot.public, len(in_flight), self._engine.vocabulary)
        rows = [row for row, stream in enumerate(in_flight) if stream.finish_reason is None]
        return [in_flight[row] for row in rows], votes[rows], ballot.public[rows]

    def _drop_flight(self) -> None:
        """Wait for a step whose streams have all ended; its votes are not read."""
        if self._in_flight:
            self._in_flight = []
            self._engine.collect()

    @redact_traceback
    def _continue(self, streams: list[Stream], tokens: Redacted[list[int]], coins: FloatArray) -> None:
        """Begin the next step before the commit of this one. No traceback may carry these tokens yet."""
        for stream, token in zip(streams, tokens.reveal(), strict=True):
            if stream.is_last(token):
                self._leave_engine(stream)
            elif stream.handle is not None:
                self._engine.append(stream.handle, token)
        self._launch(coins)

    def _deliver(self, streams: list[Stream], charges: list[Charge], tokens: list[int]) -> list[tuple[Stream, Piece]]:
        """Do first, for all streams, what can fail; then show the pieces."""
        rows = zip(streams, charges, tokens, strict=True)
        pieces = [(stream, stream.read(token, charge.mark, charge.units)) for stream, charge, token in rows]
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

    # --- checks ---------------------------------------------------------------------------------------------------

    def _new_streams(self, requests: Sequence[Request]) -> list[Stream]:
        """Streams whose worst case, where one is reserved, fits into the budget beside all other reservations."""
        self._refuse_if_stopped()
        worst = self.worst_price if self.config.on_exhausted == "refuse" else 0
        streams = [Stream(request, self.tokenizer, worst) for request in requests]
        units, held, account = sum(stream.reserved_units for stream in streams), self.reserved_units, self.account
        if not account.affords(held + units):
            free = max(0, account.remaining_units - held)
            fewer = f"Ask for at most {free // worst:,} tokens, extend" if free >= worst else "Extend"
            raise BudgetExceeded(
                f"The request may cost {nats_up(units):.6g} nats ({units // worst:,} tokens), but only "
                f"{nats_up(free):.6g} are free: of {account.total_nats:.6g}, {account.spent_nats:.6g} are spent and "
                f"{nats_up(held):.6g} reserved for other requests. {fewer} the total with `paclm ledger extend`, or "
                'set on_exhausted = "public" in [mechanism].'
            )
        return streams

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
            raise

    def _refuse_if_stopped(self) -> None:
        if self._failure == "closed":
            raise CuratorError("This curator is closed. Open the workspace again.")
        if self._failure is not None:
            raise CuratorError(
                f"An earlier step failed ({self._failure}), so this curator stopped. Close it and open the workspace "
                "again: the ledger holds what was committed."
            )

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile and record what steps will need, so that no stream waits for it later; progress(done, all)."""
        with self._guard.exclusive():
            self._engine.warm_up(progress)

    # --- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all streams and release the ledger's lock. From inside a step: when the step has ended."""
        self._guard.when_free(self._close)

    def _close(self) -> None:
        try:
            for stream in (*self._running, *self._waiting, *self._held):
                self._cancel(stream)
            if self._failure is None:
                self._drop_flight()
        finally:
            self._failure = self._failure or "closed"
            self._custody.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Curator over {self._custody.secret.num_worlds} worlds, {self.num_active} streams>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsoundState("A curator cannot be pickled or copied: one secret has one holder.")
