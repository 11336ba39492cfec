"""Continuous batching: the loop of the curator process. Requests join and leave between two steps.

    front ──► Admit / Cancel / Query ──► read all that is there, fill the batch, one step, repeat
    front ◄── the pieces of the step, one message ──┘

The worst case of a request is reserved from its admission on (`Curator.hold`), so one that waits for room in the batch
never fails midway. Needs no thread: one loop reads, steps and sends. Knows no HTTP.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from paclm.curator.curator import Curator
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.grammar import Grammar
from paclm.curator.promises import NOTHING_PROMISED
from paclm.curator.streams import Stream
from paclm.curator.student_decoder import StudentDecoder
from paclm.errors import BudgetExceeded, InvalidInput, LedgerError
from paclm.ledger.events import COUNTS, Usage
from paclm.privacy.accounting import Account
from paclm.server import messages
from paclm.server.corpus_terms import CorpusTerms, PlainTerms, StudentTerms
from paclm.server.messages import (
    Admit,
    BrokenLink,
    BudgetState,
    Cancel,
    CoarseFigures,
    Link,
    Query,
    Ready,
    RefusedCall,
    Stop,
)
from paclm.server.telemetry import log_error

T = TypeVar("T")

_KEPT_SHARE = 8
"""Of the cache, one part in so many is kept from a key that holds the rest."""
_PARTS = 100
"""Callers without the admin key see the budget in parts of this size."""


class FairQueue(Generic[T]):
    """One queue per API key, served round-robin: a key with a hundred waiting entries delays another key by one."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # in the order of turns
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def num_of(self, owner: str) -> int:
        """How many entries of this owner wait."""
        return len(self._queues.get(owner, ()))

    def put(self, owner: str, entry: T) -> None:
        """Append to the owner's queue."""
        self._queues.setdefault(owner, deque()).append(entry)
        self._num += 1

    def get(self, may_go: Callable[[T], bool] = lambda entry: True) -> T | None:
        """The first entry of the owner whose turn it is, who goes to the end; passes over those whose first may not."""
        owner = next((owner for owner, waiting in self._queues.items() if may_go(waiting[0])), None)
        if owner is None:
            return None
        waiting = self._queues.pop(owner)
        entry = waiting.popleft()
        self._num -= 1
        if waiting:
            self._queues[owner] = waiting
        return entry

    def remove(self, owner: str, entry: T) -> bool:
        """Stop waiting; False if the entry does not wait."""
        waiting = self._queues.get(owner, deque())
        if entry not in waiting:
            return False
        waiting.remove(entry)
        self._num -= 1
        if not waiting:
            del self._queues[owner]
        return True


class CoarseBudget:
    """The budget without what counts dissent: as of the last full hour, the spend rounded up to 1 % of the total.

    One view for all callers, which no request changes. It goes by the ledger's sums, so a restart does not change it
    either. That the budget is gone is shown at once: the next request would show it as well.
    """

    def __init__(self, curator: Curator) -> None:
        self._curator = curator
        config = curator.config
        self._per_token = config.per_token
        self._is_strict = config.charge == "dissent" and config.on_exhausted == "refuse"
        self._hour = ""
        self.refresh()

    def refresh(self) -> None:
        """Take the view of a new hour: what was spent before its first token."""
        if (hour := current_hour()) <= self._hour:
            return
        self._hour, account = hour, self._curator.account
        since = self._curator.usage().by_hour.get(hour, Usage(hour))
        self._tokens = account.tokens - since.tokens
        self._account = Account(account.total_units, max(0, account.spent_units - since.units)).coarse(_PARTS)

    @property
    def admits_by(self) -> Account:
        """What admission goes by, never more than is left: under `dissent` each token since the hour counts as charged.

        Callers choose what they reserve: with the exact account, the largest request that is admitted would show what
        the last token cost, at any time.
        """
        account = self._curator.account
        if not self._is_strict:
            return account
        spent = self._account.spent_units + (account.tokens - self._tokens) * self._curator.worst_price
        return Account(account.total_units, min(spent, account.total_units))

    def figures(self) -> CoarseFigures:
        """The view. No token is left when none is admitted any more in this hour or later, and only then."""
        exact, shown = self._curator.account, self._account
        tokens = shown.remaining_tokens(self._per_token)
        if not self._is_strict:
            is_gone = exact.remaining_tokens(self._per_token) == 0
            shown, tokens = (exact.coarse(_PARTS), 0) if is_gone else (shown, max(1, tokens))
        figures = CoarseFigures(**self._curator.figures(), as_of=f"{self._hour}:00:00Z")
        figures["spent_nats"], figures["remaining_tokens"] = shown.spent_nats, tokens
        return figures


def current_hour() -> str:
    """As the ledger names hours: 2026-11-20T14."""
    return datetime.now(UTC).isoformat()[:13]


