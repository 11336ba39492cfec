"""Logs and Prometheus metrics: counts and durations only. No field takes free text, so no prompt or key gets in.

Every field of our own log lines (`Entry`) is a number or is checked against a fixed pattern, and every metric label
comes from a fixed list, except the *name* of an API key, which the key store has checked. Log lines of libraries
(uvicorn, asyncio) are reduced to logger, level, error type and source position: messages and exception arguments may
hold request bodies. Metrics are for the admin only: key names and the rate of dissent are the operator's. Budgets are
"so far"; no bound is a metric, because the bound is at the committed total.
"""

from __future__ import annotations

import json
import logging
import logging.config
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from paclm import __version__
from paclm.curator.streams import Mark
from paclm.errors import InvalidInput
from paclm.server.api_keys import KeyInfo
from paclm.server.messages import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Route = Literal[
    "completions", "chat", "responses", "models", "privacy", "plan", "health", "metrics", "dashboard", "admin", "other"
]
"""A path is never a label, because clients choose paths."""
RefusalReason = Literal["budget", "quota", "queue", "idempotency", "key", "input", "stopping", "books", "workers"]
"""Why a request was refused; docs/guide/server.md lists the statuses."""

GrammarOutcome = Literal["accepted", "refused", "killed"]
"""Killed: it took too much time or memory, or crashed llguidance."""

ROUTES: tuple[str, ...] = get_args(Route)
REFUSALS: tuple[str, ...] = get_args(RefusalReason)
GRAMMAR_OUTCOMES: tuple[GrammarOutcome, ...] = get_args(GrammarOutcome)
MARKS: dict[Served, tuple[Mark, ...]] = {
    "half": ("agreed", "disputed", "public"),
    "corpus": ("dp",),
    "student": ("student",),
}
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

BIN_SECONDS = 2
KEEP_SECONDS = 600
_RATE_SECONDS = 10

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAITS = (*_STEPS[3:], 5.0, 10.0, 30.0, 60.0)

_GAUGES: dict[Served, dict[str, str]] = {
    "half": {
        "paclm_budget_spent_nats": "Charged so far; never a guarantee.",
        "paclm_budget_total_nats": "Committed before the first token; the bounds are at this.",
        "paclm_budget_remaining_nats": "Left of the committed total.",
        "paclm_budget_remaining_tokens": "Tokens left if every one is charged.",
    },
    "corpus": {
        "paclm_promise_epsilon": "Of all DP trainings on this corpus together; NaN where nothing is promised.",
        "paclm_promise_delta": "Of all DP trainings on this corpus together; NaN where nothing is promised.",
        "paclm_promise_kept": "1 while the corpus is served under this promise alone; 0 after promises were mixed.",
    },
    "student": {},
}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp per series would double the output

LOGGER = "paclm.server"

EventName = Literal[
    "standby",
    "started",
    "answered",
    "refused",
    "replayed",
    "disconnected",
    "failed",
    "budget_low",
    "budget_exhausted",
    "worker_missing",
    "worker_lost",
    "worker_back",
    "stopping",
    "stopped",
]
EVENTS: tuple[str, ...] = get_args(EventName)

_PATTERNS = {
    "request": re.compile(r"[a-z]{1,12}[-_][A-Za-z0-9]{8,64}"),
    "key": re.compile(r"(?!paclm-)[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    "code": re.compile(r"[a-z]+(_[a-z]+)*"),
    "on_exhausted": re.compile("public|refuse"),
}
_TEMPLATES = ("uvicorn", "uvicorn.error")
"""Loggers whose message templates are fixed texts; their arguments are left out."""
_DEEPEST = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line. A field that is None is left out."""

    event: EventName
    request: str | None = None
    """The server's id of the request."""
    key: str | None = None
    """The name of an API key."""
    route: Route | None = None
    status: int | None = None
    code: str | None = None
    """The error code of the answer, such as privacy_budget_exhausted."""
    prompt_tokens: int | None = None
    private_tokens: int | None = None
    public_tokens: int | None = None
    charged_nats: float | None = None
    remaining_tokens: int | None = None
    on_exhausted: str | None = None
    """What happens to requests after the budget is spent."""
    worker: int | None = None
    """The rank of a worker."""
    running: int | None = None
    queued: int | None = None
    first_token_seconds: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _check(self.event in EVENTS, "event")
        _check(self.route is None or self.route in ROUTES, "route")
        for field in fields(self)[1:]:
            value, pattern = getattr(self, field.name), _PATTERNS.get(field.name)
            if pattern is not None:
                _check(value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None), field.name)
            elif field.name != "route":
                _check(isinstance(value, int | float | None), field.name)


