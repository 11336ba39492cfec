"""Forms and tool calls of `/v1/responses`: by the official client and its types, whole and streamed; as a chat's."""

import json
import shutil
from types import SimpleNamespace

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from curator.deployments import set_mechanism
from paclm import Workspace
from paclm.curator.streams import Piece
from paclm.server.chat_schemas import ChatAsk
from paclm.server.curator_client import Transcript
from paclm.server.refusals import Refused, cut_off
from paclm.server.responses_format import ResponseReply
from paclm.server.responses_openapi import ResponseObject
from paclm.server.responses_schemas import ResponseAsk
from paclm.server.schemas import check
from server.live import bearer, serve
from server.writer import Writer

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "weather", "description": "Looks outside.", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now"},
]
CHAT_TOOLS = [
    {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}} for tool in TOOLS
]
SCHEMA = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True, "description": "zebra"}
ARGUMENTS = '{"city": "Ro}\\n</tool_call>me"}'
WRITTEN = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "name": "now"}


def allowed(mode):
    return {"type": "allowed_tools", "mode": mode, "tools": [NAMED]}


@pytest.fixture(scope="module")
def writer(small_tokenizer):
    return Writer(small_tokenizer)


@pytest.fixture(scope="module")
def live(template, tmp_path_factory, chat_tokenizer, writer):
    """A server whose model writes what a test wants it to, as far as the grammar allows."""
    folder = shutil.copytree(template, tmp_path_factory.mktemp("response-tools") / "clinic")
    set_mechanism(folder, per_token="2^-20", total="2^-4", support_size=40)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS"):
            environment.delenv(name, raising=False)
        with serve(Workspace.open(folder), writer, chat_tokenizer) as live:
            environment.undo()
            yield live


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.ward) as client:
        yield client


@pytest.fixture
def ask(live, writer):
    """Ask a model that wants to write this: the response, the same whole and streamed."""

    def ask(wanted, /, **fields):
        writer.text = wanted
        body = {"model": "clinic", "input": "where", "max_output_tokens": 150, "temperature": 0, **fields}
        answer = live.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        Response.model_validate(whole, strict=True)
        ResponseObject.model_validate(whole)
        streamed = assembled(live.http.post("/v1/responses", json={**body, "stream": True}).text)
        assert without_ids(streamed) == without_ids(whole)
        return whole

    return ask