class HalfTerms:
    """What the front is told of the promise `half`, and whether its budget covers a request."""

    promise = "half"

    def __init__(self, curator: Curator) -> None:
        self._curator = curator
        self._coarse = CoarseBudget(curator)

    def constants(self) -> dict[str, Any]:
        """For `hello`."""
        curator, config = self._curator, self._curator.config
        return {
            "default_temperature": 0.0 if config.decoder == "greedy" else config.temperature,
            "config": dataclasses.asdict(config),
            "num_worlds": curator.num_worlds,
            "worst_price": curator.worst_price,
            "cautions": curator.cautions,
            "are_promises_mixed": any(sentence.startswith(NOTHING_PROMISED) for sentence in curator.cautions),
        }

    def state(self) -> BudgetState:
        """After every step."""
        account = self._curator.account
        self._coarse.refresh()
        return BudgetState(
            **self._curator.figures(),
            coarse=self._coarse.figures(),
            tokens=account.tokens,
            dissent_tokens=account.dissent_tokens,
            charged_tokens=account.charged_tokens,
            total_units=account.total_units,
            remaining_units=account.remaining_units,
            reserved_units=self._curator.reserved_units,
        )

    @property
    def commit_seconds(self) -> float:
        """Duration of the last commit."""
        return self._curator.commit_seconds

    def usage(self) -> list[dict[str, list[int]]]:
        """By key and by hour."""
        return [{name: _counts(entry) for name, entry in table.items()} for table in self._curator.usage()]

    def leak(self) -> float:
        """Estimated, in nats."""
        return self._curator.leak_estimate()

    def check_room(self, wanted: int) -> None:
        """For so many tokens. Retrying helps only while other requests have reserved what this one lacks."""
        if self._curator.config.on_exhausted != "refuse":
            return
        self._coarse.refresh()
        account, units = self._coarse.admits_by, wanted * self._curator.worst_price
        if not account.affords(units):
            is_gone = self._coarse.figures()["remaining_tokens"] == 0
            raise RefusedCall("budget_exhausted", int(is_gone), int(account.remaining_units == 0))
        if not account.affords(units + self._curator.reserved_units):
            raise RefusedCall("budget_reserved")


def _terms_of(curator: Curator | DpDecoder | StudentDecoder) -> HalfTerms | PlainTerms:
    if isinstance(curator, DpDecoder):
        return CorpusTerms(curator)
    return StudentTerms(curator) if isinstance(curator, StudentDecoder) else HalfTerms(curator)


