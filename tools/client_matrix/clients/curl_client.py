"""curl: what the wire says, headers and events included."""

from __future__ import annotations

import gzip
import json
import subprocess
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
    STOPS,
    TOO_LONG,
    WEATHER,
    WEATHER_QUESTION,
    charged,
    expect,
    feature,
    person,
    run,
)

KEY = ("-H", f"authorization: Bearer {HALF.key}")
JSON = ("-H", "content-type: application/json")


def curl(url: str, *arguments: str, body: object = None, **fields: Any) -> tuple[int, dict[str, str], str]:
    """Status, headers and content."""
    content = body if isinstance(body, bytes) else json.dumps(fields).encode()
    data = ("--data-binary", "@-") if fields or body is not None else ()
    command = ["curl", "-sS", "-D", "headers.txt", "--max-time", "60", *arguments, *data, url]
    done = subprocess.run(command, input=content, capture_output=True, check=True)
    head = Path("headers.txt").read_text().strip().split("\r\n\r\n")[-1].splitlines()
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    return int(head[0].split()[1]), headers, done.stdout.decode()


def ask(path: str, *arguments: str, **fields: Any) -> dict[str, Any]:
    """A good answer, and what it cost."""
    with charged() as cost:
        status, headers, content = curl(f"{HALF.root}{path}", *KEY, *JSON, *arguments, model=HALF.model, **fields)
    expect(status == 200, content)
    return {"headers": headers, "text": content, "cost": cost.tokens}


