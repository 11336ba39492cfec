"""Prometheus metrics: counts and durations, for the admin alone. Knows no text, no vote, no belief and no key.

Every label value comes from a fixed list, except the *name* of an API key, which the operator chose and which the key
store has checked. The endpoint is admin-only because of those names and because the share of disputed tokens is the
operator's to know. Figures of the budget are "so far"; no bound is a metric, because the bound is at the total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
from paclm.server.api_keys import KeyInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Route = Literal["completions", "chat", "models", "privacy", "plan", "health", "metrics", "dashboard", "admin", "other"]
"""What was asked for; a path is never a label, because clients choose paths."""
Refusal = Literal["budget", "quota", "queue", "idempotency", "key", "input", "stopping", "books"]
"""Why a request was refused; docs/guide/server.md has the statuses."""

ROUTES: tuple[str, ...] = get_args(Route)
REFUSALS: tuple[str, ...] = get_args(Refusal)
MARKS: tuple[str, ...] = get_args(Mark)
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WAITS = (*_STEPS[3:], 5.0, 10.0, 30.0, 60.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp per series doubles the answer and says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How things stand at the moment of a scrape."""

    spent_nats: float
    total_nats: float
    remaining_tokens: int
    running: int
    """Streams with a place in the engine."""
    queued: int
    """Requests that wait for one."""
    is_serving: bool
    """False once the curator has stopped and only a restart goes on."""
    keys: Sequence[KeyInfo] = ()


class Metrics:
    """One registry of its own; every method is safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._count_things()
        self._time_things()
        self._weigh_things()
        ProcessCollector(registry=self.registry)
        Info("paclm_build", "The version that runs.", registry=self.registry).info({"version": __version__})

    def _count_things(self) -> None:
        self._tokens = Counter(
            "paclm_tokens",
            "Tokens that left: agreed (all worlds voted alike), disputed, or public (the budget was gone).",
            ["mark"],
            registry=self.registry,
        )
        self._key_tokens = Counter(
            "paclm_key_tokens", "Tokens that left, by the name of the API key.", ["key"], registry=self.registry
        )
        self._requests = Counter(
            "paclm_requests", "Requests answered, by status class.", ["route", "status"], registry=self.registry
        )
        self._refusals = Counter(
            "paclm_refusals", "Requests refused before anything was charged.", ["reason"], registry=self.registry
        )
        self._replays = Counter("paclm_replays", "Stored replies sent again at no charge.", registry=self.registry)
        self._disconnects = Counter(
            "paclm_disconnects", "Streams whose client left before the end.", registry=self.registry
        )
        for mark in MARKS:  # a series that is there from the start has a rate from the start
            self._tokens.labels(mark)
        for reason in REFUSALS:
            self._refusals.labels(reason)

    def _time_things(self) -> None:
        self._request_seconds = Histogram(
            "paclm_request_seconds", "From request to last byte.", ["route"], buckets=_WAITS, registry=self.registry
        )
        self._step_seconds = Histogram(
            "paclm_step_seconds",
            "One step: all worlds, all streams, the releases and the commit.",
            buckets=_STEPS,
            registry=self.registry,
        )
        self._commit_seconds = Histogram(
            "paclm_ledger_commit_seconds",
            "Making charges and belief durable, once per step.",
            buckets=_STEPS,
            registry=self.registry,
        )
        self._first_token_seconds = Histogram(
            "paclm_first_token_seconds", "From request to its first token.", buckets=_WAITS, registry=self.registry
        )
        self._between_tokens_seconds = Histogram(
            "paclm_between_tokens_seconds",
            "From one token of a stream to its next.",
            buckets=_STEPS,
            registry=self.registry,
        )

    def _weigh_things(self) -> None:
        def gauge(name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(name, about, labels, registry=self.registry)

        self._spent = gauge("paclm_budget_spent_nats", "Charged so far; never a guarantee.")
        self._total = gauge("paclm_budget_total_nats", "Committed before the first token; the bounds are at this.")
        self._remaining = gauge("paclm_budget_remaining_nats", "Left of the committed total.")
        self._remaining_tokens = gauge("paclm_budget_remaining_tokens", "Tokens left if every one is charged.")
        self._running = gauge("paclm_streams_running", "Streams with a place in the engine.")
        self._queued = gauge("paclm_requests_queued", "Requests that wait for a place.")
        self._serving = gauge("paclm_serving", "1 while tokens can be had; 0 once the curator has stopped.")
        self._key_used = gauge("paclm_key_used_tokens", "Private tokens counted against a key's quota.", ["key"])
        self._key_reserved = gauge("paclm_key_reserved_tokens", "Worst cases of a key's requests under way.", ["key"])
        self._key_quota = gauge("paclm_key_quota_tokens", "A key's quota; absent for a key without one.", ["key"])

    def count_request(self, route: Route, status: int, seconds: float) -> None:
        """One answer that has been sent in full."""
        known = route if route in ROUTES else "other"
        kind = f"{status // 100}xx"
        self._requests.labels(known, kind if kind in STATUS_CLASSES else "5xx").inc()
        self._request_seconds.labels(known).observe(seconds)

    def count_refusal(self, reason: Refusal) -> None:
        """One request that was refused before anything was charged."""
        if reason in REFUSALS:
            self._refusals.labels(reason).inc()

    def count_token(self, key_name: str, mark: Mark) -> None:
        """One token that has left."""
        self._tokens.labels(mark).inc()
        self._key_tokens.labels(key_name).inc()

    def count_replay(self) -> None:
        """One stored reply that was sent again."""
        self._replays.inc()

    def count_disconnect(self) -> None:
        """One client that left before the end of its stream."""
        self._disconnects.inc()

    def observe_step(self, seconds: float) -> None:
        """How long one step of the curator took."""
        self._step_seconds.observe(seconds)

    def observe_commit(self, seconds: float) -> None:
        """How long one commit of the ledger took."""
        self._commit_seconds.observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        """How long a request waited for its first token."""
        self._first_token_seconds.observe(seconds)

    def observe_between_tokens(self, seconds: float) -> None:
        """How long a stream waited for its next token."""
        self._between_tokens_seconds.observe(seconds)

    def render(self, standing: Standing) -> bytes:
        """The text that Prometheus reads (`CONTENT_TYPE`), with the gauges as things stand."""
        self._spent.set(standing.spent_nats)
        self._total.set(standing.total_nats)
        self._remaining.set(max(0.0, standing.total_nats - standing.spent_nats))
        self._remaining_tokens.set(standing.remaining_tokens)
        self._running.set(standing.running)
        self._queued.set(standing.queued)
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
