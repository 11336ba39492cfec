"""Clients that stream completions, in processes of their own; standard library only.

A token is counted when an event with text or a finish reason arrives, and every answer opens its own connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PROCESSES = 4
MAX_SECONDS = 300.0
_HEAD_START = 0.25  # seconds for the processes to start, so that all clients begin at the same moment
_AFTER_FAILURE = 0.2


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to ask, and words to make prompts of."""

    port: int
    model: str
    key: str
    words: Sequence[str] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients do."""

    clients: int
    seconds: float = math.inf
    """How long they ask again when they are answered; at 0 each asks once."""
    max_tokens: int = 64
    fresh: bool = False
    """A new prompt each time. Else a client repeats its own, and the server may have kept what it computed."""
    characters: int = 160
    tokens: int = 0
    """Prompts of so many random token ids, always new, instead of words."""
    stagger: float = 0.0
    """Seconds from the start of one client to that of the next."""
    form: dict[str, Any] | None = None
    """`response_format` of each request."""


@dataclass
class Received:
    """What the clients got. Times are in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, float] = (0.0, 0.0)
    """The longest gap, and when it ended, counted from the start."""
    last: float = 0.0
    """When the last answer ended, counted from the start."""

    def add(self, other: Received) -> None:
        """Join what two processes got."""
        self.first += other.first
        self.gaps += other.gaps
        self.tokens += other.tokens
        self.answers += other.answers
        self.failures += other.failures
        self.longest = max(self.longest, other.longest)
        self.last = max(self.last, other.last)

    def figures(self) -> dict[str, Any]:
        """The columns of the table; times in milliseconds."""
        return {
            "tokens_per_s": round(self.tokens / self.last, 1) if self.last else 0.0,
            "first_ms": ms(self.first, 0.5),
            "first_p99": ms(self.first, 0.99),
            "gap_ms": ms(self.gaps, 0.5),
            "gap_p99": ms(self.gaps, 0.99),
            "gap_max": ms(self.gaps, 1.0),
            "answers": self.answers,
            "failures": sum(self.failures.values()),
        } | ({"reasons": dict(self.failures)} if self.failures else {})


def ms(seconds: Sequence[float], share: float) -> float | None:
    """A quantile in milliseconds."""
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


class Answer(asyncio.Protocol):
    """One streamed answer: notes when each token arrives."""

    def __init__(self, request: bytes) -> None:
        self.arrivals: list[float] = []
        self.reason = "connection closed"
        """Why there is no whole answer; empty if there is one."""
        self.closed = asyncio.get_running_loop().create_future()
        self._request = request
        self._rest = b""
        self._status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._status:
                self._status = int(line.split()[1])
            elif line.startswith(b"data: {"):
                self._event(json.loads(line[6:]), now)

    def _event(self, event: dict[str, Any], now: float) -> None:
        for choice in event.get("choices", []):
            if choice["text"] or choice["finish_reason"]:
                self.arrivals.append(now)
            if choice["finish_reason"]:
                self.reason = ""
        if "error" in event:
            self.reason = str(event["error"].get("code") or event["error"].get("message"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._status not in (0, 200):
            code = self._rest.partition(b'"code":')[2].strip(b' "\r\n').partition(b'"')[0].decode()
            self.reason = f"{self._status} {code}".strip()
        if not self.closed.done():
            self.closed.set_result(None)


class Running:
    """Clients at work."""

    def __init__(self, target: Target, load: Load) -> None:
        fork = multiprocessing.get_context("fork")
        self._stop = fork.Event()
        self._results = fork.SimpleQueue()
        self.begin = time.perf_counter() + _HEAD_START
        count = min(PROCESSES, load.clients)
        shares = [range(start, load.clients, count) for start in range(count)]
        self._crew = [fork.Process(target=self._work, args=(target, load, share)) for share in shares]
        for process in self._crew:
            process.start()

    def _work(self, target: Target, load: Load, share: range) -> None:
        received = Received()
        try:
            received = asyncio.run(_clients(target, load, share, self.begin, self._stop))
        except Exception as error:  # the other processes' figures are still worth having
            received.failures[f"load generator: {error!r}"] += 1
        self._results.put(received)

    def stop(self) -> Received:
        """Let no client ask again, and wait for the answers that are under way."""
        self._stop.set()
        return self.wait()

    def wait(self) -> Received:
        """What all clients got, once they have ended."""
        received = Received()
        for _ in self._crew:
            received.add(self._results.get())
        for process in self._crew:
            process.join()
        return received


def run(target: Target, load: Load) -> Received:
    """One load from start to end."""
    return Running(target, load).wait()


async def _clients(target: Target, load: Load, share: range, begin: float, stop: Any) -> Received:
    received = Received()
    await asyncio.gather(*(_client(target, load, number, begin, stop, received) for number in share))
    return received


async def _client(target: Target, load: Load, number: int, begin: float, stop: Any, received: Received) -> None:
    is_new = load.fresh or load.tokens
    chance = random.Random(None if is_new else f"client {number}")
    prompt = prompt_of(target, load, chance)
    started = begin + number * load.stagger
    await asyncio.sleep(started - time.perf_counter())
    until = begin + load.seconds
    while True:
        asked = time.perf_counter()
        answer = await _ask(target, load, prompt)
        _note(received, answer, asked, begin)
        if time.perf_counter() >= until or stop.is_set():
            return
        if answer.reason:
            await asyncio.sleep(_AFTER_FAILURE)
        if is_new:
            prompt = prompt_of(target, load, chance)


def _note(received: Received, answer: Answer, asked: float, begin: float) -> None:
    times = answer.arrivals
    received.last = max(received.last, time.perf_counter() - begin)
    if answer.reason:
        received.failures[answer.reason] += 1
    else:
        received.answers += 1
    if times:
        received.first.append(times[0] - asked)
    for before, now in pairwise(times):
        received.gaps.append(now - before)
        received.longest = max(received.longest, (now - before, now - begin))
    received.tokens += len(times)


async def _ask(target: Target, load: Load, prompt: str | list[int]) -> Answer:
    content = {"model": target.model, "prompt": prompt, "max_tokens": load.max_tokens, "stream": True}
    content |= {} if load.form is None else {"response_format": load.form}
    body = json.dumps(content).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: 127.0.0.1:{target.port}",
        f"Authorization: Bearer {target.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    answer = Answer("\r\n".join([*head, "", ""]).encode() + body)
    try:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: answer, "127.0.0.1", target.port)
        await asyncio.wait_for(answer.closed, MAX_SECONDS)
        transport.close()
    except (OSError, TimeoutError) as error:
        answer.reason = type(error).__name__
    return answer


def prompt_of(target: Target, load: Load, chance: random.Random) -> str | list[int]:
    """A prompt drawn by `chance`."""
    if load.tokens:
        return [chance.randrange(300, 1000) for _ in range(load.tokens)]  # ordinary tokens of every base model
    text = " ".join(chance.choices(target.words, k=load.characters // 2))
    return text[: load.characters]
