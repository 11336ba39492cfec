"""Tool calls: what the model reads, what it may write, and how its calls come back, whole and in pieces."""

import json
import shutil
from types import SimpleNamespace

import openai
import pytest
from pydantic import BaseModel

from curator.deployments import set_mechanism
from paclm import Workspace
from paclm.curator.streams import Logprobs, Piece
from paclm.server.chat_schemas import ChatAsk
from paclm.server.curator_client import Transcript
from paclm.server.openapi import ChatCompletion
from paclm.server.schemas import check
from paclm.server.tool_calls import CallSplitter, conversation
from paclm.server.tool_reply import ToolReply
from server.live import serve
from server.writer import Writer

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Looks outside.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
    {"type": "function", "function": {"name": "note", "parameters": {}}},
]
USER = [{"role": "user", "content": "where"}]
ARGUMENTS = '{"city": "Ro}\\n</tool_call>me"}'
WRITTEN = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
ONLY_NOW = {"type": "function", "function": {"name": "now"}}
# As models have it that are trained on this form; written here in short.
KNOWING = (
    "{% if tools %}TOOLS {% for t in tools %}{{ t.function.name }} {{ t.function.parameters | tojson }} {% endfor %}\n"
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments.city }}</tool_call>{% endfor %}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def writer(small_tokenizer):
    return Writer(small_tokenizer)


@pytest.fixture(scope="module")
def live(template, tmp_path_factory, chat_tokenizer, writer):
    """A server whose model writes what a test wants it to, as far as the grammar allows."""
    folder = tmp_path_factory.mktemp("tools") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, per_token="2^-20", total="2^-4", support_size=40, charge="dissent")
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
    """Ask a model that wants to write this: its message and why it ended, the same whole and streamed."""

    def ask(text, **fields):
        writer.text, writer.dissent = text, 0.0
        body = {"model": "clinic", "max_tokens": 150, "temperature": 0, "messages": USER, "tools": TOOLS, **fields}
        answer = live.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        ChatCompletion.model_validate(answer.json())
        (choice,) = answer.json()["choices"]
        streamed = live.http.post("/v1/chat/completions", json={**body, "stream": True}).text
        assert joined(streamed) == shown(choice["message"], choice)
        return choice["message"], choice["finish_reason"]

    return ask


def deltas(text):
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def joined(text):
    """What a client makes of a stream."""
    choices = deltas(text)
    message = {"content": "".join(choice["delta"].get("content") or "" for choice in choices)}
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    if calls:
        assert all(call["index"] == 0 for call in calls)
        assert calls[0]["type"] == "function"
        assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
        arguments = "".join(call["function"]["arguments"] for call in calls)
        function = {"name": calls[0]["function"]["name"], "arguments": arguments}
        message["tool_calls"] = [{"id": calls[0]["id"], "type": "function", "function": function}]
    return shown(message, choices[-1])


def shown(message, choice):
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls") or []]
    return message["content"] or "", calls, choice["finish_reason"], choice.get("stop_reason")


def function_of(message):
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    return call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ("auto", "tool_calls"), (None, "tool_calls"), (NAMED, "stop")],
)
def test_a_call_comes_back_as_one_with_the_reason_that_openai_gives(ask, choice, finish_reason):
    message, ended = ask(WRITTEN, tool_choice=choice, parallel_tool_calls=False)
    assert function_of(message) == ("weather", ARGUMENTS)
    assert json.loads(ARGUMENTS)["city"] == "Ro}\n</tool_call>me"
    assert (message["content"], ended) == (None, finish_reason)


def test_text_stays_text_and_may_come_before_a_call(ask):
    for text in ("any words", "a < b, <tool_cal", "</tool_call>"):
        message, ended = ask(text)
        assert (message["content"], ended, message.get("tool_calls")) == (text, "stop", None)
    message, ended = ask(f"I look.\n{WRITTEN}")
    assert (message["content"], function_of(message)) == ("I look.\n", ("weather", ARGUMENTS))
    assert ended == "tool_calls"


