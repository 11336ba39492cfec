"""`/v1/responses`, with the official client and by its own types: events, conversations, charges, refusals."""

import json
import shutil

import numpy as np
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from curator.deployments import ScriptedEngine, set_mechanism
from paclm import Workspace
from paclm.config import ServerConfig
from paclm.server.responses_schemas import ResponseAsk
from server.live import bearer, serve
from server.stepped import SteppedEngine, asking, wait_until

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
EVENT = TypeAdapter(ResponseStreamEvent)
WORDS = "the patient has a cough and was seen by the nurse"


class Saying(ScriptedEngine):
    """All worlds say the same words, then end."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def _vote(self, tokens, coins, temperature):
        num_said = max(n for n in range(len(self.tokens)) if tokens[len(tokens) - n :] == self.tokens[:n])
        token = self.tokens[num_said]
        return np.full(self.support_size, token), np.full(self.num_worlds, token), token


@pytest.fixture(scope="module")
def live(template, tmp_path_factory, chat_tokenizer):
    """A server whose worlds all say the same words and then end, for tests that leave it as they found it."""
    folder = shutil.copytree(template, tmp_path_factory.mktemp("responses") / "clinic")
    set_mechanism(folder, per_token="2^-16", total="2^-4", support_size=40)
    words = chat_tokenizer.encode(WORDS, add_special_tokens=False)[:12]
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS"):
            environment.delenv(name, raising=False)
        engine = Saying([*words, chat_tokenizer.eos_token_id])
        with serve(Workspace.open(folder), engine, chat_tokenizer) as live:
            environment.undo()
            yield live


@pytest.fixture
def client(live):
    with client_of(live) as client:
        yield client


def client_of(live, key=None):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key or live.ward)


def respond(live, said="the cough", /, key=None, **more):
    body = {"model": "clinic", "input": said, **more}
    return live.http.post("/v1/responses", json=body, headers=bearer(key or live.ward))


def events_of(answer):
    """The events of a stream, as JSON; checks that each is named as its type says."""
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    return events


def test_a_response_is_as_the_clients_types_have_it_and_says_what_it_cost(live, client):
    before = live.spent_tokens
    answer = client.responses.create(model="clinic", input="the cough", instructions="be brief", max_output_tokens=20)
    charged = live.spent_tokens - before
    Response.model_validate(answer.to_dict())
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.output_text.startswith("the patient has")
    assert answer.usage is not None
    assert answer.usage.output_tokens == charged > 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + charged
    assert answer.model_extra["privacy"]["private_tokens"] == charged
    assert answer.model_extra["privacy"]["charged_nats"] == charged * 2.0**-16
    assert (answer.instructions, answer.max_output_tokens) == ("be brief", 20)
    assert answer.model_extra["store"] is False


@pytest.mark.parametrize(("tokens", "status"), [(40, "completed"), (3, "incomplete")])
def test_events_come_in_order_are_numbered_and_hold_the_text_of_the_whole_response(live, tokens, status):
    whole = respond(live, max_output_tokens=tokens).json()
    events = events_of(respond(live, max_output_tokens=tokens, stream=True))
    for event in events:
        EVENT.validate_python(event)
    assert list(dict.fromkeys(event["type"] for event in events)) == [*ORDER, f"response.{status}"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    (item,) = last["output"]
    (part,) = item["content"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_text.done"]["text"] == part["text"] == said
    assert by_type["response.content_part.done"]["part"] == part
    assert by_type["response.output_item.done"]["item"] == item
    assert (by_type["response.created"]["response"]["status"], last["status"]) == ("in_progress", status)
    assert last["incomplete_details"] == (None if status == "completed" else {"reason": "max_output_tokens"})
    for changing in ("id", "created_at", "completed_at"):
        whole.pop(changing)
        last.pop(changing)
    whole["output"][0].pop("id")
    item.pop("id")
    assert last == whole
    assert {event["item_id"] for event in events if "item_id" in event} == {by_type[ORDER[2]]["item"]["id"]}


def test_the_clients_own_stream_assembles_the_response(client):
    with client.responses.stream(model="clinic", input="the cough", max_output_tokens=40) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == WORDS[: len(final.output_text)]
    assert final.usage is not None
    assert final.usage.output_tokens > 1


def test_a_conversation_goes_on_with_the_very_objects_that_were_returned(live, client, chat_tokenizer):
    ask = {"model": "clinic", "max_output_tokens": 3}
    first = client.responses.create(**ask, input="the cough")
    with client.responses.stream(**{**ask, "max_output_tokens": 40}, input="the cough") as stream:
        streamed = stream.get_final_response()
    (event,) = [
        event
        for event in client.responses.create(**ask, input="the", stream=True)
        if event.type == "response.incomplete"
    ]
    said = first.output_text
    expected = f"user: the cough\nassistant: {said}\nuser: and\nassistant:"
    for output in (
        first.output,
        [item.to_dict() for item in first.output],
        [item.model_dump() for item in first.output],
        [{"role": "assistant", "content": said}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": said}]}],
    ):
        history = [{"role": "user", "content": "the cough"}, *output, {"role": "user", "content": "and"}]
        answer = client.responses.create(**ask, input=history)
        assert answer.usage is not None
        assert answer.usage.input_tokens == len(chat_tokenizer.encode(expected, add_special_tokens=False))
    for output in (streamed.output, event.response.output):
        history = [{"role": "user", "content": "the"}, *output, {"type": "message", "role": "user", "content": "a"}]
        assert client.responses.create(**ask, input=history).output_text


def test_text_and_charges_are_those_of_a_chat_with_the_same_prompt(live):
    parts = [{"type": "input_text", "text": "the "}, {"type": "input_text", "text": "cough"}]
    items = [{"role": "developer", "content": "hello"}, {"role": "user", "content": parts}]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "hello"},
        {"role": "user", "content": "the cough"},
    ]
    spent = live.spent_tokens
    with client_of(live, live.admin) as client:
        answer = client.responses.create(model="clinic", input=items, instructions="be brief", max_output_tokens=9)
        charged = live.spent_tokens - spent
        chat = client.chat.completions.create(model="clinic", messages=messages, max_completion_tokens=9)
    assert live.spent_tokens - spent == 2 * charged > 0
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens == charged
    mine, others = answer.model_extra["privacy"], chat.model_extra["privacy"]
    assert {**mine, "remaining_tokens": mine["remaining_tokens"] - charged} == others  # the admin's figures are exact


REFUSED = {
    "store": True,
    "previous_response_id": "resp_ZEBRA",
    "conversation": "conv_ZEBRA",
    "background": True,
    "prompt": {"id": "pmpt_ZEBRA"},
    "tools": [{"type": "web_search"}],
    "tool_choice": "required",
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "top_logprobs": 3,
    "top_p": 0.9,
    "truncation": "auto",
    "service_tier": "flex",
    "text": {"format": {"type": "ZEBRA"}},
    "stream_options": {"include_obfuscation": False},
    "temperature": 2.5,
    "max_output_tokens": 64,
    "instructions": ["ZEBRA"],
    "input": [],
    "model": "ZEBRA",
    "seed": 3,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_need_memory_or_tools_is_refused_with_its_place_and_charges_nothing(live, name):
    spent = live.spent_tokens
    body = {"model": "clinic", "input": "ZEBRA", "max_output_tokens": 4, name: REFUSED[name]}
    refused = live.http.post("/v1/responses", json=body)
    error = refused.json()["error"]
    assert refused.status_code == (404 if name == "model" else 400)
    assert error["param"] == {"text": "text.format.type", "tools": "tools[0].type"}.get(name, name)
    assert len(error["message"]) > 20
    assert "ZEBRA" not in refused.text
    assert (live.spent_tokens, live.curator.reserved_units) == (spent, 0)


PARTS = {
    "an image": ({"type": "input_image", "image_url": "ZEBRA"}, "type", "images are not offered"),
    "a file": ({"type": "input_file", "file_id": "ZEBRA"}, "type", "files are not offered"),
    "a refusal": ({"type": "refusal", "refusal": "ZEBRA"}, "type", "must be input_text or output_text"),
    "a part without text": ({"type": "input_text"}, "text", "required"),
    "an annotation": ({"type": "output_text", "text": "ZEBRA", "annotations": [{}]}, "annotations", "empty"),
}
ITEMS = {
    "reasoning": ({"type": "reasoning", "summary": ["ZEBRA"]}, ".type", "reasoning"),
    "a reference": ({"type": "item_reference", "id": "ZEBRA"}, ".type", "references to stored items are not offered"),
    "a number": (7, "", "valid"),
    "a message without content": ({"role": "user"}, ".content", "required"),
    "an unknown role": ({"role": "tool", "content": "ZEBRA"}, ".role", "assistant"),
    "content that is an object": ({"role": "user", "content": {"text": "ZEBRA"}}, ".content", "a list of parts"),
}


@pytest.mark.parametrize("name", [*PARTS, *ITEMS])
def test_input_that_is_not_text_is_refused_with_its_place(live, name):
    bad, place, reason = PARTS.get(name) or ITEMS[name]
    if name in PARTS:
        bad = {"role": "user", "content": [{"type": "input_text", "text": "the"}, bad]}
        place = f".content[1].{place}"
    refused = respond(live, [{"role": "user", "content": "ZEBRA"}, bad])
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["param"] == f"input[1]{place}"
    assert reason in error["message"]
    assert "ZEBRA" not in refused.text


TAKEN = [
    dict.fromkeys(set(ResponseAsk.model_fields) - {"model", "input"}),
    {"store": False, "background": False, "tools": [], "tool_choice": "none", "parallel_tool_calls": False},
    {"tool_choice": "auto", "truncation": "disabled", "service_tier": "auto", "include": [], "top_p": 1.0},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "service_tier": "default", "top_logprobs": 0},
    {"metadata": {"a": "b"}, "user": "somebody", "safety_identifier": "x", "prompt_cache_key": "y", "temperature": 0},
]


@pytest.mark.parametrize("options", TAKEN)
def test_what_changes_nothing_is_taken(live, options):
    answer = respond(live, **{"max_output_tokens": 2, **options})
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == (options.get("metadata") or {})


def test_every_field_of_the_clients_signature_is_known():
    """A field that the official client has and this server does not know would be refused without a reason."""
    of_other_services = {"access_programs", "context_management", "image", "moderation"}
    of_other_services |= {"prompt_cache_options", "prompt_cache_retention"}
    assert set(ResponseCreateParamsBase.__annotations__) - set(ResponseAsk.model_fields) == of_other_services


def test_a_conversation_may_be_as_long_as_that_of_a_chat(live):
    """511 messages and the instructions get as far as the context's limit; one more is refused for their number."""
    many = [{"role": "user", "content": "a"}] * 511
    assert respond(live, many, instructions="be brief").json()["error"]["code"] == "context_length_exceeded"
    error = respond(live, [*many, many[0]]).json()["error"]
    assert (error["param"], error["code"]) == ("input", None)


