"""What the script of a client needs: the servers to ask, what was charged, and one outcome per feature.

Runs in the client's own environment, so it imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Server:
    """A running server. `slow_url` leads to it through a proxy that loses the first answer."""

    root: str
    model: str
    key: str
    admin: str
    slow_root: str

    @property
    def url(self) -> str:
        """The address that clients are given."""
        return f"{self.root}/v1"

    @property
    def slow_url(self) -> str:
        """The same, by way of the proxy."""
        return f"{self.slow_root}/v1"

    def get(self, path: str) -> str:
        """What the admin sees there."""
        ask = urllib.request.Request(self.root + path, headers={"authorization": f"Bearer {self.admin}"})
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return str(answer.read().decode())


HALF, CORPUS, INSTRUCT = (Server(**fields) for fields in json.loads(os.environ["PACLM_CLIENT_MATRIX"]))
"""The first needs its key; the second, on loopback without keys, takes any client. The third is like the first with a
model that follows instructions, and allows forced choices."""
PROMPT = "The patient said"
MESSAGES = [{"role": "user", "content": "How is the patient?"}]
STOPS = [*(f"### {number}" for number in range(11)), *"aeiou"]
"""Sixteen; one of the vowels, at the end of the list, comes up in any answer."""
TOO_LONG = "the patient has a cough " * 400
LETTER = "Anna Berg is 54 years old and comes with a cough. Write her name and age as JSON."
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""No forced choice: strings and numbers, all required."""
CHOICE: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "choice",
        "schema": {
            "type": "object",
            "properties": {"is_ill": {"enum": ["yes", "no"]}},
            "required": ["is_ill"],
            "additionalProperties": False,
        },
    },
}
"""A forced choice."""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER_QUESTION = "What is the weather in Rome?"
SHORT_SECONDS = 4.0
"""A timeout below the patience of the proxy and above the time of a short answer."""

_checks: dict[str, Callable[[], str | None]] = {}


def feature(name: str) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Register a check: it raises, returns nothing (`ok`), or returns the code of a refusal that the docs announce."""

    def register(check: Callable[[], str | None]) -> Callable[[], str | None]:
        _checks[name] = check
        return check

    return register


def charged_tokens(server: Server) -> int:
    """Tokens that the ledger of a server has charged so far."""
    return int(json.loads(server.get("/v1/admin/overview"))["tokens"]["charged"])


@contextmanager
def charged(server: Server = HALF) -> Iterator[SimpleNamespace]:
    """How many `tokens` were charged inside the block; clients run one after another, so they are its own.

    `seconds` tells that a timeout passed: an answer was lost and asked for again.
    """
    cost, before, started = SimpleNamespace(tokens=0, seconds=0.0), charged_tokens(server), time.monotonic()
    yield cost
    cost.seconds = time.monotonic() - started
    cost.tokens = charged_tokens(server) - before


def person(text: str) -> dict[str, Any]:
    """JSON that fits PERSON."""
    found: dict[str, Any] = json.loads(text)
    expect(list(found) == ["name", "age"] and isinstance(found["name"], str) and type(found["age"]) is int, text)
    return found


def expect(claim: object, said: object = "") -> None:
    """Raise unless it holds; scripts of clients keep their checks under -O as well."""
    if not claim:
        raise AssertionError(said)


@contextmanager
def refused_with(*errors: type[BaseException]) -> Iterator[SimpleNamespace]:
    """The block must raise one of these; `error` is what it raised."""
    caught = SimpleNamespace(error=None)
    try:
        yield caught
    except errors as error:
        caught.error = error
        return
    raise AssertionError(f"nothing was refused; expected {', '.join(error.__name__ for error in errors)}")


def run(*packages: str, programs: tuple[str, ...] = (), figures: dict[str, str] | None = None) -> None:
    """Run the registered checks and print the outcomes as one line of JSON, with the versions of what ran."""
    cells: dict[str, dict[str, str]] = {}
    for name, check in _checks.items():
        try:
            code = check()
            cells[name] = {"outcome": "refused", "code": code} if code else {"outcome": "ok"}
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            cells[name] = {"outcome": "failed", "error": f"{type(error).__name__}: {error}"[:600]}
    versions = [*(f"{package} {version(package)}" for package in packages), *programs]
    print(json.dumps({"version": ", ".join(versions), "cells": cells, "figures": figures or {}}))