def test_a_required_call_is_made_whatever_the_model_wants_to_say(ask):
    message, _ = ask("any words", tool_choice=ONLY_NOW)
    assert function_of(message) == ("now", "{}")
    message, _ = ask("any words", tool_choice="none")
    assert message == {"role": "assistant", "content": "any words", "refusal": None}
    only_now = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ONLY_NOW]}}
    message, ended = ask(WRITTEN, tool_choice=only_now)
    assert (function_of(message), ended) == (("now", "{}"), "tool_calls")


def test_a_required_call_is_made_beside_a_format_of_texts(ask):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    for chosen in (NAMED, "required"):
        message, _ = ask(WRITTEN, tools=TOOLS[:1], tool_choice=chosen, response_format=form)
        assert function_of(message) == ("weather", ARGUMENTS)


def test_each_name_has_its_own_arguments(ask):
    mixed = '<tool_call>\n{"name": "now", "arguments": {"city": "Rome"}}\n</tool_call>'
    message, _ = ask(mixed, tool_choice="required")
    assert function_of(message) == ("now", "{}")
    free = '<tool_call>\n{"name": "note", "arguments": {"any": [1, {"b": {}}]}}\n</tool_call>'
    message, _ = ask(free, tool_choice="required")
    assert function_of(message) == ("note", '{"any": [1, {"b": {}}]}')


def test_a_call_has_the_arguments_that_the_schema_lists_and_no_others_unless_it_allows_them(ask):
    listed = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    wanted = '{"city": "Rome", "type": "string"}'
    for more, expected in (
        ({}, '{"city": "Rome"}'),
        ({"additionalProperties": True}, wanted),
        ({"minProperties": 2}, wanted),
    ):
        tool = {"type": "function", "function": {"name": "weather", "parameters": {**listed, **more}}}
        message, _ = ask(f'<tool_call>\n{{"name": "weather", "arguments": {wanted}}}\n</tool_call>', tools=[tool])
        assert function_of(message) == ("weather", expected)
    none = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    message, _ = ask('<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', tools=[none])
    assert function_of(message) == ("now", "{}")


