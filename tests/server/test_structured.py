"""Structured output over HTTP: every form, both endpoints, whole and streamed, and what it costs."""

import json
import re
import shutil
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from curator.deployments import set_mechanism
from paclm import Workspace
from paclm.config import ServerConfig
from paclm.server.grammar_checks import without_words_of
from paclm.server.openapi import ChatCompletion, Completion
from server.live import serve
from server.writer import Writer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SAID = '{"city": "Rome", "unit": "C"}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "where"}]


@pytest.fixture(scope="module")
def writer(small_tokenizer):
    return Writer(small_tokenizer)


@pytest.fixture(scope="module")
def live(template, tmp_path_factory, chat_tokenizer, writer):
    """A server whose model writes what a test wants it to, as far as the grammar allows."""
    folder = tmp_path_factory.mktemp("structured") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, per_token="2^-20", total="2^-4", support_size=40, charge="dissent")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS"):
            environment.delenv(name, raising=False)
        with serve(Workspace.open(folder), writer, chat_tokenizer) as live:
            environment.undo()
            yield live


@pytest.fixture
def ask(live, writer):
    """Ask for an answer of a model that wants to say this; returns the choice, and for a stream the joined pieces."""

    def ask(text, path="chat/completions", dissent=0.0, headers=None, **fields):
        writer.text, writer.dissent = text, dissent
        prompt = {"messages": USER} if path.startswith("chat") else {"prompt": "where "}
        body = {"model": "clinic", "max_tokens": 200, "temperature": 0, **prompt, **fields}
        answer = live.http.post(f"/v1/{path}", json=body, headers=headers or {})
        assert answer.status_code == 200, answer.text
        if fields.get("stream"):
            return joined(answer.text)
        shape = ChatCompletion if path.startswith("chat") else Completion
        shape.model_validate(answer.json())
        return answer.json()["choices"][0]

    return ask


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def joined(text):
    choices = [choice for event in events_of(text) for choice in event["choices"]]
    content = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return {"content": content, **{k: v for k, v in choices[-1].items() if k in ("finish_reason", "stop_reason")}}


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


FORMS = {
    "json_schema": ({"response_format": FORMAT}, SAID),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}'),
    "json": ({"structured_outputs": {"json": SCHEMA}}, SAID),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SAID),
    "any object": ({"structured_outputs": {"json_object": True}}, '{"a": [1, {"b": null}]}'),
    "regex": ({"structured_outputs": {"regex": r"[a-c]{3}-\d\d"}}, "abc-07"),
    "choice": ({"structured_outputs": {"choice": ["yes", 'no\n"}']}}, 'no\n"}'),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" x\nx: /[0-9]+;/'}}, "a12;"),
    "gbnf": ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c") "!"'}}, "ac!"),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_every_form_is_kept_on_both_endpoints_whole_and_streamed(ask, name, path):
    fields, wanted = FORMS[name]
    whole = ask(wanted, path, **fields)
    assert (text_of(whole), whole["finish_reason"]) == (wanted, "stop")
    assert ask(wanted, path, stream=True, **fields) == {"content": wanted, "finish_reason": "stop"}
    other = ask("What a question", path, max_tokens=12, **fields)  # which it wants to say, and may not
    if other["finish_reason"] == "stop":
        assert text_of(other) != "What a question"
    assert "stop_reason" not in other
    assert text_of(ask("What a question", path)) == "What a question"


def test_text_is_the_form_that_asks_for_none(ask):
    assert text_of(ask("any words", response_format={"type": "text"})) == "any words"


def test_a_grammar_that_cannot_go_on_ends_the_answer_with_its_reason(ask):
    fields = {"structured_outputs": {"grammar": 'start: "a" X\nX: /b+/ & /c+/'}}
    choice = ask("ab", **fields)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "grammar")
    assert ask("ab", stream=True, **fields) == {"content": "a", "finish_reason": "length", "stop_reason": "grammar"}


def test_an_answer_that_is_too_long_is_cut_and_a_stop_string_ends_one(ask):
    assert ask(SAID, response_format=FORMAT, max_tokens=4)["finish_reason"] == "length"
    stopped = ask(SAID, response_format=FORMAT, stop=["Rome"])
    assert (text_of(stopped), stopped["finish_reason"]) == ('{"city": "', "stop")


def test_several_answers_and_echo(live, writer):
    writer.text = SAID
    body = {"model": "clinic", "prompt": ["a", "b"], "n": 2, "max_tokens": 99, "response_format": FORMAT, "echo": True}
    answer = live.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"a{SAID}"] * 2 + [f"b{SAID}"] * 2


