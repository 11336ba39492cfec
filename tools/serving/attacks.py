"""What one hostile key may do, each from a process of its own; standard library only. A wish for a first token of
another key is measured beside it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from serving.load import Target

CONNECTIONS = 32
"""At a time, each in a thread."""
_WORDS = "the patient reports a headache and was seen on day "


class Attack:
    """A context manager: `CONNECTIONS` clients that do the same again and again."""

    def __init__(self, target: Target, name: str) -> None:
        fork = multiprocessing.get_context("fork")
        self._stop = fork.Event()
        self._num = fork.Value("q", 0)
        self._process = fork.Process(target=self._run, args=(target, ATTACKS[name]))

    @property
    def num(self) -> int:
        """How often it was done."""
        return int(self._num.value)

    def _run(self, target: Target, attack: Callable[[Target, Any], None]) -> None:
        os.nice(10)  # on few cores it must not win by taking the processor that the server runs on
        threads = [threading.Thread(target=self._repeat, args=(target, attack)) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, target: Target, attack: Callable[[Target, Any], None]) -> None:
        while not self._stop.is_set():
            with suppress(OSError):
                attack(target, self._stop)
            with self._num.get_lock():
                self._num.value += 1

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join()


def _request(target: Target, body: bytes, length: int | None = None) -> bytes:
    head = [
        "POST /v1/completions HTTP/1.1",
        f"Host: 127.0.0.1:{target.port}",
        f"Authorization: Bearer {target.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _completion(target: Target, prompt: str, **more: object) -> bytes:
    return json.dumps({"model": target.model, "prompt": prompt, "max_tokens": 4, **more}).encode()


def _exchange(target: Target, request: bytes) -> None:
    with socket.create_connection(("127.0.0.1", target.port), timeout=60) as connection:
        connection.sendall(request)
        while connection.recv(65536):
            pass


def _megabytes(target: Target, _: Any) -> None:
    """Prompts that cannot fit."""
    _exchange(target, _request(target, _completion(target, _WORDS * 19_000)))


def _spaces(target: Target, _: Any) -> None:
    """Prompts with few tokens for their length: the longest that have to be tokenized."""
    _exchange(target, _request(target, _completion(target, " " * 600_000)))


def _slow_bodies(target: Target, stop: Any) -> None:
    """Bodies that arrive byte by byte."""
    with socket.create_connection(("127.0.0.1", target.port), timeout=60) as connection:
        connection.sendall(_request(target, b"{", length=500_000))
        while not stop.wait(0.2):
            connection.sendall(b" ")


def _idle(target: Target, stop: Any) -> None:
    """Connections that say nothing."""
    opened = [socket.create_connection(("127.0.0.1", target.port), timeout=60) for _ in range(16)]
    stop.wait(2)
    for connection in opened:
        connection.close()


def _refused(target: Target, _: Any) -> None:
    """A flood of requests that are refused."""
    _exchange(target, _request(target, _completion(target, "the", logprobs=5)))


def _answered(target: Target, _: Any) -> None:
    """A flood of requests that are answered."""
    _exchange(target, _request(target, _completion(target, "the patient", max_tokens=64)))


def _disconnects(target: Target, _: Any) -> None:
    """Requests whose client leaves at once; some 150 a second."""
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", target.port), timeout=60) as connection:
        connection.sendall(_request(target, _completion(target, "the patient", max_tokens=64)))
        time.sleep(0.02)


ATTACKS: dict[str, Callable[[Target, Any], None]] = {
    "prompts of a megabyte": _megabytes,
    "long prompts of spaces": _spaces,
    "slow bodies": _slow_bodies,
    "idle connections": _idle,
    "refused requests": _refused,
    "answered requests": _answered,
    "disconnects": _disconnects,
}
