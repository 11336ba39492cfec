"""The LiteLLM proxy before the server, asked by the official client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

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
from openai import BadRequestError, OpenAI

READY_SECONDS = 240


def _model(name: str, url: str, key: str, model: str, **more: object) -> dict[str, object]:
    return {"model_name": name, "litellm_params": {"model": f"openai/{model}", "api_base": url, "api_key": key, **more}}


CONFIG = {
    "model_list": [
        _model("clinic", HALF.url, HALF.key, HALF.model),
        _model("slow", HALF.slow_url, HALF.key, HALF.model, timeout=SHORT_SECONDS),
        _model("other", CORPUS.url, "EMPTY", CORPUS.model),
        _model("instruct", INSTRUCT.url, INSTRUCT.key, INSTRUCT.model),
    ],
    "litellm_settings": {"num_retries": 3, "disable_stop_sequence_limit": True},
    "general_settings": {"master_key": "sk-proxy", "forward_client_headers_to_llm_api": True},
}
"""JSON is YAML. Headers are forwarded for Idempotency-Key."""
Path("config.yaml").write_text(json.dumps(CONFIG))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
ROOT = f"http://127.0.0.1:{PORT}"
program = str(Path(sys.executable).with_name("litellm"))
proxy = subprocess.Popen(
    [program, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(PORT)],
    stdout=sys.stderr,
    stderr=sys.stderr,
)
client = OpenAI(base_url=f"{ROOT}/v1", api_key="sk-proxy", max_retries=0)
ASK = {"model": "clinic", "max_tokens": 8}


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"{ROOT}/health/liveliness", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@feature("models")
def _() -> None:
    expect("clinic" in [model.id for model in client.models.list()])


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
    expect(client.chat.completions.create(messages=[*MESSAGES, first, *MESSAGES], **ASK).choices)


@feature("stream")
def _() -> None:
    events = list(client.chat.completions.create(messages=MESSAGES, stream=True, **ASK))
    expect(events[-1].choices[0].finish_reason in ("length", "stop"), events[-1])


@feature("stream_usage")
def _() -> None:
    with charged() as cost:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        events = list(client.chat.completions.create(messages=MESSAGES, **more, **ASK))
    expect(events[-1].usage.completion_tokens == cost.tokens > 0, cost)


@feature("stop")
def _() -> None:
    choice = client.chat.completions.create(messages=MESSAGES, stop=STOPS, **{**ASK, "max_tokens": 64}).choices[0]
    expect(choice.finish_reason == "stop" and not set(choice.message.content) & set("aeiou"), choice)


@feature("n")
def _() -> None:
    with charged() as cost:
        answer = client.chat.completions.create(messages=MESSAGES, n=2, **ASK)
    expect(len(answer.choices) == 2 and answer.usage.completion_tokens == cost.tokens, cost)


@feature("seed")
def _() -> None:
    expect(client.chat.completions.create(messages=MESSAGES, seed=7, **ASK).choices)


@feature("context")
def _() -> None:
    with charged() as cost, refused_with(BadRequestError) as refused:
        client.chat.completions.create(messages=[{"role": "user", "content": TOO_LONG}], **ASK)
    expect("ContextWindowExceededError" in str(refused.error) and cost.tokens == 0, refused.error)


STRUCTURED: dict[str, Any] = {"model": "instruct", "max_tokens": 64, "temperature": 0}


@feature("json_schema")
def _() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    ask = {**STRUCTURED, "messages": [{"role": "user", "content": LETTER}], "response_format": form}
    with charged(INSTRUCT) as cost:
        answer = client.chat.completions.create(**ask)
    person(answer.choices[0].message.content)
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)
    events = list(client.chat.completions.create(stream=True, **ask))
    person("".join(event.choices[0].delta.content or "" for event in events if event.choices))


@feature("json_object")
def _() -> None:
    ask = {**STRUCTURED, "max_tokens": 200, "messages": [{"role": "user", "content": LETTER}]}
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **ask)
    expect(isinstance(json.loads(answer.choices[0].message.content), dict), answer)


@feature("tools")
def _() -> None:
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    ask = {**STRUCTURED, "messages": question, "tools": [WEATHER], "tool_choice": "required"}
    message = client.chat.completions.create(**ask).choices[0].message
    (call,) = message.tool_calls
    expect(call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"], call)
    with client.chat.completions.stream(**ask) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    expect(streamed.function.name == "weather" and "city" in json.loads(streamed.function.arguments), streamed)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 degrees"}
    answer = client.chat.completions.create(**{**ask, "messages": [*question, message, result], "tool_choice": "none"})
    expect(answer.choices[0].message.content, answer)


@feature("structured_outputs")
def _() -> None:
    outputs = {"structured_outputs": {"choice": ["better", "worse"]}}
    answer = client.chat.completions.create(messages=MESSAGES, extra_body=outputs, **STRUCTURED)
    expect(answer.choices[0].message.content in ("better", "worse"), answer)


@feature("forced_choice")
def _() -> str:
    with charged() as cost, refused_with(BadRequestError) as refused:
        client.chat.completions.create(messages=MESSAGES, response_format=CHOICE, **ASK)
    expect("forced_choice" in str(refused.error) and cost.tokens == 0, refused.error)
    answer = client.chat.completions.create(messages=MESSAGES, response_format=CHOICE, **STRUCTURED)
    expect(json.loads(answer.choices[0].message.content)["is_ill"] in ("yes", "no"), answer)
    return "400"


@feature("refusal")
def _() -> str:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    for more in ({"messages": image}, {"messages": MESSAGES, "top_p": 0.5}):
        with charged() as cost, refused_with(BadRequestError):
            client.chat.completions.create(**more, **ASK)
        expect(cost.tokens == 0, cost)
    return "400"


@feature("logprobs")
def _() -> None:
    ask = {"model": "other", "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(messages=MESSAGES, **ask)
    expect(all(entry.logprob <= 0 for entry in answer.choices[0].logprobs.content))


@feature("idempotency")
def _() -> None:
    once = {"extra_body": {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}}
    with charged() as cost:
        first, again = (client.chat.completions.create(messages=MESSAGES, **once, **ASK) for _ in range(2))
    expect(first.choices == again.choices and first.usage.completion_tokens == cost.tokens, cost)


@feature("lost_answer")
def _() -> None:
    once = {"extra_body": {"extra_headers": {"Idempotency-Key": str(uuid.uuid4())}}}
    with charged() as cost:
        answer = client.chat.completions.create(messages=MESSAGES, **once, **{**ASK, "model": "slow"})
    expect(cost.seconds >= SHORT_SECONDS, "no answer was lost")
    expect(answer.usage.completion_tokens == cost.tokens > 0, cost)


@feature("privacy_body")
def _() -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **ASK)
    expect(answer.privacy["charged_nats"] > 0, answer)


@feature("privacy_headers")
def _() -> None:
    raw = client.chat.completions.with_raw_response.create(messages=MESSAGES, **ASK)
    expect(float(raw.headers["llm_provider-paclm-charged-nats"]) > 0, raw.headers)


@feature("responses")
def _() -> None:
    with charged() as cost:
        answer = client.responses.create(model="clinic", input=PROMPT, max_output_tokens=16, store=False)
    expect(answer.usage.output_tokens == cost.tokens > 0, cost)
    ask = {"model": "clinic", "input": PROMPT, "max_output_tokens": 16, "store": False}
    events = list(client.responses.create(**ask, stream=True))
    expect(events[-1].type in ("response.completed", "response.incomplete"), events[-1])


@feature("empty_key")
def _() -> None:
    expect(client.chat.completions.create(messages=MESSAGES, model="other", max_tokens=4).choices)


try:
    until = time.monotonic() + READY_SECONDS
    while not _is_ready() and proxy.poll() is None and time.monotonic() < until:
        time.sleep(0.5)
    run("litellm")
finally:
    proxy.terminate()
    proxy.wait(30)