def _check(is_fit: bool, name: str) -> None:
    """The value is not repeated: it may be private."""
    if not is_fit:
        raise InvalidInput(f"The field {name!r} of a log line takes a number or one plain word of its own pattern.")


def write(entry: Entry, level: int = logging.INFO) -> None:
    """Log one line."""
    logging.getLogger(LOGGER).log(level, entry.event, extra={"entry": entry})


def log_error(what: str, error: BaseException) -> None:
    """Log an error; the formatter keeps type and place only."""
    logging.getLogger(LOGGER).error(what, exc_info=error)


class JsonLines(logging.Formatter):
    """Formats an `Entry` in full and reduces everything else."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object on one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        entry = getattr(record, "entry", None)
        if isinstance(entry, Entry):
            known = {field.name: getattr(entry, field.name) for field in fields(entry)}
            return json.dumps(line | {name: value for name, value in known.items() if value is not None})
        line |= {"event": "log", "logger": record.name, "at": f"{record.module}:{record.lineno}"}
        if record.name in _TEMPLATES and isinstance(record.msg, str):
            line["template"] = record.msg.strip()
        if record.exc_info and record.exc_info[1] is not None:
            line |= describe_error(record.exc_info[1])
        return json.dumps(line)


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error's type, causes and source positions; never its message or local values."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _DEEPEST:
        chain.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    frames = traceback.extract_tb(error.__traceback__, limit=-_DEEPEST)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": chain[0], "caused_by": chain[1:], "trace": where}


def logging_config(level: str = "INFO") -> dict[str, Any]:
    """For `logging.config.dictConfig`. uvicorn's access log holds paths and queries: off."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "paclm.server.telemetry.JsonLines"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            LOGGER: {"handlers": ["stderr"], "level": level, "propagate": False},
            "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            "uvicorn.error": {"level": "WARNING"},
            "uvicorn.access": {"handlers": [], "level": "CRITICAL", "propagate": False},
        },
    }


