"""Bodies that are too long, too deep, broken or strange: a 4xx each, nothing charged, and nothing repeated."""

import json
import logging
import random

import pytest
from pydantic import ValidationError

from paclm.config import ServerConfig
from paclm.server import telemetry
from paclm.server.chat_schemas import ChatAsk
from paclm.server.refusals import Refused
from paclm.server.responses_schemas import ResponseAsk
from paclm.server.schemas import CompletionAsk, check
from server.sockets import ask, post_with_key
from server.stepped import wait_until

WORD = "ZEBRA-7731"
"""Stands in every prompt; must be in no error and no log line."""
JSON = {"content-type": "application/json"}


def filled(**more):
    return json.dumps({"model": "clinic", "prompt": WORD, "max_tokens": 2, **more}).encode()


BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": WORD.encode(),
    "cut off": filled()[:-1],
    "two objects": filled() * 2,
    "a list": b"[" + filled() + b"]",
    "a text": json.dumps(WORD).encode(),
    "null": b"null",
    "broken UTF-8": filled().replace(b"ZEBRA", b"\xff\xfe\xc3"),
    "UTF-16": filled().decode().encode("utf-16"),
    "half a surrogate pair": b'{"model": "clinic", "prompt": "' + WORD.encode() + b'\\ud800"}',
    "NaN": filled()[:-1] + b', "temperature": NaN}',
    "infinity": filled()[:-1] + b', "temperature": 1e999}',
    "deep list": b'{"model": "clinic", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep unfinished": b'{"prompt": "' + WORD.encode() + b'", "metadata": ' + b"[" * 200_000,
    "a long number": b'{"model": "clinic", "prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    "a huge seed": filled(seed=2**70),
    "negative tokens": filled(prompt=[1, -1]),
    "huge tokens": filled(prompt=[2**63]),
    "half tokens": filled(prompt=[1.5]),
    "true tokens": filled(prompt=[True]),
    "texts and tokens": filled(prompt=[WORD, 3]),
    "lists and texts": filled(prompt=[[1], WORD]),
    "an empty list": filled(prompt=[]),
    "an empty list inside": filled(prompt=[[1], []]),
    "prompt as object": filled(prompt={WORD: WORD}),
    "prompt missing": b'{"model": "clinic"}',
    "prompt null": filled(prompt=None),
    "half a million tokens": filled(prompt=[1] * 300_000),
    "many texts": filled(prompt=[WORD] * 30_000),
    "many stops": filled(stop=[WORD] * 30_000),
    "an unknown field": filled(**{WORD: 1}),
    "an unknown field that is a text": filled(**{f"{WORD} and more": WORD}),
    "a model that is a text": filled(model=WORD),
    "a number for the model": filled(model=3),
    "a long user": filled(user=WORD * 1000),
    "metadata of things": filled(metadata={WORD: [WORD]}),
    "stream as text": filled(stream=WORD),
    "stop of a number": filled(stop=[WORD, 3]),
    "temperature as text": filled(temperature=WORD),
    "a long text": filled(prompt=WORD * 20_000),
}


USER = {"role": "user", "content": "the"}
CALL = {"id": "zebra", "type": "function", "function": {"name": "zebra", "arguments": "{}"}}
NOTHING_CHANGES = {
    "store": [False],
    "service_tier": ["auto", "default"],
    "safety_identifier": ["somebody"],
    "prompt_cache_key": ["one"],
    "user": ["somebody"],
    "metadata": [{}, {"a": "b"}],
    "top_p": [1, 1.0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}, {"type": "text", "json_schema": None}],
    "stop": [[], ["a"] * 16, [f"\n{n}" for n in range(64)]],
}
ONLY_CHAT = {
    "tools": [[]],
    "functions": [[]],
    "tool_choice": ["none", "auto"],
    "function_call": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "modalities": [["text"]],
    "logprobs": [False],
    "top_logprobs": [0],
    "reasoning_effort": ["none"],
    "verbosity": ["medium"],
}
REFUSED_EVERYWHERE = {
    "store": [True, 0],
    "service_tier": ["flex", "priority"],
    "top_p": [0.9, True],
    "metadata": [{"zebra": 3}, {"zebra": "a" * 513}, {"z" * 65: ""}, dict.fromkeys(map(str, range(17)), "")],
    "stop": ["", ["a"] * 65, ["a" * 1001], ["a" * 1000] * 5, [3]],
    "n": [0],
}
REFUSED_CHAT = {
    "tools": [{}, "zebra"],
    "functions": [[{}]],
    "tool_choice": ["required", "zebra", {"type": "function", "function": {"name": "zebra"}}],
    "function_call": [{"name": "zebra"}],
    "modalities": [["text", "audio"], []],
    "audio": [{"voice": "zebra"}],
    "response_format": ["json_object", []],
    "top_logprobs": [3],
    "reasoning_effort": ["low"],
    "verbosity": ["low"],
    "web_search_options": [{}],
    "prediction": [{"type": "content"}],
}
REFUSED_COMPLETIONS = {"suffix": ["end"], "best_of": [2], "messages": [[USER]]}


