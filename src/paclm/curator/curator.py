"""The curator: votes in, tokens out, and nothing leaves before its charge and the belief are on the disk.

    engine step for all streams ─► charges, from the votes alone ─► releases, one after another, each against the
    belief the last one left ─► one durable commit ─► tokens leave, text grows, finished streams end

If anything in a step fails, the curator stops for good: what is in memory may then be ahead of the ledger, and only a
new opening finds out what was committed. Whatever can fail comes before the first token leaves, so a step is handed out
as a whole or not at all; only an interruption in the very middle of handing out can cut it short.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self, Unpack

import numpy as np

from paclm.curator.admission import check_fits, check_prompt, check_request
from paclm.curator.custody import Custody, named_witness, open_custody
from paclm.curator.figures import BudgetFigures, UsageFigures
from paclm.curator.models import load_models
from paclm.curator.outcomes import Outcome, usage_by_tag
from paclm.curator.preflight import cautions, deployment_cautions, training_cautions
from paclm.curator.redacted import Redacted
from paclm.curator.reentrancy import Turns
from paclm.curator.secret import leak_to_three_digits
from paclm.curator.step import Releaser
from paclm.curator.streams import Generation, Options, Piece, Pieces, Request, Stream
from paclm.curator.text import Tokenizer, encode_prompt
from paclm.curator.vote_source import VoteSource
from paclm.errors import CuratorError, InvalidInput, UnsoundState
from paclm.privacy.accounting import Account, nats_up
from paclm.privacy.belief import FloatArray
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:
    from paclm.engine.engine import Ballot


class Delivery(NamedTuple):
    """One token of one stream, after it was paid for."""

    stream: Stream
    piece: Piece


class Curator:
    """Single writer over one secret. Open it with `Curator.open`, use it as a context manager."""

    def __init__(
        self, custody: Custody, engine: VoteSource, tokenizer: Tokenizer, more_cautions: Sequence[str] = ()
    ) -> None:
        self._custody = custody
        self._more_cautions = more_cautions
        self._engine = engine
        self._tokenizer = tokenizer
        self._running: list[Stream] = []  # in the order they were submitted: also the order of their releases
        self._waiting: list[Stream] = []
        self._held: list[Stream] = []  # promised, and not yet started
        self._failure: str | None = None
        self._turns = Turns()
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
        """Take the lock, restore account and belief, load the models and check that they repeat bit for bit.

        The workspace is read anew from its path; base model and adapters are hashed in full, under the lock, right
        before they are loaded. `engine`: one that is loaded already; that it is of these worlds is the caller's word.
        `witness`: a second file, best on another disk, that knows how far the ledger came; PACLM_WITNESS names it too.
        """
        path = workspace.path if isinstance(workspace, Workspace) else workspace
        opened = Workspace.open(path)
        custody = open_custody(opened, named_witness(witness))
        try:
            books = custody.ledger
            more = [*training_cautions(opened), *deployment_cautions(opened, books.ledger_id, books.state.tokens)]
            curator = cls(custody, *load_models(path, custody, engine, tokenizer), more)
            for sentence in curator.cautions:
                warnings.warn(sentence, stacklevel=2)
            return curator
        except BaseException:
            custody.ledger.close()
            raise

    # --- one request, for whoever has only one -----------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int, **options: Unpack[Options]) -> Generation:
        """One whole answer; other streams move along meanwhile. For the options see `request`."""
        stream = self.submit(self.request(prompt, max_new_tokens, **options))
        with Pieces(stream, self.step, self._cancel_when_free) as pieces:
            for _ in pieces:
                pass
        return self.result(stream)

    def stream(self, prompt: str | Sequence[int], max_new_tokens: int, **options: Unpack[Options]) -> Pieces:
        """One answer, piece by piece; closing the iterator early ends it. For the options see `request`."""
        stream = self.submit(self.request(prompt, max_new_tokens, **options))
        return Pieces(stream, self.step, self._cancel_when_free)

    # --- many requests ------------------------------------------------------------------------------------------

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
        """Check what is asked for; what is left out comes from [mechanism]. Costs nothing.

        `coins_seed` sets the public coins; there is no way to set the noise. `tag` says whose charge it is.
        """
        if greedy and temperature:
            raise InvalidInput(f"Ask for greedy or for temperature {temperature!r}, not for both.")
        is_greedy = self.config.decoder == "greedy" and temperature is None if greedy is None else greedy
        tau = 0.0 if is_greedy else self.config.temperature if temperature is None else temperature
        request = Request(
            prompt=self._encode(prompt),
            max_new_tokens=max_new_tokens,
            temperature=float(tau),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            coins_seed=coins_seed,
            tag=tag,
        )
        self._check_request(request)
        return request

    def submit(self, request: Request) -> Stream:
        """Queue a request. Under on_exhausted = refuse its worst case must fit into what is left, and is held free."""
        with self._turns.alone():
            (stream,) = self._new_streams([request])
            self._waiting.append(stream)
            return stream

    def hold(self, requests: Sequence[Request]) -> list[Stream]:
        """Promise these answers, all or none, without queueing them: for callers with a waiting order of their own.

        What `submit` would hold free is held free from now on. `start` each one in time, or `cancel` it.
        """
        with self._turns.alone():
            streams = self._new_streams(requests)
            self._held += streams
            return streams

    def start(self, stream: Stream) -> None:
        """Queue a stream that `hold` promised; it joins the next step if there is a place (`num_free`)."""
        with self._turns.alone():
            self._refuse_if_stopped()
            if stream not in self._held:
                raise InvalidInput("Only a stream that is held can be started, and only once.")
            self._waiting.append(stream)  # in both for an instant, so that what it may cost is never forgotten
            self._held.remove(stream)

    def cancel(self, stream: Stream) -> None:
        """End a stream; what was held free for it is free again. Nothing happens to one that has ended.

        From inside a step (a signal handler, a finalizer) the stream ends when the step does.
        """
        self._cancel_when_free(stream, may_wait=True)

    def step(self) -> list[Delivery]:
        """The next token of every stream: one engine step, one commit. Empty when nothing was asked for."""
        with self._turns.alone(), self._stops_on_failure():
            self._admit()
            if not self._running:
                return []
            streams = list(self._running)
            outcomes, belief = self._release(streams, self._ask(streams), self._custody.begin())
            self._custody.commit(usage_by_tag(streams, outcomes), belief)
            return self._deliver(streams, outcomes)

    def result(self, stream: Stream) -> Generation:
        """A stream that has ended, as a whole."""
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

    def figures(self) -> BudgetFigures:
        """Where the budget stands, in the names of the command line's JSON. Bounds are at the committed total."""
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
        """What the owner should know about the committed total and the settings."""
        return [*cautions(nats_up(self._custody.ledger.state.committed_units)), *self._more_cautions]

    @property
    def has_witness(self) -> bool:
        """Whether a second file knows how far the ledger came, so that one that was put back is noticed."""
        return self._custody.ledger.state.witness is not None

    def usage(self) -> UsageFigures:
        """What was had by each tag and in each hour, from the ledger."""
        return UsageFigures(self._custody.ledger.by_key(), self._custody.ledger.by_hour())

    def leak_estimate(self) -> float:
        """Nats that the belief has moved away from uniform, to three digits; an estimate, for the owner's eyes only."""
        return leak_to_three_digits(self._custody.belief)

    @property
    def commit_seconds(self) -> float:
        """How long making the last step durable took."""
        return self._custody.commit_seconds

    @property
    def tokenizer(self) -> Tokenizer:
        """The base model's."""
        return self._tokenizer

    @property
    def context(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.context

    @property
    def num_worlds(self) -> int:
        """m."""
        return self._custody.secret.num_worlds

    @property
    def worst_price(self) -> int:
        """Units that one private token can cost at most."""
        return self._releaser.price(is_dissent=True)

    @property
    def reserved_units(self) -> int:
        """What running, waiting and held streams can still cost; in memory only."""
        return sum(stream.reserved_units for stream in (*self._running, *self._waiting, *self._held))

    @property
    def num_active(self) -> int:
        """Streams that run or wait for a place."""
        return len(self._running) + len(self._waiting)

    @property
    def num_free(self) -> int:
        """Places in the batch that no running or waiting stream will take."""
        return max(0, self._engine.num_free - len(self._waiting))

    # --- the parts of a step ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._engine.num_free:
            stream = self._waiting[0]
            stream.handle = self._engine.add(stream.request.prompt, stream.request.max_new_tokens)
            self._running.append(stream)  # in both for an instant, so that what it may cost is never forgotten
            self._waiting.remove(stream)

    def _ask(self, streams: list[Stream]) -> Ballot:
        """All worlds' votes on all streams. Coins are drawn here: before any noise is calibrated."""
        k = self._engine.support_size
        coins = [stream.coins.gumbel(k) if stream.request.temperature else np.zeros(k) for stream in streams]
        handles = [stream.handle for stream in streams if stream.handle is not None]
        return self._engine.step(handles, np.stack(coins), [stream.request.temperature for stream in streams])

    def _release(
        self, streams: list[Stream], ballot: Ballot, belief: Redacted[FloatArray]
    ) -> tuple[list[Outcome], Redacted[FloatArray]]:
        """One outcome per stream, in order, and the belief after the last."""
        if ballot.votes.shape != (len(streams), self._custody.secret.num_worlds):
            raise UnsoundState(f"The engine returned votes {ballot.votes.shape}. Nothing may be released.")
        return self._releaser.release(ballot, self.account, belief)

    def _deliver(self, streams: list[Stream], outcomes: list[Outcome]) -> list[Delivery]:
        """First whatever can fail, for all streams; then the tokens leave."""
        arrivals = [
            stream.read(outcome.token.reveal(), outcome.mark, outcome.units)
            for stream, outcome in zip(streams, outcomes, strict=True)
        ]
        for stream, arrival in zip(streams, arrivals, strict=True):
            if arrival.finish_reason:
                self._end(stream)
            elif stream.handle is not None:
                self._engine.append(stream.handle, arrival.piece.token)
        for stream, arrival in zip(streams, arrivals, strict=True):
            stream.accept(arrival)
        return [Delivery(stream, arrival.piece) for stream, arrival in zip(streams, arrivals, strict=True)]

    def _cancel_when_free(self, stream: Stream, may_wait: bool) -> None:
        self._turns.when_free(lambda: self._cancel(stream), may_wait=may_wait)

    def _cancel(self, stream: Stream) -> None:
        for line in (self._held, self._waiting):
            if stream in line:
                line.remove(stream)
        self._end(stream)
        stream.finish_reason = stream.finish_reason or "cancelled"

    def _end(self, stream: Stream) -> None:
        if stream not in self._running:
            return
        self._running.remove(stream)
        if stream.handle is not None and self._failure is None:  # after a failure the engine is in an unknown state
            self._engine.remove(stream.handle)

    # --- checks -------------------------------------------------------------------------------------------------

    def _new_streams(self, requests: Sequence[Request]) -> list[Stream]:
        """Streams for which everything is checked that could fail later, in the middle of a step."""
        self._refuse_if_stopped()
        for request in requests:
            self._check_request(request)  # perhaps it was not made by `request`
        worst = self.worst_price if self.config.on_exhausted == "refuse" else 0
        streams = [Stream(request, self._tokenizer, worst) for request in requests]
        units = sum(stream.reserved_units for stream in streams)
        check_fits(self.account, held=self.reserved_units, units=units, worst=worst)
        return streams

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        check_prompt(prompt)
        tokens = () if isinstance(prompt, str) else tuple(prompt)
        return tokens or tuple(encode_prompt(self._tokenizer, prompt if isinstance(prompt, str) else ""))

    def _check_request(self, request: Request) -> None:
        check_request(request, self._engine.vocabulary, self._engine.context)

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
                f"An earlier step failed ({self._failure}), and no more of it will leave. What was committed is known "
                "only to the ledger: close this curator and open the workspace again."
            )

    # --- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop serving and let the next writer in. From inside a step: when the step has ended."""
        self._turns.when_free(self._close)

    def _close(self) -> None:
        for stream in (*self._running, *self._waiting, *self._held):
            self._cancel(stream)
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
