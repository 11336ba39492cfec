"""The OpenAPI document is true: schemathesis asks what it describes, and every answer is as described."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paclm.config import ServerConfig
from paclm.server.openapi import ChatCompletion, Completion, Error, History, Models, Overview, Privacy, RequestPlan
from paclm.server.responses_openapi import ResponseObject
from server.live import bearer, serve_student
from worlds.students import make_student

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,ignored_auth,missing_required_header"
)


@pytest.mark.parametrize("promise", ["half", "corpus", "student"])
def test_schemathesis_finds_nothing(start, start_corpus, small_base, chat_tokenizer, tmp_path, promise):
    """Bounded and seeded. Unforeseen answers, undescribed statuses and accepted nonsense would fail it."""
    settings = ServerConfig(default_max_tokens=2)
    if promise == "student":
        made = make_student(tmp_path / "clinic", small_base)
        with serve_student(made, str(small_base), chat_tokenizer, settings=settings) as live:
            check_document(live, tmp_path, "examples,fuzzing", max_examples=2)
    elif promise == "corpus":
        check_document(start_corpus(settings=settings), tmp_path, "examples,fuzzing", max_examples=2)
    else:
        live = start(tokenizer=chat_tokenizer, settings=settings)
        check_document(live, tmp_path, "examples,coverage,fuzzing", max_examples=5)


def check_document(live, tmp_path, phases, max_examples):
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{live.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {live.admin}", "--checks", CHECKS, "--seed", "1"),
        *("--max-examples", str(max_examples), "--phases", phases, "--workers", "1"),
        *("--generation-database", "none", "--no-color", "--request-timeout", "20"),
    ]
    environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "10 selected" in done.stdout
    assert sum(live.service.num_tokens.values()) > 0  # some of the questions were good ones
    assert live.service.state == "serving"


def test_answers_have_the_shapes_that_the_document_shows(start, chat_tokenizer):
    live = start(tokenizer=chat_tokenizer)
    prompt, messages = {"prompt": "the", "max_tokens": 3}, {"messages": [{"role": "user", "content": "the"}]}
    text = {"input": "the", "max_output_tokens": 3}
    for path, more, shape in (
        ("/v1/completions", prompt, Completion),
        ("/v1/chat/completions", messages, ChatCompletion),
        ("/v1/responses", text, ResponseObject),
        ("/v1/privacy/plan", prompt, RequestPlan),
        ("/v1/privacy/plan", messages, RequestPlan),
        ("/v1/privacy/plan", text, RequestPlan),
    ):
        shape.model_validate(live.http.post(path, json={"model": "clinic", **more}).json())
    for path, shape in (
        ("/v1/models", Models),
        ("/v1/privacy", Privacy),
        ("/v1/admin/overview", Overview),
        ("/v1/admin/history", History),
        ("/nothing", Error),
    ):
        shape.model_validate(live.as_admin(path))


def test_a_plan_costs_nothing_and_says_what_the_request_would(start):
    live = start(per_token="2^-8", total="2^-4", on_exhausted="refuse", quota=6)
    ask = {"model": "clinic", "prompt": "the"}

    def plan(key=live.ward, **more):
        return live.http.post("/v1/privacy/plan", json={**ask, **more}, headers=bearer(key)).json()

    many = plan(live.admin, prompt=["the", "a"], n=2, max_tokens=5)  # a key without a quota
    assert (many["max_tokens"], many["max_nats"], many["fits"]) == (20, 20 * 2.0**-8, False)
    assert [plan(max_tokens=6)["fits"], plan(max_tokens=7)["fits"]] == [True, False]
    assert plan(max_tokens=6)["remaining_quota_tokens"] == 6
    assert live.complete(max_tokens=7).status_code == 429
    assert (live.spent_tokens, live.curator.reserved_units) == (0, 0)


def test_unknown_fields_are_forbidden_and_no_status_is_described_that_is_never_sent(live):
    document = live.as_admin("/openapi.json")
    schemas = document["components"]["schemas"]
    for name in ("CompletionAsk", "ChatAsk", "ResponseAsk", "Message", "InputMessage", "InputPart", "StreamOptions"):
        assert schemas[name]["additionalProperties"] == {"type": "null"}, name
    assert "/metrics" not in document["paths"]
    routes = [route for methods in document["paths"].values() for route in methods.values()]
    assert not [route for route in routes if "422" in route["responses"]]
    assert "HTTPValidationError" not in schemas


def test_generators_of_clients_can_read_the_document(live):
    """They refuse constants that are objects and lists of unknown entries, and send a default list as a text."""

    def nodes(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        yield from (node for part in inner for node in nodes(part))
        if isinstance(value, dict):
            yield value

    schemas = live.as_admin("/openapi.json")["components"]["schemas"]
    for node in nodes(schemas):
        assert not isinstance(node.get("const"), dict | list), node
        assert node.get("type") != "array" or "items" in node or "prefixItems" in node, node
        assert not isinstance(node.get("default"), list), node