def test_a_context_that_is_full_and_a_template_that_refuses_name_the_input(live):
    for text, more, param, code in (
        ("the " * 80, {}, "input", "context_length_exceeded"),
        ("the", {"max_output_tokens": 60}, "max_output_tokens", "context_length_exceeded"),
        ([{"role": "assistant", "content": "ZEBRA"}], {}, "input", "chat_template_refused"),
    ):
        refused = respond(live, text, **more)
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert "ZEBRA" not in refused.text


def test_a_model_without_a_template_says_where_to_go(shared):
    error = respond(shared).json()["error"]
    assert (error["param"], error["code"]) == ("input", "no_chat_template")
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_retry_with_the_same_idempotency_key_is_charged_once(live, is_stream):
    headers = {"idempotency-key": f"one-{is_stream}"}
    body = {"model": "clinic", "input": "the", "max_output_tokens": 5, "stream": is_stream}
    first = live.http.post("/v1/responses", json=body, headers=headers)
    spent = live.spent_tokens
    again = live.http.post("/v1/responses", json=body, headers=headers)
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert live.spent_tokens == spent
    other = live.http.post("/v1/responses", json={**body, "input": "a"}, headers=headers)
    assert other.json()["error"]["code"] == "idempotency_key_reused"


def test_a_plan_takes_the_same_body_and_costs_nothing(live):
    spent = live.spent_tokens
    body = {"model": "clinic", "input": "the cough", "max_output_tokens": 9}
    plan = live.http.post("/v1/privacy/plan", json=body).json()
    assert (plan["answers"], plan["max_tokens"], plan["max_nats"], plan["fits"]) == (1, 9, 9 * 2.0**-16, True)
    assert live.spent_tokens == spent
    assert plan["prompt_tokens"] == respond(live, max_output_tokens=9).json()["usage"]["input_tokens"]


