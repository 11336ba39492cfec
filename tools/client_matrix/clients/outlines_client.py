"""outlines over HTTP: plain text works; constrained output is refused before a charge."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import outlines
from check import CORPUS, HALF, PROMPT, STOPS, TOO_LONG, charged, expect, feature, refused_with, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

model = outlines.from_openai(OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0), HALF.model)


class Note(BaseModel):
    """What a constrained answer would be."""

    text: str


@feature("chat")
def _() -> None:
    with charged() as cost:
        expect(isinstance(model(PROMPT, max_tokens=8), str))
    expect(0 < cost.tokens <= 8, cost)


@feature("stream")
def _() -> None:
    expect("".join(model.stream(PROMPT, max_tokens=8)))


@feature("stop")
def _() -> None:
    expect(not set(model(PROMPT, max_tokens=64, stop=STOPS)) & set("aeiou"))


@feature("n")
def _() -> None:
    expect(len(model(PROMPT, max_tokens=8, n=2)) == 2)


@feature("seed")
def _() -> None:
    expect(isinstance(model(PROMPT, max_tokens=8, seed=7), str))


@feature("context")
def _() -> None:
    with charged() as cost, refused_with(Exception) as refused:
        model(TOO_LONG, max_tokens=8)
    expect("context" in str(refused.error).lower() and cost.tokens == 0, refused.error)


@feature("refusal")
def _() -> str:
    with charged() as cost, refused_with(Exception) as refused:
        model(PROMPT, Note, max_tokens=8)
    expect("not offered" in str(refused.error) and cost.tokens == 0, refused.error)
    return "400"


@feature("idempotency")
def _() -> None:
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with charged() as cost:
        expect(model(PROMPT, max_tokens=8, **once) == model(PROMPT, max_tokens=8, **once))
    expect(0 < cost.tokens <= 8, cost)


@feature("empty_key")
def _() -> None:
    other = outlines.from_openai(OpenAI(base_url=CORPUS.url, api_key="EMPTY"), CORPUS.model)
    expect(isinstance(other(PROMPT, max_tokens=4), str))


@feature("async")
def _() -> None:
    async def ask() -> list[Any]:
        async with AsyncOpenAI(base_url=HALF.url, api_key=HALF.key) as client:
            several = outlines.from_openai(client, HALF.model)
            return await asyncio.gather(*(several(PROMPT, max_tokens=8) for _ in range(4)))

    expect(all(isinstance(text, str) for text in asyncio.run(ask())))


run("outlines", "openai")