def events_of(text):
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def assembled(text):
    """The response of a stream, after a check that its events are in order and show all of it, piece by piece."""
    events = events_of(text)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events.pop()
    assert last["type"] == f"response.{last['response']['status']}"
    for index, item in enumerate(last["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        places = [events.index(event) for event in own]
        assert places == list(range(places[0], places[-1] + 1))  # one item after the other
        added, *between, done = own
        assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
        assert (added["item"]["status"], added["item"]["id"], done["item"]) == ("in_progress", item["id"], item)
        assert {event["item_id"] for event in between} == {item["id"]}
        if item["type"] == "message":
            kinds, text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"], "text"
            (part,) = item["content"]
            held = part["text"]
        else:
            kinds, text = ["function_call_arguments.delta", "function_call_arguments.done"], "arguments"
            held = item["arguments"]
            assert added["item"] == {**item, "arguments": "", "status": "in_progress"}
        found = list(dict.fromkeys(event["type"].removeprefix("response.") for event in between))
        assert found == [kind for kind in kinds if held or not kind.endswith("delta")]
        assert "".join(event.get("delta", "") for event in between) == held
        assert [event[text] for event in between if event["type"].endswith(f"{text}.done")] == [held]
    return last["response"]


def without_ids(response):
    changing = ("id", "created_at", "completed_at", "call_id")
    output = [{name: value for name, value in item.items() if name not in changing} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in changing} | {"output": output}


def said(response):
    """Text and call of a response, and how it ended."""
    *texts, last = response["output"]
    call = None
    if last["type"] == "function_call":
        assert last["id"].startswith("fc_")
        assert last["call_id"].startswith("call_")
        call = last["name"], last["arguments"]
    else:
        texts.append(last)
    assert last["status"] == response["status"]
    assert all(item["status"] == "completed" for item in response["output"][:-1])
    return "".join(item["content"][0]["text"] for item in texts), call, response["status"]


FORMS = {
    "json_schema": ({"text": {"format": FORMAT}}, '{"a": null}'),
    "json_object": ({"text": {"format": {"type": "json_object"}}}, '{"a": [1, {"b": null}]}'),
    "json": ({"structured_outputs": {"json": SCHEMA}}, '{"a": null}'),
    "regex": ({"structured_outputs": {"regex": r"[a-c]{3}-\d\d"}}, "abc-07"),
    "choice": ({"structured_outputs": {"choice": ["yes", 'no\n"}']}}, 'no\n"}'),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" x\nx: /[0-9]+;/'}}, "a12;"),
    "text": ({"text": {"format": {"type": "text"}}}, "any words"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_kept_and_comes_back_with_the_answer(ask, name):
    fields, wanted = FORMS[name]
    answer = ask(wanted, **fields)
    assert said(answer) == (wanted, None, "completed")
    assert answer["text"] == fields.get("text", {"format": {"type": "text"}})
    other = ask("What a question", max_output_tokens=12, **fields)
    assert (said(other)[0] == "What a question") == (name == "text")


CHOICES = [None, "required", {"type": "function", "name": "weather"}]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_call_is_an_item_of_its_own_and_the_answer_says_what_was_asked(ask, choice):
    answer = ask(WRITTEN, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert said(answer) == ("", ("weather", ARGUMENTS), "completed")
    assert len(answer["output"]) == 1
    assert answer["tool_choice"] == (choice or "auto")
    assert answer["tools"] == [TOOLS[0], {**TOOLS[1], "description": None, "parameters": None, "strict": None}]
    assert answer["parallel_tool_calls"] is False


def test_text_stays_text_and_may_come_before_a_call(ask):
    for text in ("any words", "a < b, <tool_cal", "</tool_call>"):
        assert said(ask(text, tools=TOOLS)) == (text, None, "completed")
    answer = ask(f"I look.\n{WRITTEN}", tools=TOOLS)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert said(answer) == ("I look.\n", ("weather", ARGUMENTS), "completed")
    nothing = ask("", tools=TOOLS)
    assert [item["type"] for item in nothing["output"]] == ["message"]
    assert said(nothing) == ("", None, "completed")


def test_a_choice_of_tools_is_kept(ask):
    assert said(ask("any words", tools=TOOLS, tool_choice=NAMED))[1] == ("now", "{}")
    assert said(ask(WRITTEN, tools=TOOLS, tool_choice=allowed("required")))[1] == ("now", "{}")
    answer = ask("any words", tools=TOOLS, tool_choice=allowed("auto"))
    assert (said(answer)[0], answer["tool_choice"]) == ("any words", allowed("auto"))
    assert said(ask(WRITTEN, tools=TOOLS, tool_choice="none")) == (WRITTEN, None, "completed")
    assert said(ask('{"a": null}', tools=TOOLS, text={"format": FORMAT}))[0] == '{"a": null}'
    assert said(ask(NOW, tools=TOOLS, text={"format": FORMAT}))[1] == ("now", "{}")


def test_an_answer_that_is_cut_off_is_incomplete_and_says_why(ask):
    num_tokens = ask(WRITTEN, tools=TOOLS, tool_choice="required")["usage"]["output_tokens"]
    seen = set()
    for limit in (1, 9, num_tokens - 20, num_tokens - 1):
        answer = ask(WRITTEN, tools=TOOLS, tool_choice="required", max_output_tokens=limit)
        text, call, status = said(answer)
        assert (status, answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        seen.add(call is not None and ARGUMENTS.startswith(call[1]))
        assert WRITTEN.startswith(text)
    assert seen == {True, False}
    answer = ask("ab", structured_outputs={"grammar": 'start: "a" X\nX: /b+/ & /c+/'})
    assert said(answer) == ("a", None, "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens", "stop_reason": "grammar"}


def test_no_piece_of_a_stream_shows_the_beginning_of_a_call_as_text(live, writer):
    writer.text = f"I look. {WRITTEN}"
    body = {"model": "clinic", "input": "where", "max_output_tokens": 150, "tools": TOOLS, "temperature": 0}
    admin = bearer(live.admin)
    events = events_of(live.http.post("/v1/responses", json={**body, "stream": True}, headers=admin).text)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "I look. "
    assert len([event for event in events if event["type"] == "response.function_call_arguments.delta"]) > 5
    marks = [mark for event in events for mark in event.get("privacy", {}).get("marks", [])]
    assert len(marks) == events[-1]["response"]["usage"]["output_tokens"]


class Weather(BaseModel):
    """Looks outside."""

    city: str


class Place(BaseModel):
    city: str
    unit: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the library's own models
def test_the_official_client_parses_a_model_and_takes_its_answer_back(client, writer):
    writer.text = '{"city": "Rome", "unit": "C"}'
    options = {"model": "clinic", "max_output_tokens": 150, "temperature": 0}
    parsed = client.responses.parse(input="where", text_format=Place, **options)
    assert parsed.output_parsed == Place(city="Rome", unit="C")
    with client.responses.stream(input="where", text_format=Place, **options) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    for output in (parsed.output, [item.model_dump() for item in parsed.output]):
        history = [{"role": "user", "content": "where"}, *output, {"role": "user", "content": "and"}]
        assert client.responses.create(input=history, **options).output_text == writer.text


def test_the_official_client_calls_a_function_and_sends_its_output_back(client, writer, chat_tokenizer):
    options = {"model": "clinic", "max_output_tokens": 150, "temperature": 0}
    tools = [openai.pydantic_function_tool(Weather)]
    flat = [{"type": "function", **tools[0]["function"]}]
    writer.text = f"I look. {WRITTEN.replace('weather', 'Weather')}"
    whole = client.responses.create(input="where", tools=flat, **options)
    parsed = client.responses.parse(input="where", tools=tools, **options)
    with client.responses.stream(input="where", tools=tools, **options) as stream:
        pieces = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    city = Weather(city="Ro}\n</tool_call>me")
    assert pieces[-1].snapshot == ARGUMENTS
    for answer in (parsed, final):
        assert answer.output[-1].parsed_arguments == city
    writer.text = "It rains."
    prompt = (
        f"user: where\nassistant: I look. \n{WRITTEN.replace('weather', 'Weather')}\n"
        "user: <tool_response>\nrain\n</tool_response>\nassistant:"
    )
    num_tokens = len(chat_tokenizer.encode(prompt, add_special_tokens=False))
    for answer in (whole, parsed, final):
        assert (answer.output_text, answer.output[-1].name) == ("I look. ", "Weather")
        call = answer.output[-1]
        for output in (answer.output, [item.model_dump(warnings=False) for item in answer.output]):
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            history = [{"role": "user", "content": "where"}, *output, result]
            follow_up = client.responses.create(input=history, **options)
            assert (follow_up.output_text, follow_up.usage.input_tokens) == ("It rains.", num_tokens)


def test_charges_are_those_of_a_chat_with_the_same_tools(live, writer):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    items = [
        {"role": "user", "content": "where"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed", **call["function"]},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    asks = (
        ("chat/completions", {"messages": chat, "tools": CHAT_TOOLS, "max_tokens": 60}),
        ("responses", {"input": items, "tools": TOOLS, "max_output_tokens": 60}),
        ("responses", {"input": items, "tools": TOOLS, "max_output_tokens": 60, "stream": True}),
    )
    writer.text = f"I look.\n{WRITTEN}"
    found = []
    for path, fields in asks:
        spent = live.spent_tokens
        body = {"model": "clinic", "temperature": 0, "tool_choice": "auto", **fields}
        answer = live.http.post(f"/v1/{path}", json=body)
        used = events_of(answer.text)[-1]["response"] if "stream" in fields else answer.json()
        num_input = used["usage"].get("prompt_tokens") or used["usage"]["input_tokens"]
        found.append((num_input, live.spent_tokens - spent, used["privacy"]["charged_nats"]))
    assert found[0] == found[1] == found[2]
    assert found[0][1] * 2.0**-20 == found[0][2] > 0


def test_a_repeat_has_the_same_ids_and_costs_nothing(live, writer):
    writer.text = WRITTEN
    for is_stream in (False, True):
        body = {"model": "clinic", "input": "where", "tools": TOOLS, "max_output_tokens": 150, "stream": is_stream}
        headers = {"idempotency-key": f"response-tools-{is_stream}"}
        first = live.http.post("/v1/responses", json=body, headers=headers)
        spent = live.spent_tokens
        again = live.http.post("/v1/responses", json=body, headers=headers)
        assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
        assert live.spent_tokens == spent
        assert b'"fc_' in first.content
        assert b'"call_' in first.content


def test_a_plan_takes_the_same_body(live, writer):
    body = {"model": "clinic", "input": "where", "tools": TOOLS, "text": {"format": FORMAT}, "max_output_tokens": 9}
    plan = live.http.post("/v1/privacy/plan", json=body).json()
    writer.text = NOW
    answer = live.http.post("/v1/responses", json=body).json()
    assert (plan["max_tokens"], plan["prompt_tokens"]) == (9, answer["usage"]["input_tokens"])


def response_ask(**fields):
    return check(ResponseAsk, {"model": "clinic", "input": "where", **fields})


def test_a_request_becomes_the_chat_that_says_the_same():
    call = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"}
    other = {**call, "call_id": "call_2", "id": "fc_2", "status": "incomplete", "parsed_arguments": {"x": 1}}
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        call,
        other,
        {"type": "function_call_output", "call_id": "call_1", "output": "c", "id": "x", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "d"}] * 2},
        call,
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]

    def called(*ids):
        return [{"id": name, "function": {"name": "now", "arguments": "{}"}} for name in ids]

    messages = [
        {"role": "system", "content": "z"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": called("call_1", "call_2")},
        {"role": "tool", "tool_call_id": "call_1", "content": "c"},
        {"role": "tool", "tool_call_id": "call_2", "content": "dd"},
        {"role": "assistant", "tool_calls": called("call_1")},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    schema = {"name": "place", "schema": SCHEMA}
    named = {"type": "function", "function": {"name": "now"}}
    for here, there in (
        ({"tool_choice": NAMED}, {"tool_choice": named}),
        (
            {"tool_choice": allowed("auto"), "text": {"format": FORMAT}},
            {
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}},
                "response_format": {"type": "json_schema", "json_schema": schema},
            },
        ),
        ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
    ):
        chat = response_ask(input=items, instructions="z", tools=TOOLS, **here).as_chat()
        expected = check(ChatAsk, {"model": "clinic", "messages": messages, "tools": CHAT_TOOLS, **there})
        mine, theirs = (one.model_dump(exclude_none=True, by_alias=True) for one in (chat, expected))
        assert mine == theirs

    many = response_ask(input=[call] * 300).as_chat()  # more than one message may have
    assert sum(len(message.tool_calls or ()) for message in many.messages) == 300


BAD = {
    "text.format.type": [{"text": {"format": {"type": "zebra"}}}, {"text": {"format": {}}}],
    "text.format.schema": [
        {"text": {"format": {"type": "json_schema", "name": "zebra"}}},
        {"text": {"format": {"type": "json_object", "schema": SCHEMA}}},
        {"text": {"format": {**FORMAT, "schema": "zebra"}}},
    ],
    "text.format.name": [
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"text": {"format": {**FORMAT, "name": "a zebra"}}},
    ],
    "text.format": [{"text": {"format": "zebra"}}],
    "structured_outputs": [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "zebra"}, "text": {"format": FORMAT}},
        {"structured_outputs": {"regex": "zebra"}, "tools": TOOLS, "tool_choice": NAMED},
    ],
    "tools[0].type": [
        {"tools": [{"type": "custom", "name": "zebra"}]},
        {"tools": [{"type": "web_search", "search_context_size": "zebra"}]},
        {"tools": [{"type": "mcp", "server_label": "zebra", "server_url": "zebra"}]},
    ],
    "tools[0].name": [{"tools": [{"type": "function"}]}, {"tools": [{"type": "function", "name": 'zebra "'}]}],
    "tools[0].function": [{"tools": CHAT_TOOLS}],
    "tools[0].parameters": [{"tools": [{**TOOLS[0], "parameters": "zebra"}]}],
    "tools[0].async": [{"tools": [{**TOOLS[0], "async": True}]}],
    "tools[0].defer_loading": [{"tools": [{**TOOLS[0], "defer_loading": True}]}],
    "tools[0].output_schema": [{"tools": [{**TOOLS[0], "output_schema": {"type": "zebra"}}]}],
    "tools[0].allowed_callers": [{"tools": [{**TOOLS[0], "allowed_callers": ["programmatic"]}]}],
    "tools": [{"tools": [*TOOLS, *TOOLS]}, {"tools": TOOLS * 65}],
    "tool_choice": [
        {"tool_choice": "required"},
        {"tool_choice": "zebra"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "zebra"}},
        {"tools": TOOLS, "tool_choice": {**allowed("auto"), "tools": [{"type": "function", "name": "zebra"}]}},
    ],
    "tool_choice.type": [
        {"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}},
        {"tools": TOOLS, "tool_choice": {"type": ["zebra"]}},
        {"tools": TOOLS, "tool_choice": {}},
    ],
    "tool_choice.name": [{"tools": TOOLS, "tool_choice": {"type": "function"}}],
    "tool_choice.mode": [{"tools": TOOLS, "tool_choice": allowed("zebra")}],
    "tool_choice.tools": [{"tools": TOOLS, "tool_choice": {**allowed("auto"), "tools": []}}],
    "tool_choice.tools[0].type": [{"tools": TOOLS, "tool_choice": {**allowed("auto"), "tools": [{"type": "mcp"}]}}],
    "input[0].type": [
        {"input": [{"type": kind, "id": "zebra", "text": "zebra"}]}
        for kind in ("reasoning", "item_reference", "custom_tool_call", "web_search_call", "zebra", "", ["zebra"])
    ],
    "input[0].call_id": [
        {"input": [{"type": "function_call", "name": "zebra", "arguments": "zebra"}]},
        {"input": [{"type": "function_call_output", "output": "zebra"}]},
    ],
    "input[0].arguments": [
        {"input": [{"type": "function_call", "call_id": "z", "name": "zebra", "arguments": {"zebra": 1}}]}
    ],
    "input[0].output": [
        {"input": [{"type": "function_call_output", "call_id": "z", "output": {"zebra": 1}}]},
        {"input": [{"type": "function_call_output", "call_id": "z", "output": []}]},
    ],
    "input[0].output[0].type": [
        {"input": [{"type": "function_call_output", "call_id": "z", "output": [{"type": "input_image"}]}]}
    ],
}


@pytest.mark.parametrize("place", BAD)
def test_what_cannot_be_asked_is_refused_with_its_place_and_repeats_nothing(place):
    for body in BAD[place]:
        with pytest.raises(Refused) as refused:
            response_ask(**body)
        assert (refused.value.param, refused.value.status) == (place, 400), body
        assert "zebra" not in refused.value.message.lower()


def test_a_form_that_cannot_be_kept_names_its_field_and_costs_nothing(live):
    spent = live.spent_tokens
    for fields, place in (
        ({"text": {"format": {**FORMAT, "schema": {"type": "zebra"}}}}, "text.format"),
        ({"structured_outputs": {"regex": "(zebra"}}, "structured_outputs"),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "zebra"}}]}, "tools"),
    ):
        refused = live.http.post("/v1/responses", json={"model": "clinic", "input": "where", **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, place), refused.text
    assert (live.spent_tokens, live.curator.reserved_units) == (spent, 0)


def test_a_forced_choice_is_refused_where_the_operator_does_not_allow_it(live, monkeypatch):
    monkeypatch.setattr(type(live.service), "allows_forced_choice", False)
    spent = live.spent_tokens
    units = {"enum": ["C", "F"]}
    for fields, place in (
        ({"text": {"format": {**FORMAT, "schema": units}}}, "text.format"),
        ({"structured_outputs": {"choice": ["C", "F"]}}, "structured_outputs"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ):
        error = live.http.post("/v1/responses", json={"model": "clinic", "input": "a", **fields}).json()["error"]
        assert (error["param"], error["code"]) == (place, "forced_choice")
    assert (live.spent_tokens, live.curator.reserved_units) == (spent, 0)


CUT = {
    "text": ("so <tool", "_ca", [("message", "so <tool_ca")]),
    "a call": (f"so {WRITTEN[:-14]}", "", [("message", "so "), ("function_call", ARGUMENTS)]),
    "nothing": ("", "", [("message", "")]),
}


@pytest.mark.parametrize("name", CUT)
def test_a_stream_that_is_cut_off_shows_what_was_held_back_and_fails(name):
    text, held, expected = CUT[name]
    reply = ResponseReply(response_ask(tools=TOOLS, stream=True), "clinic", is_admin=False)
    transcript = Transcript(SimpleNamespace(prompt=[1]))
    transcript.held_back = held
    shown = reply.opening(1) + reply.events(0, Piece(1, text, "agreed", 0, None)) + reply.held_back([transcript])
    events = events_of((shown + reply.failure(cut_off())).decode())
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = events[-1]["response"]
    output = [
        (item["type"], item.get("arguments", "".join(p["text"] for p in item.get("content", []))))
        for item in failed["output"]
    ]
    assert (failed["status"], output) == ("failed", expected)
    assert failed["output"][-1]["status"] == "incomplete"
    for index, (_, said_so_far) in enumerate(expected):
        own = [event.get("delta", "") for event in events if event.get("output_index") == index]
        assert "".join(own) == said_so_far