def test_only_places_with_a_choice_can_be_charged(live, writer, ask):
    """Under `dissent`: each place where more than one token is allowed has dissent here, and is charged."""
    account = live.curator.account
    writer.num_allowed.clear()
    choice = ask(SAID, dissent=1.0, response_format=FORMAT)
    used = live.curator.account
    assert json.loads(text_of(choice))["unit"] in ("C", "F")
    free = sum(count > 1 for count in writer.num_allowed)
    assert len(writer.num_allowed) == used.tokens - account.tokens
    assert used.charged_tokens - account.charged_tokens == free < len(writer.num_allowed)


def test_every_token_is_charged_where_every_token_is(start, small_tokenizer):
    """And a model without a chat template keeps a form."""
    live = start(engine=Writer(small_tokenizer, SAID), charge="every-token")
    answer = live.complete(prompt="where ", max_tokens=60, response_format=FORMAT).json()
    assert answer["choices"][0]["text"] == SAID
    assert answer["usage"]["completion_tokens"] == live.curator.account.charged_tokens == live.spent_tokens
    assert answer["privacy"]["charged_nats"] == live.curator.account.spent_nats


def test_a_plan_and_a_stored_reply_know_the_form(live, writer, ask):
    body = {"model": "clinic", "messages": USER, "max_tokens": 80, "response_format": FORMAT}
    writer.text, writer.dissent = SAID, 0.0
    plan = live.http.post("/v1/privacy/plan", json=body).json()
    assert (plan["max_tokens"], plan["answers"]) == (80, 1)
    key = {"idempotency-key": "structured-1"}
    first = live.http.post("/v1/chat/completions", json=body, headers=key)
    spent = live.spent_tokens
    again = live.http.post("/v1/chat/completions", json=body, headers=key)
    assert first.content == again.content
    assert live.spent_tokens == spent
    other = {**body, "response_format": {"type": "json_object"}}
    assert live.http.post("/v1/chat/completions", json=other, headers=key).status_code == 409


class Place(BaseModel):
    city: str
    unit: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the library's own models
def test_the_official_client_parses_into_a_pydantic_model_and_takes_the_message_back(live, writer):
    writer.text, writer.dissent = SAID, 0.0
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.ward) as client:
        options = {"model": "clinic", "max_tokens": 200, "temperature": 0}
        parsed = client.chat.completions.parse(messages=USER, response_format=Place, **options).choices[0].message
        assert parsed.parsed == Place(city="Rome", unit="C")
        with client.chat.completions.stream(messages=USER, response_format=Place, **options) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed.parsed
        back = [*USER, parsed, *USER]
        assert client.chat.completions.create(messages=back, **options).choices
        assert client.chat.completions.create(messages=[*USER, parsed.model_dump(), *USER], **options).choices


def test_a_real_model_keeps_the_form_under_the_promise_corpus_with_log_probabilities(corpus):
    fields = {"structured_outputs": {"regex": "(yes|no), [a-z]{2}"}, "max_tokens": 40}
    answer = corpus.complete(logprobs=2, **fields).json()["choices"][0]
    assert re.fullmatch("(yes|no), [a-z]{2}", answer["text"])
    assert answer["finish_reason"] == "stop"
    assert "".join(answer["logprobs"]["tokens"]) == answer["text"]
    chat = {"model": "clinic", "messages": USER, "logprobs": True, "top_logprobs": 3, **fields}
    said = corpus.http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert "".join(entry["token"] for entry in said["logprobs"]["content"]) == said["message"]["content"]


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}}),
        ("structured_outputs", {"json": {"$ref": "#/zebra"}}),
        ("structured_outputs", {"regex": "(zebra"}),
        ("structured_outputs", {"grammar": "start: zebra"}),
        ("structured_outputs", {"grammar": "root ::= ( zebra"}),
        ("structured_outputs", {"json": {"type": "string", "format": "zebra-é"}}),
        ("structured_outputs", {"json": {"type": "object", "required": ["zebra"], "not": {}}}),
        ("structured_outputs", {"regex": "z" * 100_001}),
        ("tools", [{"type": "function", "function": {"name": "x", "parameters": {"type": "zebra"}}}]),
    ],
)
def test_what_is_no_grammar_is_refused_before_anything_is_charged_and_not_repeated(live, field, form):
    spent = live.spent_tokens
    body = {"model": "clinic", "messages": USER, field: form}
    answer = live.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert "zebra" not in answer.text
    assert (live.spent_tokens, live.curator.reserved_units) == (spent, 0)
    assert live.http.post("/v1/privacy/plan", json=body).status_code == 400