def events(text: str) -> list[dict[str, Any]]:
    """Those of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def refusal(expected: int, **fields: Any) -> dict[str, Any]:
    """The error of a request that must be refused and cost nothing."""
    with charged() as cost:
        status, _, content = curl(f"{HALF.url}/chat/completions", *KEY, *JSON, model=HALF.model, **fields)
    expect((status, cost.tokens) == (expected, 0), content)
    error: dict[str, Any] = json.loads(content)["error"]
    return error


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"max_tokens": 8}


@feature("models")
def _() -> None:
    expect(json.loads(curl(f"{HALF.url}/models", *KEY)[2])["data"][0]["id"] == HALF.model)


@feature("completion")
def _() -> None:
    found = ask(TEXT, prompt=PROMPT, **SHORT)
    expect(json.loads(found["text"])["usage"]["completion_tokens"] == found["cost"] > 0)


@feature("chat")
def _() -> None:
    found = ask(CHAT, messages=MESSAGES, **SHORT)
    expect(json.loads(found["text"])["usage"]["completion_tokens"] == found["cost"] > 0)


@feature("multi_turn")
def _() -> None:
    first = json.loads(ask(CHAT, messages=MESSAGES, **SHORT)["text"])["choices"][0]["message"]
    ask(CHAT, messages=[*MESSAGES, first, *MESSAGES], **SHORT)


@feature("stream")
def _() -> None:
    found = ask(CHAT, messages=MESSAGES, stream=True, **SHORT)
    expect(found["text"].endswith("data: [DONE]\n\n") and len(events(found["text"])) > 2)


@feature("stream_usage")
def _() -> None:
    found = ask(CHAT, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT)
    expect(events(found["text"])[-1]["usage"]["completion_tokens"] == found["cost"] > 0)


@feature("stop")
def _() -> None:
    choice = json.loads(ask(TEXT, prompt=PROMPT, max_tokens=64, stop=STOPS)["text"])["choices"][0]
    expect(choice["finish_reason"] == "stop" and not set(choice["text"]) & set("aeiou"), choice)


@feature("n")
def _() -> None:
    found = ask(CHAT, messages=MESSAGES, n=2, **SHORT)
    expect(json.loads(found["text"])["usage"]["completion_tokens"] == found["cost"] > 2)


@feature("seed")
def _() -> None:
    ask(CHAT, messages=MESSAGES, seed=7, **SHORT)


@feature("context")
def _() -> None:
    error = refusal(400, messages=[{"role": "user", "content": TOO_LONG}])
    expect(error["code"] == "context_length_exceeded", error)


def structured(**fields: Any) -> str:
    """A good answer of the model that follows instructions."""
    key = ("-H", f"authorization: Bearer {INSTRUCT.key}")
    more = {"model": INSTRUCT.model, "max_tokens": 64, "temperature": 0, **fields}
    status, _, content = curl(f"{INSTRUCT.url}/chat/completions", *key, *JSON, **more)
    expect(status == 200, content)
    return content


@feature("json_schema")
def _() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"messages": [{"role": "user", "content": LETTER}], "response_format": form}
    person(json.loads(structured(**body))["choices"][0]["message"]["content"])
    streamed = events(structured(**body, stream=True))
    person("".join(event["choices"][0]["delta"].get("content") or "" for event in streamed))


@feature("json_object")
def _() -> None:
    body = {"messages": [{"role": "user", "content": LETTER}], "max_tokens": 200}
    answer = json.loads(structured(**body, response_format={"type": "json_object"}))
    expect(isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict), answer)


@feature("tools")
def _() -> None:
    question = [{"role": "user", "content": WEATHER_QUESTION}]
    body = {"messages": question, "tools": [WEATHER], "tool_choice": "required"}
    message = json.loads(structured(**body))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    expect(list(json.loads(call["function"]["arguments"])) == ["city"], call)
    deltas = [event["choices"][0]["delta"] for event in events(structured(**body, stream=True))]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    expect(pieces[0]["id"] and pieces[0]["function"]["name"] == "weather" and len(pieces) > 1, pieces)
    expect("city" in json.loads("".join(piece["function"]["arguments"] for piece in pieces)), pieces)
    turns = [*question, message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    answer = json.loads(structured(**{**body, "messages": turns, "tool_choice": "none"}))
    expect(answer["choices"][0]["message"]["content"], answer)


@feature("structured_outputs")
def _() -> None:
    answer = json.loads(structured(messages=MESSAGES, structured_outputs={"choice": ["better", "worse"]}))
    expect(answer["choices"][0]["message"]["content"] in ("better", "worse"), answer)


@feature("forced_choice")
def _() -> str:
    expect(refusal(400, messages=MESSAGES, response_format=CHOICE)["code"] == "forced_choice")
    structured(messages=MESSAGES, response_format=CHOICE)
    return "400"


@feature("refusal")
def _() -> str:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
    for more in ({"messages": image}, {"messages": MESSAGES, "top_p": 0.5}, {"messages": MESSAGES, "top_k": 5}):
        expect(refusal(400, **more)["param"])
    packed = gzip.compress(json.dumps({"model": HALF.model, "messages": MESSAGES}).encode())
    url = f"{HALF.url}/chat/completions"
    expect(curl(url, *KEY, *JSON, "-H", "content-encoding: gzip", body=packed)[0] == 415)
    expect(curl(f"{HALF.root}/health", "--head")[0] == 200)
    return "400, 415"


@feature("logprobs")
def _() -> None:
    fields = {"model": CORPUS.model, "prompt": PROMPT, "logprobs": 2, "max_tokens": 4}
    status, _, content = curl(f"{CORPUS.url}/completions", *JSON, **fields)
    expect(status == 200 and json.loads(content)["choices"][0]["logprobs"]["token_logprobs"], content)


@feature("idempotency")
def _() -> None:
    once = ("-H", f"idempotency-key: {uuid.uuid4()}")
    first, again = (ask(CHAT, *once, messages=MESSAGES, **SHORT) for _ in range(2))
    expect(first["text"] == again["text"] and again["cost"] == 0 < first["cost"])
    expect(again["headers"]["idempotent-replayed"] == "true", again["headers"])


@feature("lost_answer")
def _() -> None:
    headers = (*KEY, *JSON, "-H", f"idempotency-key: {uuid.uuid4()}")
    retry = ("--retry", "3", "--max-time", "4", "--retry-max-time", "60")
    body = json.dumps({"model": HALF.model, "messages": MESSAGES, **SHORT})
    command = ["curl", "-sS", *retry, *headers, "--data", body, f"{HALF.slow_url}/chat/completions"]
    with charged() as cost:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    expect("timed out" in done.stderr, f"no answer was lost: {done.stderr}")
    expect(json.loads(done.stdout)["usage"]["completion_tokens"] == cost.tokens > 0, cost)


@feature("privacy_body")
def _() -> None:
    expect(json.loads(ask(CHAT, messages=MESSAGES, **SHORT)["text"])["privacy"]["charged_nats"] > 0)


@feature("privacy_headers")
def _() -> None:
    found = ask(CHAT, messages=MESSAGES, **SHORT)
    told = json.loads(found["text"])["privacy"]
    expect(float(found["headers"]["paclm-charged-nats"]) == told["charged_nats"], found["headers"])


@feature("responses")
def _() -> None:
    found = ask("/v1/responses", input=PROMPT, max_output_tokens=16)
    expect(json.loads(found["text"])["usage"]["output_tokens"] == found["cost"] > 0)
    streamed = events(ask("/v1/responses", input=PROMPT, max_output_tokens=16, stream=True)["text"])
    expect(streamed[-1]["type"] in ("response.completed", "response.incomplete"), streamed[-1])


@feature("empty_key")
def _() -> None:
    fields = {"model": CORPUS.model, "prompt": PROMPT, "max_tokens": 4}
    for header in ((), ("-H", "authorization: Bearer EMPTY"), ("-H", "authorization: Bearer none")):
        expect(curl(f"{CORPUS.url}/completions", *JSON, *header, **fields)[0] == 200)


told = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
run(programs=(f"curl {told}",))
