"""LangChain's ChatOpenAI and OpenAI, and LangChain's own suite for chat models."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from check import (
    CORPUS,
    HALF,
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
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI
from openai import BadRequestError

OPTIONS: dict[str, Any] = {"model": HALF.model, "base_url": HALF.url, "api_key": HALF.key, "max_tokens": 8}
chat = ChatOpenAI(**OPTIONS, max_retries=0)
QUESTION = "How is the patient?"


@feature("completion")
def _() -> None:
    with charged() as cost:
        said = OpenAI(**OPTIONS, max_retries=0).invoke(PROMPT)
    expect(isinstance(said, str) and cost.tokens > 0, cost)


@feature("chat")
def _() -> None:
    with charged() as cost:
        message = chat.invoke(QUESTION)
    expect(message.usage_metadata["output_tokens"] == cost.tokens > 0, cost)


@feature("multi_turn")
def _() -> None:
    first = chat.invoke(QUESTION)
    expect(chat.invoke([HumanMessage(QUESTION), first, HumanMessage(QUESTION)]).usage_metadata)


@feature("stream")
def _() -> None:
    expect(len(list(chat.stream(QUESTION))) > 1)


@feature("stream_usage")
def _() -> None:
    with charged() as cost:
        pieces = list(ChatOpenAI(**OPTIONS, stream_usage=True).stream(QUESTION))
    counts = [piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata]
    expect(sum(counts) == cost.tokens > 0, (counts, cost))


@feature("stop")
def _() -> None:
    message = chat.bind(max_tokens=64).invoke(QUESTION, stop=STOPS)
    expect(message.response_metadata["finish_reason"] == "stop" and not set(message.content) & set("aeiou"))


@feature("n")
def _() -> None:
    with charged() as cost:
        found = ChatOpenAI(**OPTIONS, n=2).generate([[HumanMessage(QUESTION)]])
    expect(len(found.generations[0]) == 2 and found.llm_output["token_usage"]["completion_tokens"] == cost.tokens)


@feature("seed")
def _() -> None:
    expect(ChatOpenAI(**OPTIONS, seed=7).invoke(QUESTION).usage_metadata)


@feature("context")
def _() -> None:
    with charged() as cost, refused_with(ContextOverflowError):
        chat.invoke(TOO_LONG)
    expect(cost.tokens == 0, cost)


@feature("refusal")
def _() -> str:
    schema = {"title": "Note", "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    for method in ("json_schema", "function_calling", "json_mode"):
        with charged() as cost, refused_with(BadRequestError):
            chat.with_structured_output(schema, method=method).invoke(f"{QUESTION} JSON")
        expect(cost.tokens == 0, cost)
    return "400"


@feature("logprobs")
def _() -> None:
    options = {**OPTIONS, "model": CORPUS.model, "base_url": CORPUS.url, "api_key": "EMPTY"}
    message = ChatOpenAI(**options, logprobs=True, top_logprobs=2).invoke(QUESTION)
    expect(all(entry["logprob"] <= 0 for entry in message.response_metadata["logprobs"]["content"]))


@feature("idempotency")
def _() -> None:
    once = {"Idempotency-Key": str(uuid.uuid4())}
    with charged() as cost:
        first, again = (chat.invoke(QUESTION, extra_headers=once) for _ in range(2))
    expect(first.content == again.content and first.usage_metadata["output_tokens"] == cost.tokens, cost)


@feature("lost_answer")
def _() -> None:
    patient = ChatOpenAI(**{**OPTIONS, "base_url": HALF.slow_url}, max_retries=3, timeout=SHORT_SECONDS)
    with charged() as cost:
        message = patient.invoke(QUESTION, extra_headers={"Idempotency-Key": str(uuid.uuid4())})
    expect(cost.seconds >= SHORT_SECONDS, "no answer was lost")
    expect(message.usage_metadata["output_tokens"] == cost.tokens > 0, cost)


@feature("privacy_headers")
def _() -> None:
    message = ChatOpenAI(**OPTIONS, include_response_headers=True).invoke(QUESTION)
    headers = message.response_metadata["headers"]
    expect(float(headers["paclm-charged-nats"]) > 0 and float(headers["paclm-mia-bound"]) < 1, headers)


@feature("responses")
def _() -> None:
    options = {**OPTIONS, "max_tokens": 16}
    with charged() as cost:
        message = ChatOpenAI(**options, use_responses_api=True, store=False).invoke(QUESTION)
    expect(message.usage_metadata["output_tokens"] == cost.tokens > 0, cost)
    expect(len(list(ChatOpenAI(**options, use_responses_api=True, store=False).stream(QUESTION))) > 1)


@feature("empty_key")
def _() -> None:
    options = {**OPTIONS, "model": CORPUS.model, "base_url": CORPUS.url, "api_key": "EMPTY"}
    expect(ChatOpenAI(**options).invoke(QUESTION).usage_metadata)


@feature("async")
def _() -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(chat.ainvoke(QUESTION) for _ in range(4)))

    with charged() as cost:
        messages = asyncio.run(ask())
    expect(sum(message.usage_metadata["output_tokens"] for message in messages) == cost.tokens > 0, cost)


figures: dict[str, str] = {}


@feature("suite")
def _() -> None:
    suite = Path(__file__).with_name("langchain_suite.py")
    loop = "asyncio_default_{}_loop_scope=session"  # ChatOpenAI keeps its connections from one test to the next
    asynchronous = ("-o", "asyncio_mode=auto", "-o", loop.format("fixture"), "-o", loop.format("test"))
    nothing_else = ("-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider")
    local = ("--disable-socket", "--allow-hosts=127.0.0.1")
    command = [sys.executable, "-m", "pytest", "-q", *nothing_else, *asynchronous, *local, str(suite)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], file=sys.stderr)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|xfailed|error)", done.stdout)
    }
    shown = [f"{counts.get(word, 0)} {word}" for word in ("passed", "skipped", "xfailed", "failed")]
    figures["its standard suite for chat models (tools, JSON and images declared unsupported)"] = ", ".join(shown)
    expect(done.returncode == 0 and counts["passed"] > 10, shown)


run("langchain-openai", "langchain-core", "langchain-tests", figures=figures)