def test_a_refusal_keeps_what_helps_and_hides_what_was_sent():
    reason = 'Unimplemented keys: ["not", "zebra"]'
    assert without_words_of('{"not": {}, "zebra": 1}', reason) == 'Unimplemented keys: ["not", "…"]'
    assert without_words_of("zebra", "at zeb" + "r" * 200) == "at …"


# --- forced choice ----------------------------------------------------------------------------------------------------

OPEN = {**SCHEMA, "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}


@pytest.fixture(scope="module")
def careful(template, tmp_path_factory, chat_tokenizer, small_tokenizer):
    """A server with the settings that it has if its operator sets none."""
    folder = tmp_path_factory.mktemp("careful") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, per_token="2^-20", total="2^-4", support_size=40)
    with serve(Workspace.open(folder), Writer(small_tokenizer), chat_tokenizer, settings=ServerConfig()) as live:
        yield live


def tools_of(*schemas):
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]


CLOSED = {
    "response_format": {"response_format": FORMAT},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "regex": {"structured_outputs": {"regex": "yes|no"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    "a tool's schema": {"tools": tools_of(SCHEMA)},
    "one of two tools or JSON": {"tools": tools_of(OPEN, OPEN), "response_format": {"type": "json_object"}},
    "one of two tools": {"tools": tools_of(OPEN, OPEN), "tool_choice": "required"},
    "one of two tools, or a form that cannot be written": {
        "tools": tools_of(OPEN, OPEN),
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    },
    "a tool or one text": {"tools": tools_of(OPEN), "structured_outputs": {"json": {"const": "no"}}},
}


@pytest.mark.parametrize("fields", CLOSED.values(), ids=CLOSED)
def test_a_forced_choice_is_refused_unless_the_operator_allows_it(careful, live, fields):
    body = {"model": "clinic", "messages": USER, "max_tokens": 1, **fields}
    before = careful.http.get("/v1/privacy").json()["spent_nats"]
    answer = careful.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "forced_choice")
    assert "forced_choice = true" in answer.json()["error"]["message"]
    assert not {"yes", "unit", "Rome"} & set(re.findall(r"\w+", answer.text)), "an error repeats no text of a schema"
    assert live.http.post("/v1/chat/completions", json=body).status_code == 200
    assert careful.http.get("/v1/privacy").json()["spent_nats"] == before


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": OPEN}}},
        {"tools": tools_of(OPEN, OPEN)},
        {"tools": tools_of(OPEN), "tool_choice": "required"},
    ],
)
def test_a_schema_without_alternatives_of_the_caller_is_open(careful, fields):
    body = {"model": "clinic", "messages": USER, "max_tokens": 1, **fields}
    assert careful.http.post("/v1/chat/completions", json=body).status_code == 200


def test_looking_for_choices_takes_no_time_of_others(careful):
    """The size is limited before a schema is walked, and the walk reads no list again for each reference to it."""
    schema = {"anyOf": [{"$ref": "#/$defs/t"}] * 9000, "$defs": {"t": {"type": ["string"] * 60_000}}}
    body = {"model": "clinic", "messages": USER, "structured_outputs": {"json": schema}}
    answer = careful.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "65,536 characters" in answer.json()["error"]["message"]


# --- the guide --------------------------------------------------------------------------------------------------------


def example(language, word):
    """A block of the page that users read."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "server.md").read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return found


DOSE = '<tool_call>\n{"name": "dose", "arguments": {"drug": "ibuprofen"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("word", "text", "printed"),
    [
        ("response_format=Visit", '{"complaint": "cough", "days": 3}', "complaint='cough' days=3"),
        ("messages=messages, tools=tools", DOSE, DOSE),
        ("input=history, tools=tools", DOSE, DOSE),
    ],
)
def test_the_examples_of_the_guide_run(careful, capsys, word, text, printed):
    """On a server as it is, without settings."""
    live, writer = careful, careful.curator._engine
    writer.text = text
    code = example("python", word).replace("http://127.0.0.1:8000", live.url).replace('"none"', f'"{live.ward}"', 1)
    names = {"__name__": "example"}
    try:
        exec(compile(code, "server.md", "exec"), names)
    finally:
        names["client"].close()
    assert printed in capsys.readouterr().out
    if text == DOSE:
        result = names["messages"][-1]["content"] if "messages" in names else names["history"][-1]["output"]
        assert result == "400 mg of ibuprofen"


def test_the_curl_example_of_the_guide_is_answered(careful):
    live, writer = careful, careful.curator._engine
    writer.text = '{"systolic": 120, "diastolic": 80}'
    body = re.search(r"-d '(.*)'", example("bash", "structured_outputs"), re.DOTALL)
    assert body is not None
    answer = live.http.post("/v1/completions", content=body[1], headers={"content-type": "application/json"})
    assert answer.json()["choices"][0]["text"] == writer.text
