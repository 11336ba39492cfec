"""LiteLLM as a library, with its provider for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import litellm
from check import (
    CHOICE,
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
from pydantic import BaseModel, Field

litellm.disable_stop_sequence_limit = True  # it would send the first four only
OPTIONS: dict[str, Any] = {"model": f"openai/{HALF.model}", "api_base": HALF.url, "api_key": HALF.key, "max_tokens": 8}
OTHER = {"model": f"openai/{CORPUS.model}", "api_base": CORPUS.url, "api_key": "EMPTY", "max_tokens": 4}

STRUCTURED: dict[str, Any] = {
    "model": f"openai/{INSTRUCT.model}",
    "api_base": INSTRUCT.url,
    "api_key": INSTRUCT.key,
    "max_tokens": 64,
    "temperature": 0,
}


class Person(BaseModel):
    """Of the letter."""

    name: str = Field(max_length=24)
    age: int


@feature("models")
def _() -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=HALF.url, api_key=HALF.key
    )
    expect(any(HALF.model in name for name in found), found)


@feature("completion")
def _() -> None:
    with charged() as cost:
        options = {**OPTIONS, "model": f"text-completion-openai/{HALF.model}"}
        answer = litellm.text_completion(prompt=PROMPT, **options)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("chat")
def _() -> None:
    with charged() as cost:
        answer = litellm.completion(messages=MESSAGES, **OPTIONS)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("multi_turn")
def _() -> None:
    first = litellm.completion(messages=MESSAGES, **OPTIONS).choices[0].message
    for turn in (first, first.model_dump()):
        expect(litellm.completion(messages=[*MESSAGES, turn, *MESSAGES], **OPTIONS).choices)


@feature("stream")
def _() -> None:
    events = list(litellm.completion(messages=MESSAGES, stream=True, **OPTIONS))
    expect(events[-1].choices[0].finish_reason in ("length", "stop"), events[-1])


@feature("stream_usage")
def _() -> None:
    with charged() as cost:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        events = list(litellm.completion(messages=MESSAGES, **more, **OPTIONS))
    expect(events[-1].usage.completion_tokens == cost.tokens > 0, cost)


@feature("stop")
def _() -> None:
    choice = litellm.completion(messages=MESSAGES, stop=STOPS, **{**OPTIONS, "max_tokens": 64}).choices[0]
    expect(choice.finish_reason == "stop" and not set(choice.message.content) & set("aeiou"), choice)


@feature("n")
def _() -> None:
    with charged() as cost:
        answer = litellm.completion(messages=MESSAGES, n=2, **OPTIONS)
    expect(len(answer.choices) == 2 and answer.usage.completion_tokens == cost.tokens, cost)


@feature("seed")
def _() -> None:
    expect(litellm.completion(messages=MESSAGES, seed=7, **OPTIONS).choices)


@feature("context")
def _() -> None:
    with charged() as cost, refused_with(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], **OPTIONS)
    expect(cost.tokens == 0, cost)


@feature("json_schema")
def _() -> None:
    ask = {**STRUCTURED, "messages": [{"role": "user", "content": LETTER}]}
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for form in (Person, schema):
        with charged(INSTRUCT) as cost:
            answer = litellm.completion(response_format=form, **ask)
        person(answer.choices[0].message.content)
        expect(answer.usage.completion_tokens == cost.tokens > 0, cost)
        events = list(litellm.completion(response_format=form, stream=True, **ask))
        person("".join(event.choices[0].delta.content or "" for event in events))


@feature("json_object")
def _() -> None:
    ask = {**STRUCTURED, "max_tokens": 200, "messages": [{"role": "user", "content": LETTER}]}
    answer = litellm.completion(response_format={"type": "json_object"}, **ask)
    expect(isinstance(json.loads(answer.choices[0].message.content), dict), answer)


@feature("tools")
def _() -> None:
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    ask = {**STRUCTURED, "messages": question, "tools": [WEATHER], "tool_choice": "required"}
    message = litellm.completion(**ask).choices[0].message
    (call,) = message.tool_calls
    expect(call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"], call)
    whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **ask)))
    (streamed,) = whole.choices[0].message.tool_calls
    expect(streamed.function.name == "weather" and "city" in json.loads(streamed.function.arguments), whole)
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sunny, 24 degrees"}
    for turn in (message, message.model_dump()):
        answer = litellm.completion(**{**ask, "messages": [*question, turn, result], "tool_choice": "none"})
        expect(answer.choices[0].message.content, answer)


@feature("structured_outputs")
def _() -> None:
    outputs = {"structured_outputs": {"choice": ["better", "worse"]}}
    answer = litellm.completion(messages=MESSAGES, extra_body=outputs, **STRUCTURED)
    expect(answer.choices[0].message.content in ("better", "worse"), answer)


@feature("forced_choice")
def _() -> str:
    with charged() as cost, refused_with(litellm.BadRequestError) as refused:
        litellm.completion(messages=MESSAGES, response_format=CHOICE, **OPTIONS)
    expect("forced_choice" in str(refused.error) and cost.tokens == 0, refused.error)
    answer = litellm.completion(messages=MESSAGES, response_format=CHOICE, **STRUCTURED)
    expect(json.loads(answer.choices[0].message.content)["is_ill"] in ("yes", "no"), answer)
    return "400"


@feature("refusal")
def _() -> str:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    for more in ({"messages": image}, {"messages": MESSAGES, "top_p": 0.5}):
        with charged() as cost, refused_with(litellm.BadRequestError):
            litellm.completion(**more, **OPTIONS)
        expect(cost.tokens == 0, cost)
    return "400"


@feature("logprobs")
def _() -> None:
    answer = litellm.completion(messages=MESSAGES, logprobs=True, top_logprobs=2, **OTHER)
    expect(all(entry.logprob <= 0 for entry in answer.choices[0].logprobs.content))


@feature("idempotency")
def _() -> None:
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with charged() as cost:
        first, again = (litellm.completion(messages=MESSAGES, **once, **OPTIONS) for _ in range(2))
    expect(first.id == again.id and first.usage.completion_tokens == cost.tokens, cost)


@feature("lost_answer")
def _() -> None:
    once = {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}
    with charged() as cost:
        more = {"num_retries": 3, "timeout": SHORT_SECONDS, **once}
        answer = litellm.completion(messages=MESSAGES, **more, **{**OPTIONS, "api_base": HALF.slow_url})
    expect(cost.seconds >= SHORT_SECONDS, "no answer was lost")
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("privacy_body")
def _() -> None:
    privacy = litellm.completion(messages=MESSAGES, **OPTIONS).privacy
    expect(privacy["charged_nats"] > 0 and privacy["mia_bound"] < 1, privacy)


@feature("privacy_headers")
def _() -> None:
    headers = litellm.completion(messages=MESSAGES, **OPTIONS)._hidden_params["additional_headers"]
    expect(float(headers["llm_provider-paclm-charged-nats"]) > 0, headers)
    expect(float(headers["llm_provider-paclm-mia-bound"]) < 1, headers)


@feature("responses")
def _() -> None:
    ask = {name: OPTIONS[name] for name in ("model", "api_base", "api_key")}
    with charged() as cost:
        answer = litellm.responses(input=PROMPT, max_output_tokens=16, store=False, **ask)
    expect(answer.usage.output_tokens == cost.tokens > 0, cost)
    events = list(litellm.responses(input=PROMPT, max_output_tokens=16, store=False, stream=True, **ask))
    expect(events[-1].type in ("response.completed", "response.incomplete"), events[-1])


@feature("empty_key")
def _() -> None:
    expect(litellm.completion(messages=MESSAGES, **OTHER).choices)


@feature("async")
def _() -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(messages=MESSAGES, **OPTIONS) for _ in range(4)))

    with charged() as cost:
        answers = asyncio.run(ask())
    expect(sum(answer.usage.completion_tokens for answer in answers) == cost.tokens > 0, cost)


run("litellm")
