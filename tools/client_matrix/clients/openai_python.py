"""openai-python, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import uuid

from check import (
    CORPUS,
    HALF,
    MESSAGES,
    PROMPT,
    SHORT_SECONDS,
    STOPS,
    TOO_LONG,
    charged,
    expect,
    feature,
    refused_with,
    run,
)
from openai import AsyncOpenAI, BadRequestError, OpenAI

client = OpenAI(base_url=HALF.url, api_key=HALF.key, max_retries=0)
ASK = {"model": HALF.model, "max_tokens": 8}


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


@feature("refusal")
def _() -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    for more in ({"messages": MESSAGES, "tools": [tool]}, {"messages": image}, {"messages": MESSAGES, "top_p": 0.5}):
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
