"""The command `llm`, with the server in its extra-openai-models.yaml.

It takes one stop string, one answer, no timeout, and headers for all calls alike: no Idempotency-Key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from check import (
    CORPUS,
    HALF,
    INSTRUCT,
    LETTER,
    PERSON,
    PROMPT,
    TOO_LONG,
    WEATHER_QUESTION,
    charged,
    expect,
    feature,
    person,
    run,
)

LLM = str(Path(sys.executable).with_name("llm"))
FOLDER = Path(os.environ.setdefault("LLM_USER_PATH", str(Path.cwd() / "llm")))
QUESTION = "How is the patient?"


def _entry(model_id: str, name: str, url: str, key: str, **more: object) -> dict[str, object]:
    return {"model_id": model_id, "model_name": name, "api_base": url, "api_key_name": key, **more}


MODELS = [
    _entry("clinic", HALF.model, HALF.url, "clinic"),
    _entry("clinic-text", HALF.model, HALF.url, "clinic", completion=True),
    _entry("other", CORPUS.model, CORPUS.url, "other"),
    _entry("instruct", INSTRUCT.model, INSTRUCT.url, "instruct", supports_schema=True, supports_tools=True),
    _entry("clinic-schema", HALF.model, HALF.url, "clinic", supports_schema=True),
]
FOLDER.mkdir()
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))  # JSON is YAML
(FOLDER / "keys.json").write_text(json.dumps({"clinic": HALF.key, "other": "EMPTY", "instruct": INSTRUCT.key}))


def llm(*arguments: str, fails: bool = False) -> str:
    """What it prints, on the output or as its error."""
    done = subprocess.run([LLM, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    expect((done.returncode != 0) is fails, done.stderr[-600:])
    return done.stderr if fails else done.stdout


def last() -> dict[str, object]:
    """What it has logged about the last answer."""
    found: dict[str, object] = json.loads(llm("logs", "-n", "1", "--json"))[0]
    return found


SHORT = ("-o", "max_tokens", "8")


@feature("models")
def _() -> None:
    expect("clinic" in llm("models", "list"))


@feature("completion")
def _() -> None:
    with charged() as cost:
        expect(llm("prompt", "-m", "clinic-text", *SHORT, PROMPT))
    expect(cost.tokens > 0, cost)


@feature("chat")
def _() -> None:
    with charged() as cost:
        llm("prompt", "-m", "clinic", "--no-stream", *SHORT, QUESTION)
    expect(last()["output_tokens"] == cost.tokens > 0, cost)


@feature("multi_turn")
def _() -> None:
    llm("prompt", "-m", "clinic", *SHORT, QUESTION)
    llm("prompt", "--continue", *SHORT, QUESTION)


@feature("stream")
def _() -> None:
    expect(llm("prompt", "-m", "clinic", *SHORT, QUESTION))


@feature("stream_usage")
def _() -> None:
    with charged() as cost:
        llm("prompt", "-m", "clinic", *SHORT, QUESTION)
    expect(last()["output_tokens"] == cost.tokens > 0, cost)


@feature("seed")
def _() -> None:
    llm("prompt", "-m", "clinic", "-o", "seed", "7", *SHORT, QUESTION)


@feature("context")
def _() -> None:
    with charged() as cost:
        expect("context" in llm("prompt", "-m", "clinic", *SHORT, TOO_LONG, fails=True))
    expect(cost.tokens == 0, cost)


STRUCTURED = ("-m", "instruct", "-o", "max_tokens", "64", "-o", "temperature", "0")


@feature("json_schema")
def _() -> None:
    for more in ((), ("--no-stream",)):
        person(llm("prompt", *STRUCTURED, *more, "--schema", json.dumps(PERSON), LETTER))
    expect({"name", "age"} <= set(json.loads(llm("prompt", *STRUCTURED, "--schema", "name, age int", LETTER))))


@feature("json_object")
def _() -> None:
    said = llm("prompt", *STRUCTURED, "-o", "max_tokens", "200", "-o", "json_object", "1", LETTER)
    expect(isinstance(json.loads(said), dict), said)


@feature("tools")
def _() -> None:
    """llm cannot force a call, so the model decides; called or not, the chain ends and is logged."""
    code = "def weather(city: str) -> str:\n    'The weather in a city.'\n    return 'sunny in ' + city"
    with charged(INSTRUCT) as cost:
        llm("prompt", *STRUCTURED, "--functions", code, "--chain-limit", "0", WEATHER_QUESTION)
    expect(cost.tokens > 0 and last()["tools"][0]["name"] == "weather", last())


@feature("forced_choice")
def _() -> str:
    choice = {"type": "object", "properties": {"is_ill": {"enum": ["yes", "no"]}}, "required": ["is_ill"]}
    schema = json.dumps({**choice, "additionalProperties": False})
    with charged() as cost:
        said = llm("prompt", "-m", "clinic-schema", *SHORT, "--schema", schema, QUESTION, fails=True)
    expect("forced_choice" in said, said)
    expect(cost.tokens == 0, cost)
    expect(json.loads(llm("prompt", *STRUCTURED, "--schema", schema, QUESTION))["is_ill"] in ("yes", "no"))
    return "400"


@feature("refusal")
def _() -> str:
    with charged() as cost:
        llm("prompt", "-m", "clinic", "-o", "top_p", "0.5", *SHORT, QUESTION, fails=True)
    expect(cost.tokens == 0, cost)
    return "400"


@feature("empty_key")
def _() -> None:
    llm("prompt", "-m", "other", *SHORT, QUESTION)


@feature("async")
def _() -> None:
    llm("prompt", "-m", "clinic", "--async", *SHORT, QUESTION)


run("llm")