def test_requests_are_counted_under_a_name_of_their_own(live):
    def counted():
        text = live.http.get("/metrics", headers=bearer(live.admin)).text
        lines = [line for line in text.splitlines() if line.startswith('paclm_requests_total{route="responses"')]
        return sum(float(line.split()[-1]) for line in lines)

    before = counted()
    respond(live, max_output_tokens=1)
    wait_until(lambda: counted() == before + 1)


def test_marks_are_the_admins_and_the_public_models_tokens_are_marked_for_all(start, chat_tokenizer):
    live = start(
        per_token="2^-8", total="2^-5", on_exhausted="public", tokenizer=chat_tokenizer, quota=4
    )  # eight tokens

    def marks(key):
        events = events_of(respond(live, max_output_tokens=4, stream=True, temperature=0, key=key))
        return [mark for event in events for mark in event.get("privacy", {}).get("marks", [])]

    assert marks(live.ward) == []
    refused = respond(live, max_output_tokens=4).json()["error"]  # the quota is used up
    assert refused["code"] == "key_quota_exhausted"
    assert set(marks(live.admin)) <= {"agreed", "disputed"}
    assert live.spent_tokens == 8
    ordinary = live.keys.add("other")
    assert marks(ordinary) == marks(live.admin) == ["public"] * 4
    answer = respond(live, max_output_tokens=2, key=ordinary)
    assert answer.headers["paclm-budget"] == "exhausted"
    assert answer.json()["privacy"]["public_tokens"] == 2


def test_under_the_promise_corpus_the_answer_carries_the_promise(corpus):
    answer = respond(corpus, max_output_tokens=3).json()
    Response.model_validate(answer)
    assert answer["privacy"]["promise"] == "corpus"
    events = events_of(respond(corpus, max_output_tokens=3, stream=True))
    assert events[-1]["response"]["privacy"] == answer["privacy"]


def test_a_stream_that_is_cut_off_ends_with_an_error_and_a_failed_response(make, chat_tokenizer):
    engine, settings = SteppedEngine(dissent=0.0), ServerConfig(shutdown_seconds=0.1)
    with serve(make(), engine, chat_tokenizer, settings=settings) as live, asking(engine) as pool:
        job = pool.submit(respond, live, max_output_tokens=30, stream=True, temperature=0)
        engine.let(2)
        engine.wait_until_it_stands()
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)  # the time to end is over, in the middle of a step
        engine.run_free()
        events = events_of(job.result(60))
    for event in events:
        EVENT.validate_python(event)
    *before, error, failed = events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (error["type"], error["code"]) == ("error", "answer_cut_off")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    said = "".join(event["delta"] for event in before if event["type"] == "response.output_text.delta")
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", said)
    assert said
