"""instructor: pydantic models in its modes for tools and JSON, with validation, repeats and partial objects."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal

import instructor
from check import (
    CORPUS,
    HALF,
    INSTRUCT,
    LETTER,
    MESSAGES,
    STOPS,
    charged,
    expect,
    feature,
    refused_with,
    run,
)
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field, field_validator

ASK = {"model": HALF.model, "messages": MESSAGES, "max_tokens": 8}
STRUCTURED: dict[str, Any] = {
    "model": INSTRUCT.model,
    "messages": [{"role": "user", "content": LETTER}],
    "max_tokens": 64,
    "temperature": 0,
}
plain = OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0)
instruct = OpenAI(base_url=INSTRUCT.url, api_key=INSTRUCT.key, max_retries=0)
client = instructor.from_openai(plain)


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


def _partials(mode: instructor.Mode) -> list[Any]:
    structured = instructor.from_openai(instruct, mode=mode)
    return list(structured.chat.completions.create_partial(response_model=Person, **STRUCTURED))


@feature("json_schema")
def _() -> None:
    structured = instructor.from_openai(instruct, mode=instructor.Mode.JSON_SCHEMA)
    with charged(INSTRUCT) as cost:
        found, answer = structured.chat.completions.create_with_completion(
            response_model=Person, max_retries=0, **STRUCTURED
        )
    expect(isinstance(found, Person) and answer.usage.completion_tokens == cost.tokens > 0, cost)
    seen = _partials(instructor.Mode.JSON_SCHEMA)
    expect(any(part.name and part.age is None for part in seen) and seen[-1].age is not None, seen)


@feature("json_object")
def _() -> None:
    """The schema stands in the prompt; nothing but the model makes the answer fit it, so it may take repeats."""
    structured = instructor.from_openai(instruct, mode=instructor.Mode.JSON)
    seen: list[Any] = []
    structured.on("completion:response", seen.append)
    ask = {**STRUCTURED, "max_tokens": 200}
    try:
        expect(isinstance(structured.chat.completions.create(response_model=Person, max_retries=2, **ask), Person))
    except InstructorRetryException:
        expect(len(seen) == 3, "it was not asked again")
    for answer in seen:
        expect(isinstance(json.loads(answer.choices[0].message.content), dict), answer)


@feature("tools")
def _() -> None:
    structured = instructor.from_openai(instruct, mode=instructor.Mode.TOOLS)
    with charged(INSTRUCT) as cost:
        found, answer = structured.chat.completions.create_with_completion(
            response_model=Person, max_retries=0, **STRUCTURED
        )
    expect(isinstance(found, Person) and answer.usage.completion_tokens == cost.tokens > 0, cost)
    seen = _partials(instructor.Mode.TOOLS)
    expect(any(part.name and part.age is None for part in seen) and seen[-1].age is not None, seen)


@feature("responses_structured")
def _() -> None:
    structured = instructor.from_openai(instruct, mode=instructor.Mode.RESPONSES_TOOLS)
    ask = {"model": INSTRUCT.model, "input": LETTER, "max_output_tokens": 64, "temperature": 0, "store": False}
    expect(isinstance(structured.responses.create(response_model=Person, max_retries=0, **ask), Person))


@feature("retries")
def _() -> None:
    """A validator refuses the first answer; instructor sends the error back as the result of the call."""
    refused: list[str] = []

    class Checked(Person):
        """Refused once."""

        @field_validator("name")
        @classmethod
        def _not_at_first(cls, name: str) -> str:
            if not refused:
                refused.append(name)
                raise ValueError("write the name in capital letters")
            return name

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        refused.clear()
        structured = instructor.from_openai(instruct, mode=mode)
        with charged(INSTRUCT) as cost:
            found, answer = structured.chat.completions.create_with_completion(
                response_model=Checked, max_retries=2, **STRUCTURED
            )
        expect(len(refused) == 1 and isinstance(found, Checked), found)
        expect(answer.usage.completion_tokens == cost.tokens, "the usage of both attempts is what was charged")


@feature("forced_choice")
def _() -> str:
    more = {"response_model": Choice, "max_retries": 0, "messages": MESSAGES, "max_tokens": 48}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with charged() as cost, refused_with(InstructorRetryException) as refused:
            instructor.from_openai(plain, mode=mode).chat.completions.create(model=HALF.model, **more)
        expect("forced_choice" in str(refused.error) and cost.tokens == 0, refused.error)
        allowed = instructor.from_openai(instruct, mode=mode)
        expect(allowed.chat.completions.create(model=INSTRUCT.model, **more).is_ill in ("yes", "no"))
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