def install(level: str = "INFO") -> None:
    """Send loggers, warnings and uncaught errors of this process through `JsonLines`."""
    logging.config.dictConfig(logging_config(level))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt | SystemExit):
        logging.getLogger(LOGGER).error("uncaught", exc_info=None if error is None else (kind, error, trace))


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Gauges at the moment of a scrape."""

    promise: Mapping[str, float]
    """Of the promise; what `Metrics` was made for."""
    running: int
    """Streams in the batch."""
    queued: int
    """Requests that wait for room in the batch."""
    workers_lost: int = 0
    """Workers that are waited for."""
    is_serving: bool
    """False once the curator has stopped and needs a restart."""
    keys: Sequence[KeyInfo] = ()


class Metrics:
    """A registry of its own; every method is thread-safe."""

    def __init__(self, promise: Served = "half") -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, about, labels, registry=self.registry)

        def histogram(name: str, about: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
            return Histogram(name, about, labels, buckets=buckets, registry=self.registry)

        def gauge(name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, about, labels, registry=self.registry)

        tokens = "Released tokens: agreed (all votes equal), disputed (dissent), public (budget spent), dp, student."
        self._tokens = counter("paclm_tokens", tokens, ["mark"])
        self._key_tokens = counter("paclm_key_tokens", "Released tokens, by name of the API key.", ["key"])
        self._requests = counter("paclm_requests", "Requests answered, by status class.", ["route", "status"])
        self._refusals = counter("paclm_refusals", "Requests refused before anything was charged.", ["reason"])
        self._grammars = counter("paclm_grammars", "Schemas and grammars tried before use, by outcome.", ["outcome"])
        self.replays = counter("paclm_replays", "Stored replies sent again at no charge.")
        self.disconnects = counter("paclm_disconnects", "Requests whose client disconnected before the end.")
        for mark in MARKS[promise]:  # a series that exists from the start has a rate from the start
            self._tokens.labels(mark)
        for reason in REFUSALS:
            self._refusals.labels(reason)
        for outcome in GRAMMAR_OUTCOMES:
            self._grammars.labels(outcome)

        self._request_seconds = histogram("paclm_request_seconds", "From request to last byte.", _WAITS, ["route"])
        step = "One step: all worlds, all streams, the releases and the commit."
        self.step_seconds = histogram("paclm_step_seconds", step, _STEPS)
        commit = "Making charges and belief durable, once per step."
        self.commit_seconds = histogram("paclm_ledger_commit_seconds", commit, _STEPS)
        self.first_token_seconds = histogram("paclm_first_token_seconds", "From request to its first token.", _WAITS)
        between = "From one token of a stream to its next."
        self.between_tokens_seconds = histogram("paclm_between_tokens_seconds", between, _STEPS)

        self._promise = {name: gauge(name, about) for name, about in _GAUGES[promise].items()}
        self._running = gauge("paclm_streams_running", "Streams in the batch.")
        self._queued = gauge("paclm_requests_queued", "Requests that wait for room in the batch.")
        self._workers_lost = gauge("paclm_workers_lost", "Workers that are waited for; above 0 nothing is released.")
        self._serving = gauge("paclm_serving", "1 while serving; 0 once the curator has stopped.")
        self._key_used = gauge("paclm_key_used_tokens", "Private tokens counted against a key's quota.", ["key"])
        self._key_reserved = gauge("paclm_key_reserved_tokens", "Worst cases of a key's requests in progress.", ["key"])
        self._key_quota = gauge("paclm_key_quota_tokens", "A key's quota; absent for a key without one.", ["key"])
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="curator", pid=os.getppid, registry=self.registry)
        Info("paclm_build", "The version that runs.", registry=self.registry).info({"version": __version__})

    def count_request(self, route: Route, status: int, seconds: float) -> None:
        """One response that was sent in full."""
        known = route if route in ROUTES else "other"
        kind = f"{status // 100}xx"
        self._requests.labels(known, kind if kind in STATUS_CLASSES else "5xx").inc()
        self._request_seconds.labels(known).observe(seconds)

    def count_refusal(self, reason: RefusalReason) -> None:
        """One request that was refused before anything was charged."""
        if reason in REFUSALS:
            self._refusals.labels(reason).inc()

    def count_grammar(self, outcome: GrammarOutcome) -> None:
        """One schema or grammar that was tried."""
        if outcome in GRAMMAR_OUTCOMES:
            self._grammars.labels(outcome).inc()

    def count_tokens(self, key_name: str, mark: Mark, num: int) -> None:
        """Released tokens."""
        self._tokens.labels(mark).inc(num)
        self._key_tokens.labels(key_name).inc(num)

    def render(self, standing: Standing) -> bytes:
        """The text for Prometheus (`CONTENT_TYPE`), with these gauges."""
        for name, value in standing.promise.items():
            self._promise[name].set(value)
        self._running.set(standing.running)
        self._queued.set(standing.queued)
        self._workers_lost.set(standing.workers_lost)
        self._serving.set(standing.is_serving)
        for gauge in (self._key_used, self._key_reserved, self._key_quota):
            gauge.clear()
        for key in standing.keys:
            if key.revoked_at is None:
                self._key_used.labels(key.name).set(key.used_tokens)
                self._key_reserved.labels(key.name).set(key.reserved_tokens)
                if key.quota_tokens is not None:
                    self._key_quota.labels(key.name).set(key.quota_tokens)
        return generate_latest(self.registry)


@dataclass(slots=True)
class Bin:
    """Tokens released within `BIN_SECONDS`."""

    number: int
    """The bin's start in seconds since 1970, divided by its length."""
    private_tokens: int = 0
    public_tokens: int = 0
    dissent_tokens: int = 0
    """Private tokens on which the worlds differed."""
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Private and public."""
        return self.private_tokens + self.public_tokens

    @property
    def at(self) -> int:
        """Its start, in seconds since 1970."""
        return self.number * BIN_SECONDS


class Recent:
    """Counts of the last minutes, in memory."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._bins: deque[Bin] = deque(maxlen=KEEP_SECONDS // BIN_SECONDS)

    def add(self, marks: Mapping[Mark, int]) -> None:
        """Count one step."""
        number = self._now()
        if not self._bins or self._bins[-1].number < number:
            self._bins.append(Bin(number))
        bin_ = self._bins[-1]
        bin_.steps += 1
        bin_.private_tokens += sum(num for mark, num in marks.items() if mark != "public")
        bin_.public_tokens += marks.get("public", 0)
        bin_.dissent_tokens += marks.get("disputed", 0)

    def bins(self) -> list[Bin]:
        """Every complete bin of the last `KEEP_SECONDS`, empty ones included."""
        now = self._now()
        known = {bin_.number: bin_ for bin_ in self._bins}
        return [known.get(number) or Bin(number) for number in range(now - KEEP_SECONDS // BIN_SECONDS, now)]

    def rates(self) -> tuple[float, float]:
        """Tokens and steps per second, over the last complete bins."""
        last = self.bins()[-_RATE_SECONDS // BIN_SECONDS :]
        return sum(bin_.tokens for bin_ in last) / _RATE_SECONDS, sum(bin_.steps for bin_ in last) / _RATE_SECONDS

    def _now(self) -> int:
        return int(self._clock() // BIN_SECONDS)
