"""outlines over HTTP: `from_openai` sends `response_format`, `from_vllm` sends `structured_outputs`."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from datetime import date
from typing import Any, Literal

import outlines
from check import (
    CORPUS,
    HALF,
    INSTRUCT,
    LETTER,
    PROMPT,
    STOPS,
    TOO_LONG,
    charged,
    expect,
    feature,
    person,
    refused_with,
    run,
)
from openai import AsyncOpenAI, OpenAI
from outlines.types import CFG, JsonSchema, Regex
from pydantic import BaseModel, Field

plain = OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0)
instruct = OpenAI(base_url=INSTRUCT.url, api_key=INSTRUCT.key, max_retries=0)
model = outlines.from_openai(plain, HALF.model)
STRUCTURED: dict[str, Any] = {"max_tokens": 64, "temperature": 0}


class Person(BaseModel):
    """Of the letter."""

    name: str = Field(max_length=24)
    age: int


class Choice(BaseModel):
    """A forced choice."""

    is_ill: Literal["yes", "no"]


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


@feature("json_schema")
def _() -> None:
    for other in (outlines.from_openai(instruct, INSTRUCT.model), outlines.from_vllm(instruct, INSTRUCT.model)):
        for kind in (Person, JsonSchema(Person.model_json_schema())):
            with charged(INSTRUCT) as cost:
                person(other(LETTER, kind, **STRUCTURED))
            expect(0 < cost.tokens <= 64, cost)
        person("".join(other.stream(LETTER, Person, **STRUCTURED)))


@feature("json_object")
def _() -> None:
    said = outlines.from_openai(instruct, INSTRUCT.model)(LETTER, dict, **{**STRUCTURED, "max_tokens": 200})
    expect(isinstance(json.loads(said), dict), said)


@feature("structured_outputs")
def _() -> None:
    other = outlines.from_vllm(instruct, INSTRUCT.model)
    for kind, fits in (
        (Regex(r"\d{4}-\d{2}-\d{2}"), r"\d{4}-\d{2}-\d{2}"),
        (Literal["better", "worse"], "better|worse"),
        (bool, "True|False"),
        (date, r"\d{4}-\d{2}-\d{2}"),
        (CFG('start: "a" ("b" | "c")'), "ab|ac"),
    ):
        said = other(PROMPT, kind, **STRUCTURED)
        expect(re.fullmatch(fits, said), (kind, said))
    expect("".join(other.stream(PROMPT, Literal["better", "worse"], **STRUCTURED)) in ("better", "worse"))


@feature("forced_choice")
def _() -> str:
    for refusing in (model, outlines.from_vllm(plain, HALF.model)):
        with charged() as cost, refused_with(Exception) as refused:
            refusing(PROMPT, Choice, max_tokens=16)
        expect("forced_choice" in str(refused.error) and cost.tokens == 0, refused.error)
    expect(Choice.model_validate_json(outlines.from_openai(instruct, INSTRUCT.model)(PROMPT, Choice, **STRUCTURED)))
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