class Scheduler:
    """Steps the curator of a promise while any stream is active, until the front says stop or something fails."""

    def __init__(
        self,
        curator: Curator | DpDecoder | StudentDecoder,
        link: Link,
        max_waiting: int,
        on_ready: Callable[[], None] = lambda: None,
        check_seconds: float | None = None,
    ) -> None:
        """`check_seconds`: how often the engine's workers are looked at while no stream runs; None: it has none."""
        self._curator = curator
        self._check_seconds = check_seconds
        self._terms = _terms_of(curator)
        self._link = link
        self._max_waiting = max_waiting
        self._on_ready = on_ready
        self._num_places = curator.num_free
        self._waiting: FairQueue[Stream] = FairQueue()
        self._streams: dict[int, Stream] = {}  # by the front's number, running and waiting
        self._numbers: dict[Stream, int] = {}
        self._last_number = -1
        self._owners: set[str] = set()  # of requests admitted so far
        self._is_over = False
        self._failure: LedgerError | None = None
        curator.when_lost(self.fail)

    @property
    def num_running(self) -> int:
        """Streams in the batch."""
        return len(self._streams) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Streams that wait for room in the batch."""
        return len(self._waiting)

    def hello(self, **more: object) -> None:
        """Tell the front what it needs of the curator; it takes requests from then on."""
        curator = self._curator
        self._link.send(
            "hello",
            {
                "vocabulary": curator.limits.vocabulary,
                "context": curator.limits.context,
                "num_places": self._num_places,
                "promise": self._terms.promise,
                **self._terms.constants(),
                "state": self._state(),
                **more,
            },
        )

    def run(self) -> None:
        """Until the front says stop. Raises what a step raised, or `BrokenLink` if the front is gone."""
        try:
            while not self._is_over:
                for message in self._link.receive(wait=not self._streams, seconds=self._check_seconds):
                    self._handle(messages.read(message))
                self._fill_batch()
                if self._curator.num_active and not self._is_over:
                    self._step()
                elif self._check_seconds is not None and not self._is_over:
                    self._curator.check_engine()
        except BaseException as error:  # memory may be ahead of the ledger: only a restart helps
            if self._failure is not None and isinstance(error, BrokenLink):
                error = self._failure
            if not isinstance(error, BrokenLink | KeyboardInterrupt | SystemExit):
                log_error("step failed", error)
            self._end(has_failed=True)
            raise error
        self._end(has_failed=False)

    def fail(self, failure: LedgerError) -> None:
        """End `run` with this error before the next step. From any thread."""
        self._failure = failure
        self._link.end_receiving()

    # --- calls of the front ---------------------------------------------------------------------------------------

    def _handle(self, message: messages.FrontMessage) -> None:
        if isinstance(message, Ready):
            self._on_ready()
            return
        try:
            self._link.send("reply", message.call, self._answer(message))
        except RefusedCall as refused:
            self._link.send("refused", message.call, refused.reason, *refused.figures)
        except BrokenLink:
            raise
        except BaseException as error:  # any error belongs to the caller; a panic of a native library too
            log_error("call failed", error)
            self._link.send("refused", message.call, "failed")

    def _answer(self, message: Admit | Cancel | Query | Stop) -> Any:
        match message:
            case Admit():
                return self._admit(message)
            case Cancel():
                return self._cancel(message.streams)
            case Query():
                return self._figures(message)
            case Stop():
                self._is_over = True
                return None

    def _admit(self, message: Admit) -> None:
        owner, first, wanted = message.owner, message.first, message.wanted
        if first <= self._last_number:
            raise BrokenLink("The front used the number of a stream twice.")
        self._last_number = first + len(wanted) - 1
        if self._is_over:
            raise RefusedCall("stopping")
        if self._is_full_for(owner, len(wanted)):
            raise RefusedCall("queue_full", len(self._waiting))
        try:
            requests = [
                self._curator.request(
                    answer.prompt,
                    answer.max_new_tokens,
                    temperature=answer.temperature or None,
                    greedy=answer.temperature == 0,
                    stop=answer.stop,
                    coins_seed=answer.coins_seed,
                    tag=owner,
                    num_logprobs=answer.num_logprobs,
                    grammar=None if answer.grammar is None else Grammar(answer.grammar),
                )
                for answer in wanted
            ]
            self._terms.check_room(sum(request.max_new_tokens for request in requests))
            streams = self._curator.hold(requests)
        except BudgetExceeded:  # its message is for the operator
            raise RefusedCall("budget_reserved") from None
        except (InvalidInput, OverflowError):  # the front checks with the same code: only a broken one gets here
            raise RefusedCall("invalid") from None
        self._owners.add(owner)
        for number, stream in enumerate(streams, first):
            self._streams[number], self._numbers[stream] = stream, number
            self._waiting.put(owner, stream)

    def _is_full_for(self, owner: str, wanted: int) -> bool:
        """The queue takes `max_waiting` answers, and up to twice that from keys that have none waiting."""
        limit = self._max_waiting * (1 if self._waiting.num_of(owner) else 2)
        return len(self._waiting) + wanted > limit + self._curator.num_free

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            if (stream := self._streams.pop(number, None)) is not None:
                del self._numbers[stream]
                self._waiting.remove(stream.request.tag, stream)
                self._curator.cancel(stream)

    def _figures(self, message: Query) -> Any:
        match message.topic:
            case "figures":
                return self._state()
            case "usage":
                return self._terms.usage()
            case "leak":
                return self._terms.leak()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _fill_batch(self) -> None:
        while self._curator.num_free and (stream := self._waiting.get(self._may_start)) is not None:
            self._curator.start(stream)

    def _may_start(self, stream: Stream) -> bool:
        """Once there are several keys, each leaves a place in the batch and an eighth of the cache to the others."""
        if len(self._owners) < 2:
            return True
        own = [s for s in self._streams.values() if s.handle is not None and s.request.tag == stream.request.tag]
        room = self._curator.capacity - self._curator.capacity // _KEPT_SHARE
        is_in_share = sum(s.request.most_tokens for s in (*own, stream)) <= room
        return not own or (is_in_share and len(own) + 1 < self._num_places)

    def _step(self) -> None:
        started = time.perf_counter()
        released = self._curator.step()
        seconds = time.perf_counter() - started
        if not released:
            return
        pieces = []
        for stream, piece in released:
            number = self._numbers[stream]
            pieces.append((number, *piece))
            if piece.finish_reason:
                del self._streams[number], self._numbers[stream]
        self._link.send("step", pieces, self._state(), seconds, self._terms.commit_seconds)

    def _state(self) -> dict[str, Any]:
        return {**self._terms.state(), "running": self.num_running, "waiting": self.num_waiting}

    # --- end ------------------------------------------------------------------------------------------------------

    def _end(self, *, has_failed: bool) -> None:
        """Cancel the rest; tell the front which of it had started, and the text that was held back."""
        self._is_over = True
        ended = list(self._streams.items())
        self._cancel([number for number, _ in ended])
        try:
            rows = [(number, stream.handle is not None, stream.held_back()) for number, stream in ended]
            self._link.send("ended", rows)
            self._link.send("stopped", has_failed)
        except BrokenLink:  # the front is gone, and what it knows is final
            pass


def _counts(usage: Usage) -> list[int]:
    return [getattr(usage, name) for name in COUNTS]