def refusal_of(shape, **fields):
    with pytest.raises(Refused) as refused:
        check(shape, {"model": "clinic", **fields})
    assert refused.value.status == 400
    assert "zebra" not in refused.value.message.lower()
    return refused.value


def cases(*tables):
    return [(name, value) for table in tables for name, values in table.items() for value in values]


def test_what_changes_nothing_is_taken():
    for name, value in cases(NOTHING_CHANGES, ONLY_CHAT):
        assert check(ChatAsk, {"model": "clinic", "messages": [USER], name: value}), (name, value)
    for name, value in cases(NOTHING_CHANGES, {"suffix": [""], "best_of": [1]}):
        assert check(CompletionAsk, {"model": "clinic", "prompt": "the", name: value}), (name, value)


def test_null_is_as_good_as_leaving_a_field_out_whatever_the_field():
    names = [*ChatAsk.model_fields, *CompletionAsk.model_fields, "top_k", "prediction", "zebra"]
    nulls = {name: None for name in names if name not in ("model", "prompt", "messages")}
    plain = check(ChatAsk, {"model": "clinic", "messages": [USER]})
    assert check(ChatAsk, {"model": "clinic", "messages": [{**USER, "zebra": None}], **nulls}) == plain
    plain = check(CompletionAsk, {"model": "clinic", "prompt": "the"})
    assert check(CompletionAsk, {"model": "clinic", "prompt": "the", **nulls}) == plain
    assert refusal_of(CompletionAsk, prompt=None).param == "prompt"
    assert refusal_of(ChatAsk, messages=None).param == "messages"


def test_what_would_be_ignored_or_change_the_guarantee_is_refused_with_its_place():
    for name, value in cases(REFUSED_EVERYWHERE, REFUSED_CHAT):
        refused = refusal_of(ChatAsk, messages=[USER], **{name: value})
        assert refused.param == name, (name, value)
        assert name in refused.message
    for name, value in cases(REFUSED_EVERYWHERE, REFUSED_COMPLETIONS):
        assert refusal_of(CompletionAsk, prompt="the", **{name: value}).param == name, (name, value)


ADDED = ("refusal", "annotations", "reasoning", "reasoning_content", "provider_specific_fields")
ADDED += ("reasoning_items", "thinking_blocks", "images", "audio", "function_call")


@pytest.mark.parametrize("name", ADDED)
def test_what_libraries_add_to_a_message_must_be_empty(name):
    for empty in (None, "", [], {}, {"refusal": None}):  # the last as LiteLLM returns it
        assert check(ChatAsk, {"model": "clinic", "messages": [USER, {**USER, name: empty}]})
    for full in ("zebra", ["zebra"], {"zebra": "zebra"}, {"a": ""}, 0, False):
        refused = refusal_of(ChatAsk, messages=[USER, {**USER, name: full}])
        assert refused.param == f"messages[1].{name}"
        assert refused.message.startswith(f"messages[1].{name}: ")


