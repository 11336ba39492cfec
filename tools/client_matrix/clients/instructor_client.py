"""instructor: plain text works; structured output needs tools or JSON, which are refused before a charge."""

from __future__ import annotations

import uuid

import instructor
from check import CORPUS, HALF, MESSAGES, STOPS, charged, expect, feature, refused_with, run
from instructor.core import InstructorRetryException
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA)
ASK = {"model": HALF.model, "messages": MESSAGES, "max_tokens": 8}
plain = OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0)
client = instructor.from_openai(plain)


class Note(BaseModel):
    """What a structured answer would be."""

    text: str


@feature("chat")
def _() -> None:
    with charged() as cost:
        answer = client.chat.completions.create(response_model=None, **ASK)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("multi_turn")
def _() -> None:
    first = client.chat.completions.create(response_model=None, **ASK).choices[0].message
    more = {**ASK, "messages": [*MESSAGES, first.model_dump(), *MESSAGES]}
    expect(client.chat.completions.create(response_model=None, **more).choices)


@feature("stop")
def _() -> None:
    choice = client.chat.completions.create(response_model=None, stop=STOPS, **{**ASK, "max_tokens": 64}).choices[0]
    expect(choice.finish_reason == "stop" and not set(choice.message.content) & set("aeiou"), choice)


@feature("refusal")
def _() -> str:
    for mode in MODES:
        with charged() as cost, refused_with(InstructorRetryException, BadRequestError) as refused:
            structured = instructor.from_openai(plain, mode=mode)
            structured.chat.completions.create(response_model=Note, max_retries=0, **ASK)
        expect("not offered" in str(refused.error) and cost.tokens == 0, refused.error)
    return "400"


@feature("idempotency")
def _() -> None:
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with charged() as cost:
        first, again = (client.chat.completions.create(response_model=None, **once, **ASK) for _ in range(2))
    expect(first.id == again.id and first.usage.completion_tokens == cost.tokens, cost)


@feature("privacy_body")
def _() -> None:
    expect(client.chat.completions.create(response_model=None, **ASK).privacy["charged_nats"] > 0)


@feature("empty_key")
def _() -> None:
    other = instructor.from_openai(OpenAI(base_url=CORPUS.url, api_key="EMPTY"))
    expect(other.chat.completions.create(response_model=None, **{**ASK, "model": CORPUS.model}).choices)


run("instructor", "openai")
