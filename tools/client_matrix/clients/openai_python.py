"""openai-python, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any, Literal

from check import (
    CORPUS,
    HALF,
    INSTRUCT,
    LETTER,
    MESSAGES,
    PERSON,
    PROMPT,
    SHORT_SECONDS,
    STOPS,
    TOO_LONG,
    WEATHER,
    WEATHER_QUESTION,
    charged,
    expect,
    feature,
    person,
    refused_with,
    run,
)
from openai import AsyncOpenAI, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client = OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0)
instruct = OpenAI(base_url=INSTRUCT.url, api_key=INSTRUCT.key, max_retries=0)
ASK = {"model": HALF.model, "max_tokens": 8}
STRUCTURED: dict[str, Any] = {"model": INSTRUCT.model, "max_tokens": 64, "temperature": 0}


class Person(BaseModel):
    """Of the letter."""

    name: str = Field(max_length=24)
    age: int


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=24)


class Choice(BaseModel):
    """A forced choice."""

    is_ill: Literal["yes", "no"]


@feature("models")
def _() -> None:
    expect([model.id for model in client.models.list()] == [HALF.model])


@feature("completion")
def _() -> None:
    with charged() as cost:
        answer = client.completions.create(prompt=PROMPT, **ASK)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("chat")
def _() -> None:
    with charged() as cost:
        answer = client.chat.completions.create(messages=MESSAGES, **ASK)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("multi_turn")
def _() -> None:
    first = client.chat.completions.create(messages=MESSAGES, **ASK).choices[0].message
    for turn in (first, first.model_dump(), first.model_dump(exclude_none=True)):  # the object itself, as people do
        answer = client.chat.completions.create(messages=[*MESSAGES, turn, *MESSAGES], **ASK)
        expect(answer.choices[0].message.role == "assistant")


@feature("stream")
def _() -> None:
    whole = [event.choices[0].text for event in client.completions.create(prompt=PROMPT, stream=True, **ASK)]
    events = list(client.chat.completions.create(messages=MESSAGES, stream=True, **ASK))
    expect(len(whole) > 1 and events[-1].choices[0].finish_reason in ("length", "stop"))


@feature("stream_usage")
def _() -> None:
    with charged() as cost:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = list(client.chat.completions.create(messages=MESSAGES, **options, **ASK))
    expect(events[-1].usage.completion_tokens == cost.tokens > 0, cost)


@feature("stop")
def _() -> None:
    ask = {**ASK, "max_tokens": 64, "stop": STOPS}
    for choice in (
        client.completions.create(prompt=PROMPT, **ask).choices[0],
        client.chat.completions.create(messages=MESSAGES, **ask).choices[0],
    ):
        text = choice.text if hasattr(choice, "text") else choice.message.content
        expect(choice.finish_reason == "stop" and not set(text) & set("aeiou"), choice)


@feature("n")
def _() -> None:
    with charged() as cost:
        answer = client.chat.completions.create(messages=MESSAGES, n=2, **ASK)
    expect([choice.index for choice in answer.choices] == [0, 1])
    expect(answer.usage.completion_tokens == cost.tokens, cost)


@feature("seed")
def _() -> None:
    expect(client.chat.completions.create(messages=MESSAGES, seed=7, **ASK).choices)


@feature("context")
def _() -> None:
    with charged() as cost, refused_with(BadRequestError) as refused:
        client.completions.create(prompt=TOO_LONG, **ASK)
    expect(refused.error.code == "context_length_exceeded" and cost.tokens == 0)


@feature("json_schema")
def _() -> None:
    ask = {**STRUCTURED, "messages": [{"role": "user", "content": LETTER}]}
    with charged(INSTRUCT) as cost:
        answer = instruct.chat.completions.parse(response_format=Person, **ask)
    expect(isinstance(answer.choices[0].message.parsed, Person) and answer.choices[0].finish_reason == "stop", answer)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)
    with instruct.chat.completions.stream(response_format=Person, **ask) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    expect(isinstance(final.parsed, Person) and {"name"} in [set(found or ()) for found in partial], partial)
    more = {**ask, "messages": [*ask["messages"], final, {"role": "user", "content": "Again."}]}  # with its `parsed`
    expect(instruct.chat.completions.parse(response_format=Person, **more).choices[0].message.parsed)
    with OpenAI(base_url=CORPUS.url, api_key="EMPTY") as other:
        schema = {**PERSON, "properties": {**PERSON["properties"], "age": {"type": "integer", "enum": [54, 7]}}}
        more = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        answer = other.chat.completions.create(**{**ask, "model": CORPUS.model}, response_format=more)
    person(answer.choices[0].message.content)


@feature("json_object")
def _() -> None:
    ask = {**STRUCTURED, "max_tokens": 200, "messages": [{"role": "user", "content": LETTER}]}
    choice = instruct.chat.completions.create(**ask, response_format={"type": "json_object"}).choices[0]
    expect(choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content), dict), choice)


@feature("tools")
def _() -> None:
    tool = pydantic_function_tool(Weather, name="weather")
    named = {"type": "function", "function": {"name": "weather"}}
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    for chosen in ("required", named):
        ask = {**STRUCTURED, "messages": question, "tools": [tool], "tool_choice": chosen}
        with charged(INSTRUCT) as cost:
            answer = instruct.chat.completions.parse(**ask)
        (call,) = answer.choices[0].message.tool_calls
        expect(isinstance(call.function.parsed_arguments, Weather), call)
        expect(answer.choices[0].finish_reason == ("tool_calls" if chosen == "required" else "stop"), answer)
        expect(answer.usage.completion_tokens == cost.tokens > 0, cost)
        with instruct.chat.completions.stream(**ask) as stream:
            events = [event for event in stream if event.type.startswith("tool_calls.function.arguments")]
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        expect(events[-1].type.endswith("done") and isinstance(streamed.function.parsed_arguments, Weather), events)
        expect("".join(event.arguments_delta for event in events[:-1]) == streamed.function.arguments, events)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 degrees"}
        more = {**ask, "messages": [*question, answer.choices[0].message, result], "tool_choice": "none"}
        message = instruct.chat.completions.create(**more).choices[0].message
        expect(message.content and not message.tool_calls, message)


@feature("structured_outputs")
def _() -> None:
    ask = {**STRUCTURED, "messages": MESSAGES}
    for outputs, fits in (
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"choice": ["better", "worse"]}, "better|worse"),
        ({"grammar": 'start: "a" ("b" | "c")'}, "ab|ac"),
    ):
        choice = instruct.chat.completions.create(**ask, extra_body={"structured_outputs": outputs}).choices[0]
        expect(choice.finish_reason == "stop" and re.fullmatch(fits, choice.message.content), choice)
    extra = {"structured_outputs": {"json": PERSON}}
    person(instruct.completions.create(**STRUCTURED, prompt=LETTER, extra_body=extra).choices[0].text)


@feature("forced_choice")
def _() -> str:
    ask = {"messages": MESSAGES, "max_tokens": 16, "response_format": Choice}
    with charged() as cost, refused_with(BadRequestError) as refused:
        client.chat.completions.parse(model=HALF.model, **ask)
    expect("forced_choice" in str(refused.error) and cost.tokens == 0, refused.error)
    answer = instruct.chat.completions.parse(model=INSTRUCT.model, **ask)
    expect(answer.choices[0].message.parsed.is_ill in ("yes", "no"), answer)
    return "400"


@feature("refusal")
def _() -> str:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    for more in ({"messages": image}, {"messages": MESSAGES, "top_p": 0.5}):
        with charged() as cost, refused_with(BadRequestError) as refused:
            client.chat.completions.create(**more, **ASK)
        expect(refused.error.param and cost.tokens == 0, refused.error)
    return "400"


@feature("logprobs")
def _() -> None:
    with OpenAI(base_url=CORPUS.url, api_key="EMPTY") as other:
        ask = {"model": CORPUS.model, "messages": MESSAGES, "max_tokens": 4}
        answer = other.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    expect(all(entry.logprob <= 0 for entry in answer.choices[0].logprobs.content))


@feature("idempotency")
def _() -> None:
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with charged() as cost:
        first, again = (client.chat.completions.create(messages=MESSAGES, **once, **ASK) for _ in range(2))
    expect(first == again and cost.tokens == first.usage.completion_tokens, cost)


@feature("lost_answer")
def _() -> None:
    patient = OpenAI(base_url=HALF.slow_url, api_key=HALF.key, max_retries=3, timeout=SHORT_SECONDS)
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with patient, charged() as cost:
        raw = patient.chat.completions.with_raw_response.create(messages=MESSAGES, **once, **ASK)
    expect(raw.retries_taken > 0, "no answer was lost")
    expect(raw.parse().usage.completion_tokens == cost.tokens > 0, cost)


@feature("privacy_body")
def _() -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **ASK)
    expect(answer.privacy["charged_nats"] > 0 and 0.5 < answer.privacy["mia_bound"] < 1)


@feature("privacy_headers")
def _() -> None:
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, **ASK)
    expect(float(raw.headers["paclm-charged-nats"]) == raw.parse().privacy["charged_nats"], raw.headers)
    expect(float(raw.headers["paclm-mia-bound"]) == raw.parse().privacy["mia_bound"], raw.headers)


@feature("responses")
def _() -> None:
    with charged() as cost:
        answer = client.responses.create(model=HALF.model, input=PROMPT, max_output_tokens=16, store=False)
    expect(answer.output_text and answer.usage.output_tokens == cost.tokens > 0, cost)
    with charged() as cost:
        ask = {"model": HALF.model, "input": PROMPT, "max_output_tokens": 16, "store": False}
        events = list(client.responses.create(**ask, stream=True))
    expect(events[-1].type in ("response.completed", "response.incomplete"), events[-1].type)
    expect(events[-1].response.usage.output_tokens == cost.tokens, cost)


@feature("responses_structured")
def _() -> None:
    ask = {"model": INSTRUCT.model, "max_output_tokens": 64, "temperature": 0, "store": False}
    with charged(INSTRUCT) as cost:
        answer = instruct.responses.parse(input=LETTER, text_format=Person, **ask)
    expect(isinstance(answer.output_parsed, Person) and answer.usage.output_tokens == cost.tokens > 0, cost)
    with instruct.responses.stream(input=LETTER, text_format=Person, **ask) as stream:
        expect(list(stream)[-1].type == "response.completed")
        expect(isinstance(stream.get_final_response().output_parsed, Person))
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    more = {**ask, "tools": [tool], "tool_choice": "required"}
    output = instruct.responses.create(input=question, **more).output
    (call,) = output
    expect(call.type == "function_call" and list(json.loads(call.arguments)) == ["city"], call)
    events = list(instruct.responses.create(input=question, stream=True, **more))
    (streamed,) = (event for event in events if event.type == "response.function_call_arguments.done")
    expect(list(json.loads(streamed.arguments)) == ["city"], streamed)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 24 degrees"}
    expect(instruct.responses.create(input=[*question, *output, result], **{**more, "tool_choice": "none"}).output_text)


@feature("empty_key")
def _() -> None:
    with OpenAI(base_url=CORPUS.url, api_key="EMPTY") as other:
        expect(other.completions.create(model=CORPUS.model, prompt=PROMPT, max_tokens=4).choices)


@feature("async")
def _() -> None:
    async def ask() -> int:
        async with AsyncOpenAI(base_url=HALF.url, api_key=HALF.key) as other:
            asks = (other.chat.completions.create(messages=MESSAGES, **ASK) for _ in range(4))
            return sum(answer.usage.completion_tokens for answer in await asyncio.gather(*asks))

    with charged() as cost:
        received = asyncio.run(ask())
    expect(received == cost.tokens > 0, cost)


run("openai")