def test_a_call_that_is_cut_off_has_the_arguments_so_far(live, ask, writer):
    body = {"model": "clinic", "messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 150}
    writer.text = WRITTEN
    num_tokens = live.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"]
    seen = set()
    for limit in (1, 5, 9, num_tokens - 30, num_tokens - 20, num_tokens - 5, num_tokens - 1):
        message, ended = ask(WRITTEN, tool_choice="required", max_tokens=limit)
        assert ended == "length"
        if message.get("tool_calls"):
            name, arguments = function_of(message)
            assert (name, message["content"]) == ("weather", None)
            assert ARGUMENTS.startswith(arguments)
            seen.add(arguments == ARGUMENTS)
        else:
            assert WRITTEN.startswith(message["content"])
    assert seen == {True, False}
    message, ended = ask(WRITTEN, tool_choice="required", stop=["</tool"])
    assert (function_of(message)[1], ended) == ('{"city": "Ro}\\n', "stop")


def test_a_stream_shows_the_name_first_and_the_arguments_as_they_come(live, writer):
    writer.text = f"I look. {WRITTEN}"
    body = {"model": "clinic", "messages": USER, "tools": TOOLS, "max_tokens": 150, "stream": True, "temperature": 0}
    choices = deltas(live.http.post("/v1/chat/completions", json=body).text)
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    pieces = [choice["delta"] for choice in choices[1:] if choice["delta"]]
    text = [piece["content"] for piece in pieces if "content" in piece]
    assert "".join(text) == "I look. "
    calls = [piece["tool_calls"][0] for piece in pieces if "tool_calls" in piece]
    assert calls[0]["function"]["name"] == "weather"
    assert len(calls) > 5
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any("finish_reason" in choice and choice["finish_reason"] for choice in choices[:-1])


def test_several_answers_have_calls_of_their_own(live, writer):
    writer.text = WRITTEN
    body = {"model": "clinic", "messages": USER, "tools": TOOLS, "n": 3, "max_tokens": 150, "temperature": 0}
    choices = live.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3
    streamed = deltas(live.http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    for index in range(3):
        own = [choice["delta"].get("tool_calls", []) for choice in streamed if choice["index"] == index]
        assert "".join(call["function"]["arguments"] for calls in own for call in calls) == ARGUMENTS


def test_a_repeat_has_the_same_id_and_costs_nothing(live, writer):
    writer.text = WRITTEN
    for is_stream in (False, True):
        body = {"model": "clinic", "messages": USER, "tools": TOOLS, "max_tokens": 150, "stream": is_stream}
        headers = {"idempotency-key": f"tools-{is_stream}"}
        first = live.http.post("/v1/chat/completions", json=body, headers=headers)
        spent = live.spent_tokens
        assert live.http.post("/v1/chat/completions", json=body, headers=headers).content == first.content
        assert live.spent_tokens == spent
        assert b"call_" in first.content


def test_what_a_call_forces_costs_nothing_where_dissent_is_charged(live, writer):
    """The beginning and the end of a call to the only tool are forced, and all worlds disagree wherever they can."""
    writer.text, writer.dissent = NOW, 1.0
    before = live.curator.account
    body = {"model": "clinic", "messages": USER, "tools": TOOLS, "tool_choice": ONLY_NOW, "max_tokens": 150}
    answer = live.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    after = live.curator.account
    assert after.tokens - before.tokens == answer["usage"]["completion_tokens"]
    assert after.charged_tokens == before.charged_tokens


def test_tools_and_a_format_together_are_a_call_or_an_answer_in_that_format(ask):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    message, ended = ask('{"a": 3}', **form)
    assert (message["content"], ended) == ('{"a": 3}', "stop")
    message, ended = ask(NOW, **form)
    assert (function_of(message), ended) == (("now", "{}"), "tool_calls")
    message, _ = ask("seven", structured_outputs={"regex": "[a-z]+!?"})
    assert message["content"] == "seven"


class Weather(BaseModel):
    """Looks outside."""

    city: str


def test_the_official_client_parses_a_call_and_sends_its_result_back(client, writer):
    writer.text, writer.dissent = WRITTEN.replace("weather", "Weather"), 0.0
    options = {"model": "clinic", "max_tokens": 150, "temperature": 0}
    tools = [openai.pydantic_function_tool(Weather)]
    message = client.chat.completions.parse(messages=USER, tools=tools, **options).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Ro}\n</tool_call>me")
    with client.chat.completions.stream(messages=USER, tools=tools, **options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    assert final.finish_reason == "tool_calls"
    writer.text = "It rains."
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    for said in (message, message.model_dump(warnings=False), final.message):
        answer = client.chat.completions.create(messages=[*USER, said, result], tools=tools, **options).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("It rains.", "stop")


def history(**call):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}', **call}}
    return [
        *USER,
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "user", "content": "and now"},
    ]


def messages_of(template, **fields):
    return conversation(check(ChatAsk, {"model": "clinic", "messages": history(), "tools": TOOLS, **fields}), template)