@pytest.mark.parametrize(
    ("message", "place", "said"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}, ".content[1]", "images"),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "zebra"}}]}, ".content[0]", "audio"),
        ({"content": [{"type": "file", "file": {}}]}, ".content[0]", "files"),
        ({"content": [{"type": "zebra", "text": "a"}]}, ".content[0].type", "text"),
        ({"content": [{"type": "text", "text": "a", "Zebra": 1}]}, ".content[0]", "not known"),
        ({"content": [{"type": "text", "text": 3}]}, ".content[0].text", "string"),
        ({"content": 3}, ".content", "string"),
        ({"content": None}, ".content", "required"),
        ({"content": None, "tool_calls": [{"id": "zebra"}]}, ".tool_calls[0].function", "required"),
        ({"tool_calls": [CALL]}, ".tool_calls", "only the assistant"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, ".tool_calls[0].type", "function"),
        ({"role": "assistant", "tool_calls": "zebra"}, ".tool_calls", "list"),
        ({"role": "tool"}, ".tool_call_id", "required"),
        ({"role": "function", "name": "zebra"}, ".role", "the role tool"),
        ({"role": "zebra"}, ".role", "assistant"),
        ({"role": None}, ".role", "required"),
        ({"audio": {"id": "zebra"}}, ".audio", "audio is not offered"),
        ({"a_field": 1}, ".a_field", "not known"),
        ({"Zebra and more": 1}, "", "not known"),
    ],
)
def test_a_refusal_names_the_place_in_a_message_and_repeats_nothing(message, place, said):
    refused = refusal_of(ChatAsk, messages=[USER, {**USER, **message}])
    assert refused.param == f"messages[1]{place}"
    assert f"messages[1]{place}" in refused.message
    assert said in refused.message


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (ChatAsk, {"messages": [1] * 2000}),
        (ChatAsk, {"messages": [{"role": "user", "content": [1] * 60}] * 500}),
        (ChatAsk, {"messages": [{"role": "user", "content": "x", **dict.fromkeys(map(str, range(500)), 1)}]}),
        (CompletionAsk, {"prompt": "x", **dict.fromkeys(map(str, range(2000)), 1)}),
        (ResponseAsk, {"input": [1] * 2000}),
        (ResponseAsk, {"input": [{"role": "user", "content": [{}] * 2000}]}),
        (ResponseAsk, {"input": [{"type": "function_call_output", "call_id": "x", "output": [{}] * 60}] * 500}),
        (ResponseAsk, {"input": "x", "tools": [1] * 100, "tool_choice": {"type": "allowed_tools", "tools": [1] * 100}}),
    ],
)
def test_a_body_that_is_wrong_in_thousands_of_places_gets_few_errors(shape, fields):
    """All are made on the event loop: half a million of them, in 1 MB, held up every client for seconds."""
    with pytest.raises(ValidationError) as refused:
        shape.model_validate({"model": "clinic", **fields})
    assert refused.value.error_count() <= 4


@pytest.mark.parametrize(("shape", "name"), [(ChatAsk, "messages"), (ResponseAsk, "input")])
def test_messages_beyond_the_limit_are_not_read(shape, name):
    """The one behind the limit is no message, and the error is about the number."""
    turn = {"role": "user", "content": "x"}
    with pytest.raises(ValidationError) as refused:
        shape.model_validate({"model": "clinic", name: [turn] * 512 + [1] * 9})
    assert [error["type"] for error in refused.value.errors()] == ["too_long"]


@pytest.fixture
def said(live):
    """Everything that is logged, as it would be written; also what is said below the level of warnings."""
    lines = []

    class Listener(logging.Handler):
        def emit(self, record):
            lines.append(telemetry.JsonLines().format(record))

    listener, ours = Listener(), logging.getLogger(telemetry.LOGGER)
    level = ours.level
    logging.getLogger().addHandler(listener)
    ours.setLevel(logging.DEBUG)
    yield lines
    ours.setLevel(level)
    logging.getLogger().removeHandler(listener)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/privacy/plan", "/v1/chat/completions"])
def test_every_bad_body_gets_a_4xx_that_repeats_nothing(live, said, path):
    for name, body in BODIES.items():
        answer = live.http.post(path, content=body, headers=JSON)
        assert 400 <= answer.status_code < 500, (name, answer.status_code)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert WORD.lower() not in answer.text.lower(), name
    assert live.spent_tokens == 0
    assert live.curator.reserved_units == 0
    assert all(key.reserved_tokens == key.used_tokens == 0 for key in live.keys.list())
    assert len(said) >= len(BODIES)
    assert not [line for line in said if WORD.lower() in line.lower()]


