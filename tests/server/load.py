"""Many clients at once, and a record of what each of them received. Used by tests, stress tests and benchmarks."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx


@dataclass
class Received:
    """What all clients got, in tokens and seconds."""

    tokens: int = 0
    """Tokens that arrived, counted by the marks that the admin sees."""
    complete: int = 0
    """Streams that arrived to their end."""
    left: int = 0
    """Streams that their client left."""
    refused: int = 0
    refusals: Counter = field(default_factory=Counter)
    """(status, code, whether the refusal says when to retry) → how often."""
    cut: Counter = field(default_factory=Counter)
    """Connections that ended without an answer: kind of error → how often."""
    problems: list[str] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=dict)
    """Prompt → answers; for a server whose answers follow from the prompt, one each."""
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def prompt_of(client):
    """Each client has its own: an answer that went to another client would show."""
    return f"the patient number {client} has"


async def _stream(http, client, tokens, got, leaves_after):
    """Ask once; returns when to retry if that was refused, else None."""
    prompt, text, ids, arrived = prompt_of(client), "", set(), 0
    body = {"model": "clinic", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "echo": True}
    started = last = time.perf_counter()
    is_whole = False
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            code = json.loads(await answer.aread())["error"]["code"]
            got.refused += 1
            got.refusals[answer.status_code, code, "retry-after" in answer.headers] += 1
            return float(answer.headers.get("retry-after", 1))
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_whole = True
                break
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                break
            ids.add(event["id"])
            text += event["choices"][0]["text"]
            marks = len(event.get("privacy", {}).get("marks", []))
            now = time.perf_counter()
            if marks:
                (got.between if arrived else got.first).append(now - (last if arrived else started))
                last = now
            arrived += marks
            got.tokens += marks
            if leaves_after is not None and arrived >= leaves_after:
                got.left += 1
                return None
    if is_whole:
        got.complete += 1
        got.texts.setdefault(prompt, set()).add(text)
    if len(ids) > 1:
        got.problems.append(f"client {client} got events of {len(ids)} streams")
    if text and not text.startswith(prompt[: len(text)]):
        got.problems.append(f"client {client} got another's text")
    if is_whole and not 1 <= arrived <= tokens:
        got.problems.append(f"client {client} got {arrived} of {tokens} tokens")
    return None


async def _client(url, key, client, got, *, until, at_least, tokens, leaving, patient):
    chance = random.Random(client)
    limits = httpx.Limits(max_connections=2)
    headers = {"authorization": f"Bearer {key}"}
    # without certificates, which take 20 ms each to read; a busy machine takes minutes to answer 700
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=900, limits=limits, verify=False) as http:
        for turn in itertools.count():
            if turn >= at_least and time.monotonic() >= until:
                return
            leaves_after = chance.randint(1, tokens) if chance.random() < leaving else None
            wait = 0.0
            while wait is not None:
                try:
                    wait = await _stream(http, client, tokens, got, leaves_after)
                except httpx.TransportError as error:  # the server was killed, or has no room for the connection
                    got.cut[f"{type(error).__name__}: {error}"] += 1
                    wait = 1.0
                    if not patient:
                        return
                if not patient:
                    break
                if wait is not None:
                    await asyncio.sleep(wait + chance.random())


def ask_for(url, key, *, clients, seconds, tokens, **more):
    """So many clients stream one answer after another for so long.

    More: `leaving`, the share that leaves in the middle; `at_least`, how often each asks however slow the machine is;
    `patient`, whether a refused client asks again after the time that it was told; `got`, for others to look at while
    it goes on.
    """
    load = {"leaving": 0.0, "at_least": 1, "patient": False, "got": Received(), **more}

    async def ask_all():
        until = time.monotonic() + seconds
        await asyncio.gather(
            *(_client(url, key, number, until=until, tokens=tokens, **load) for number in range(clients))
        )

    asyncio.run(ask_all())
    return load["got"]