def test_a_template_that_knows_tools_gets_them_and_one_that_does_not_reads_them_as_text():
    messages, options = messages_of(KNOWING)
    assert [tool["function"]["name"] for tool in options["tools"]] == ["weather", "now", "note"]
    assert options["tools"][1]["function"]["parameters"]["additionalProperties"] is False
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert (messages[2]["role"], messages[2]["content"], messages[2]["tool_call_id"]) == ("tool", "rain", "call_1")

    messages, options = messages_of("{{ messages }}")
    assert options == {}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert all(name in messages[0]["content"] for name in ("weather", "Looks outside.", '"city"', "<tool_call>"))
    assert messages[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert messages[3]["content"] == "<tool_response>\nrain\n</tool_response>\nand now"

    system = [{"role": "developer", "content": "Be brief."}, *USER]
    messages, _ = messages_of("", messages=system)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call")
    for template in ("", KNOWING):  # tools that must not be called are not shown
        messages, options = messages_of(template, tool_choice="none", messages=USER)
        assert (messages, options) == (USER, {})


@pytest.mark.parametrize("template", ["{{ tools }} {{ message.tool_calls }} <|python_tag|>", KNOWING + "<function=x>"])
def test_a_template_with_another_form_of_calls_is_not_asked_to_describe_them(template):
    messages, options = messages_of(template)
    assert options == {}
    assert "<tool_call>" in messages[0]["content"]


def test_arguments_that_were_cut_off_go_back_as_they_are():
    messages, _ = messages_of(KNOWING, messages=history(arguments='{"city": "Ro'))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'


def test_a_tokenizer_gives_its_template_the_tools(small_base):
    """Both the plain tokenizer and that of Transformers."""
    from transformers import AutoTokenizer

    from paclm.engine.tokenizer import read_tokenizer

    plain, full = read_tokenizer(small_base), AutoTokenizer.from_pretrained(small_base)
    assert plain is not None
    plain.chat_template = full.chat_template = KNOWING
    messages, options = messages_of(KNOWING)
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        for tokenizer in (plain, full)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith('TOOLS weather {"type": "object"')
    assert "assistant: <tool_call>weather Rome</tool_call>tool: rainuser: and now" in texts[0]


@pytest.mark.parametrize("text", [WRITTEN, f"a <b> <tool_{WRITTEN}", WRITTEN[:-5], WRITTEN[:40], "<tool_call>", "<"])
def test_an_answer_is_split_alike_in_pieces_of_any_size(text):
    def split(size):
        splitter = CallSplitter()
        starts = range(0, len(text), size)
        found = [splitter.feed(text[at : at + size], is_last=at == starts[-1]) for at in starts]
        raw, content, names, arguments = zip(*found, strict=True)
        assert "".join(raw) == text
        return "".join(content), [n for n in names if n], "".join(arguments), splitter.is_complete

    assert len({repr(split(size)) for size in (1, 2, 3, 7, 1000)}) == 1


def test_log_probabilities_are_those_of_all_tokens_of_a_call(chat_tokenizer):
    """A stream shows those of a held back piece with the next one that is shown."""
    fields = {"model": "clinic", "messages": USER, "tools": TOOLS, "logprobs": True, "stream": True}
    reply = ToolReply(check(ChatAsk, fields), "clinic", is_admin=False, tokenizer=chat_tokenizer)
    tokens = chat_tokenizer.encode(f"I {WRITTEN}")
    ends = [None] * (len(tokens) - 1) + ["stop"]
    pieces = [
        Piece(token, chat_tokenizer.decode([token]), "dp", 0, end, Logprobs(-1.0, []))
        for token, end in zip(tokens, ends, strict=True)
    ]
    choices = deltas(b"".join(reply.events(0, piece) for piece in pieces).decode())
    shown = [entry["token"] for choice in choices for entry in choice["logprobs"]["content"]]
    assert shown == [piece.text for piece in pieces]
    request = SimpleNamespace(prompt=[1])
    transcript = Transcript(request)
    for piece in pieces:
        transcript.add(piece)
    reply = ToolReply(check(ChatAsk, fields), "clinic", is_admin=False, tokenizer=chat_tokenizer)
    (choice,) = json.loads(reply.whole([transcript], {}))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == shown


def test_what_was_held_back_is_shown_before_the_error_of_a_stream_that_is_cut_off(chat_tokenizer):
    fields = {"model": "clinic", "messages": USER, "tools": TOOLS, "stream": True}
    call = ("function", {"name": "weather", "arguments": ARGUMENTS})
    for text, held, content, calls in (("so <tool", "_ca", "so <tool_ca", []), (WRITTEN[:-14], "", "", [call])):
        reply = ToolReply(check(ChatAsk, fields), "clinic", is_admin=False, tokenizer=chat_tokenizer)
        transcript = Transcript(SimpleNamespace(prompt=[1]))
        transcript.held_back = held
        events = reply.events(0, Piece(1, text, "agreed", 0, None)) + reply.held_back([transcript])
        assert joined(events.decode()) == (content, calls, None, None)


def test_a_model_without_a_chat_template_has_no_tools(shared):
    body = {"model": "clinic", "messages": USER, "tools": TOOLS}
    assert shared.http.post("/v1/chat/completions", json=body).json()["error"]["code"] == "no_chat_template"