@pytest.mark.parametrize("prompt", [[10**6], [[1], [10**6]], [1, -1]])
def test_bad_token_ids_are_a_matter_of_the_prompt(shared, prompt):
    answer = shared.complete(prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_an_answer_leaves_no_text_in_the_log_and_the_search_would_find_it(live, said):
    text = live.complete(prompt=f"{WORD} the patient", max_tokens=20).json()["choices"][0]["text"]
    live.complete(prompt=f"{WORD} the patient", max_tokens=20, stream=True)
    wait_until(lambda: len([line for line in said if '"answered"' in line]) >= 2)
    assert len([line for line in said if '"answered"' in line]) == 2
    assert not [line for line in said if WORD in line or text in line]
    logging.getLogger("uvicorn.error").error(f"{WORD} in a template")
    assert [line for line in said if WORD in line]


def test_a_hundred_megabytes_are_refused_whether_announced_or_streamed(live):
    piece = b" " * 2**20
    for content in ((piece for _ in range(100)), piece * 100):
        answer = live.http.post("/v1/completions", content=content, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert live.complete().status_code == 200


def test_a_million_token_ids_are_refused(start):
    live = start(settings=ServerConfig(max_body_bytes=10_000_000))
    answer = live.http.post("/v1/completions", content=filled(prompt=list(range(1_000_000))), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert live.spent_tokens == 0


def test_a_body_that_does_not_come_is_not_waited_for(start):
    live = start(settings=ServerConfig(read_seconds=0.3))
    said = ask(live, post_with_key(live) + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n")
    assert said.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in said


@pytest.mark.parametrize(
    ("status", "content_type"),
    [
        *((415, name) for name in ("", "text/plain", "multipart/form-data", "application/xml")),
        (415, "application/json; charset=utf-16"),
        *((200, name) for name in ("application/json", "Application/JSON", 'application/json; charset="UTF-8"')),
    ],
)
def test_a_body_is_json_however_that_is_spelt_and_nothing_else(shared, status, content_type):
    answer = shared.http.post("/v1/completions", content=filled(), headers={"content-type": content_type})
    assert answer.status_code == status


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "zstd", WORD])
def test_a_compressed_body_is_refused_before_it_is_read(shared, encoding):
    for content in (filled(), b"\x1f\x8b broken"):
        answer = shared.http.post("/v1/completions", content=content, headers={**JSON, "content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_encoding")
        assert WORD not in answer.text
    plain = shared.http.post("/v1/completions", content=filled(), headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200


def test_random_damage_to_a_good_body_never_breaks_the_server(live):
    chance = random.Random(5)
    good = filled(n=1, stop=["a"], stream_options={"include_usage": True}, stream=True, seed=3)
    for _ in range(300):
        body = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(body))
            match chance.randrange(3):
                case 0:
                    body[at] = chance.randrange(256)
                case 1:
                    del body[at : at + chance.randint(1, 9)]
                case _:
                    body[at:at] = chance.choice([b"[", b"{", b'"', b"\\u0000", b"null", b"-1", b"1e400", b"\x00"])
        headers = {**JSON, chance.choice(["x-a", "accept", "range", "idempotency-key"]): "x" * chance.randint(1, 3000)}
        assert live.http.post("/v1/completions", content=bytes(body), headers=headers).status_code < 500
    assert live.service.state == "serving"


def test_an_empty_list_is_refused_in_plain_words():
    assert refusal_of(ChatAsk, messages=[]).message == "messages: must not be empty."


SCHEMA = {"type": "object", "properties": {"zebra": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "zebra", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "zebra"}}
FORMS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": FORMAT},
    {"response_format": {**FORMAT, "json_schema": {**FORMAT["json_schema"], "strict": True, "description": "x"}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    {"structured_outputs": {"regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"grammar": 'start: "a"'}},
    {"structured_outputs": {"json_object": True}},
]
BAD_FORMS = {
    "response_format.json_schema": [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {**FORMAT, "type": "json_object"}},
    ],
    "response_format.json_schema.schema": [
        {"response_format": {**FORMAT, "json_schema": {"name": "zebra"}}},
        {"response_format": {**FORMAT, "json_schema": {"name": "zebra", "schema": "{}"}}},
    ],
    "response_format.json_schema.name": [
        {"response_format": {**FORMAT, "json_schema": {"name": "a zebra", "schema": SCHEMA}}},
        {"response_format": {**FORMAT, "json_schema": {"schema": SCHEMA}}},
    ],
    "response_format.type": [{"response_format": {"type": "zebra"}}, {"response_format": {}}],
    "structured_outputs": [
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json": SCHEMA, "regex": "zebra"}},
        {"structured_outputs": {"regex": "zebra"}, "response_format": {"type": "json_object"}},
    ],
    "structured_outputs.json": [
        {"structured_outputs": {"json": "zebra"}},
        {"structured_outputs": {"json": "[]"}},
        {"structured_outputs": {"json": ["zebra"]}},
        {"structured_outputs": {"json": "[" * 5000}},
    ],
    "structured_outputs.regex": [{"structured_outputs": {"regex": ""}}],
    "structured_outputs.choice": [{"structured_outputs": {"choice": []}}],
    "structured_outputs.choice[1]": [{"structured_outputs": {"choice": ["zebra", ""]}}],
    "structured_outputs.guided": [{"structured_outputs": {"guided": "zebra"}}],
    "guided_json": [{"guided_json": SCHEMA}],
}
BAD_TOOLS = {
    "tools[0].type": [{"tools": [{**TOOL, "type": "custom"}]}, {"tools": [{**TOOL, "type": "web_search"}]}],
    "tools[0].function": [{"tools": [{"type": "function"}]}],
    "tools[0].function.name": [{"tools": [{"type": "function", "function": {"name": 'zebra "'}}]}],
    "tools[0].function.parameters": [{"tools": [{"type": "function", "function": {"name": "z", "parameters": "z"}}]}],
    "tools": [{"tools": [TOOL, TOOL]}, {"tools": [TOOL] * 129}],
    "tool_choice": [
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ],
    "tool_choice.function": [{"tools": [TOOL], "tool_choice": {"type": "function"}}],
    "tool_choice.allowed_tools": [{"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}],
    "tool_choice.allowed_tools.mode": [
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "zebra", "tools": [TOOL]}}}
    ],
    "structured_outputs": [{"tools": [TOOL], "tool_choice": TOOL, "structured_outputs": {"regex": "zebra"}}],
}


def test_every_form_of_an_answer_is_taken_and_a_wrong_one_refused_with_its_place():
    for shape, fields in ((ChatAsk, {"messages": [USER]}), (CompletionAsk, {"prompt": "the"})):
        for form in FORMS:
            assert check(shape, {"model": "clinic", **fields, **form}).is_structured, form
        for place, bodies in BAD_FORMS.items():
            for body in bodies:
                assert refusal_of(shape, **fields, **body).param == place, body


def test_tools_that_cannot_be_called_are_refused_with_their_place():
    for place, bodies in BAD_TOOLS.items():
        for body in bodies:
            assert refusal_of(ChatAsk, messages=[USER], **body).param == place, body
    assert refusal_of(CompletionAsk, prompt="the", tools=[TOOL]).param == "tools"
    said = refusal_of(ChatAsk, messages=[USER], functions=[{"name": "zebra"}]).message
    assert "Use tools" in said


def only_a(mode):
    tools = [{"type": "function", "function": {"name": "a"}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "callable_names", "must"),
    [
        (None, "ab", False),
        ("auto", "ab", False),
        ("none", "", False),
        ("required", "ab", True),
        ({"type": "function", "function": {"name": "b"}}, "b", True),
        (only_a("auto"), "a", False),
        (only_a("required"), "a", True),
    ],
)
def test_the_choice_says_which_tools_may_and_must_be_called(choice, callable_names, must):
    tools = [{"type": "function", "function": {"name": name, "strict": True}} for name in "ab"]
    ask = check(ChatAsk, {"model": "clinic", "messages": [USER], "tools": tools, "tool_choice": choice})
    assert "".join(function.name for function in ask.callable_tools) == callable_names
    assert (ask.must_call, ask.is_structured) == (must, bool(callable_names))
