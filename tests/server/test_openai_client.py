"""The official client against a real server: what works, what is refused, and how often it asks."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from curator.deployments import ScriptedEngine
from paclm.server.refusals import budget_exhausted


def client_of(live, key=None, **options):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key or live.ward, **options)


@pytest.fixture
def client(live):
    with client_of(live) as client:
        yield client


@pytest.fixture
def shared_client(shared):
    with client_of(shared) as client:
        yield client


def num_requests(live):
    """How many requests for answers reached the server, whatever became of them."""
    text = live.http.get("/metrics", headers={"authorization": f"Bearer {live.admin}"}).text
    lines = [line for line in text.splitlines() if line.startswith("paclm_requests_total") and 'completions"' in line]
    return int(sum(float(line.split()[-1]) for line in lines))


def test_the_example_of_the_readme_works_on_a_fresh_workspace(start, capsys):
    live = start(has_ward=False)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"## Over HTTP.*?```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    assert "http://127.0.0.1:8000/v1" in example[1]
    names = {}
    try:
        code = example[1].replace("http://127.0.0.1:8000", live.url).replace("max_tokens=64", "max_tokens=40")
        exec(compile(code, "README.md", "exec"), names)  # the context of this model is 64
    finally:
        names["client"].close()
    assert "'mia_bound'" in capsys.readouterr().out
    assert live.spent_tokens > 0


def test_there_is_one_model_and_no_world_is_listed(client):
    assert [model.id for model in client.models.list()] == ["clinic"]
    assert client.models.retrieve("clinic").owned_by == "paclm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("clinic-world-3")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="ZEBRA", prompt="the")
    assert refused.value.code == "model_not_found"
    assert "ZEBRA" not in refused.value.response.text


def test_a_completion_says_what_it_used_and_what_it_cost(client, live):
    answer = client.completions.create(model="clinic", prompt="the patient", max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == live.spent_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    privacy = answer.model_extra["privacy"]
    assert privacy["private_tokens"] == live.spent_tokens
    assert privacy["public_tokens"] == 0
    assert privacy["charged_nats"] == live.curator.account.spent_nats
    assert privacy["mia_bound"] == live.curator.figures()["mia_bound"]
    assert privacy["remaining_tokens"] >= live.curator.figures()["remaining_tokens"]  # as of the last full hour


def test_several_prompts_and_answers_come_in_order_and_are_all_charged(client, live):
    answer = client.completions.create(model="clinic", prompt=["the nurse", "the city"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    starts = [choice.text.startswith("the nurse") for choice in answer.choices]
    assert starts == [True, True, False, False]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == live.spent_tokens > 4


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6], [7]], ["the", "a"], ""])
def test_a_prompt_is_text_or_token_ids_one_or_several(shared_client, prompt):
    answer = shared_client.completions.create(model="clinic", prompt=prompt, max_tokens=2)
    assert len(answer.choices) == (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)


def test_a_stream_has_the_same_text_and_ends_with_usage(client, live):
    options = {"model": "clinic", "prompt": "the patient", "max_tokens": 12, "seed": 3, "temperature": 0}
    events = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == live.spent_tokens
    assert all(event.usage is None for event in events[:-1])
    assert events[-2].choices[0].finish_reason in ("length", "stop")
    assert events[-2].model_extra["privacy"]["private_tokens"] == live.spent_tokens
    events = list(client.completions.create(**options, stream=True))  # without usage every event has a choice
    assert {len(event.choices) for event in events} == {1}
    assert events[-1].model_extra["privacy"]["charged_nats"] > 0


def test_every_answer_of_a_stream_ends_once_under_its_own_number(client):
    events = client.completions.create(model="clinic", prompt=["the", "of"], n=2, max_tokens=4, stream=True)
    ends = [choice.index for event in events for choice in event.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


def test_a_stop_string_ends_an_answer_and_is_not_shown(client):
    whole = client.completions.create(model="clinic", prompt="the", max_tokens=30, temperature=0).choices[0].text
    stop = whole.strip()[2:4]
    answer = client.completions.create(model="clinic", prompt="the", max_tokens=30, stop=[stop]).choices[0]
    assert stop not in answer.text


def test_a_seed_repeats_the_coins_and_the_answers_of_one_request_differ(start):
    """All worlds agree here, so that the coins alone decide."""
    with client_of(start(engine=ScriptedEngine(dissent=0.0))) as client:

        def ask(seed):
            answer = client.completions.create(model="clinic", prompt="the", max_tokens=9, n=2, seed=seed)
            return [choice.text for choice in answer.choices]

        first = ask(7)
        assert ask(7) == first
        assert ask(-8) != first
        assert first[0] != first[1]


def test_a_conversation_is_answered_where_the_model_has_a_template(start, chat_tokenizer):
    live = start(tokenizer=chat_tokenizer)
    with client_of(live) as client:
        messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "the cough"}]
        answer = client.chat.completions.create(model="clinic", messages=messages, max_completion_tokens=5)
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == live.spent_tokens
        expected = "system: be brief\nuser: the cough\nassistant:"
        assert answer.usage.prompt_tokens == len(chat_tokenizer.encode(expected, add_special_tokens=False))

        stream = client.chat.completions.create(model="clinic", messages=messages, max_tokens=5, stream=True)
        events = list(stream)
        assert events[0].choices[0].delta.role == "assistant"
        assert events[-1].choices[0].finish_reason in ("length", "stop")
        parts = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cough"}]}]
        assert client.chat.completions.create(model="clinic", messages=parts, max_tokens=2).choices


def test_the_very_message_that_a_client_returned_goes_back_as_the_next_turn(corpus):
    """The objects of the official library, and each form that they are dumped in; its streams return others."""
    user = {"role": "user", "content": "the cough"}
    ask = {"model": "clinic", "max_tokens": 20, "seed": 1, "stop": [*"aeiou"]}  # `parse` needs one that was not cut
    with client_of(corpus) as client:
        returned = client.chat.completions.create(messages=[user], **ask).choices[0].message
        with client.chat.completions.stream(messages=[user], **ask) as stream:
            streamed = stream.get_final_completion().choices[0].message
        parsed = client.chat.completions.parse(messages=[user], **ask).choices[0].message
        expected = None
        for message in (returned, streamed, parsed):
            for form in (message, message.model_dump(), message.to_dict(), message.model_dump(exclude_unset=True)):
                messages = [user, form, user]
                usage = client.chat.completions.create(messages=messages, **ask).usage
                assert usage is not None
                expected = expected or usage.prompt_tokens
                assert usage.prompt_tokens == expected
        given = dict.fromkeys(type(parsed).model_fields)  # all that this version of the library knows
        assert {"refusal", "parsed", "tool_calls"} <= given.keys()
        back = [user, {**given, "role": "assistant", "content": returned.content}, user]
        assert client.chat.completions.create(messages=back, **ask).choices


def test_an_error_names_its_place_to_the_client(corpus):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,ZEBRA"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}, image]}]
    with client_of(corpus) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="clinic", messages=parts)
    assert refused.value.param == "messages[0].content[1]"
    assert "messages[0].content[1]: images are not offered" in refused.value.message
    assert "ZEBRA" not in refused.value.response.text


def test_a_context_that_is_too_long_is_told_as_other_libraries_expect_it(corpus):
    """What litellm and LangChain search for in an error's text: they then shorten the conversation."""
    with client_of(corpus) as client:
        for content, tokens, param in (("the " * 100, 4, "messages"), ("the", 1000, "max_tokens")):
            messages = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="clinic", messages=messages, max_tokens=tokens)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
            limit = corpus.service.curator.limits.context
            assert f"This model's maximum context length is {limit} tokens" in refused.value.message
            assert "context_length_exceeded" in str(refused.value)


def test_a_conversation_that_the_template_refuses_is_not_quoted(start, chat_tokenizer):
    live = start(tokenizer=chat_tokenizer)
    messages = [{"role": "assistant", "content": "ZEBRA"}]
    with client_of(live) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="clinic", messages=messages, max_tokens=5)
    assert refused.value.code == "chat_template_refused"
    assert "ZEBRA" not in refused.value.message


def test_a_model_without_a_template_says_so(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="clinic", messages=[{"role": "user", "content": "hello"}])


REFUSED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 1},
    "logprobs of nothing": {"logprobs": 0},
    "best_of": {"best_of": 3},
    "logit_bias": {"logit_bias": {"5": 100}},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "top_p": {"top_p": 0.9},
    "suffix": {"suffix": "end"},
    "temperature above the limit": {"temperature": 2.5},
    "temperature below zero": {"temperature": -1},
    "n": {"n": 0},
    "too many answers": {"n": 128},
    "max_tokens": {"max_tokens": 0},
    "more than the context": {"max_tokens": 64},
    "empty stop": {"stop": ""},
    "too many stops": {"stop": ["a"] * 65},
    "an unknown field": {"extra_body": {"top_k": 5}},
    "a number as text": {"extra_body": {"max_tokens": "5"}},
    "options without a stream": {"stream_options": {"include_usage": True}},
    "a token that does not exist": {"prompt": [700]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused_with_a_reason_before_anything_is_charged(shared_client, shared, name):
    options = {"model": "clinic", "prompt": "ZEBRA", "max_tokens": 4, **REFUSED[name]}
    spent = shared.spent_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        shared_client.completions.create(**options)
    assert refused.value.type == "invalid_request_error"
    assert "ZEBRA" not in refused.value.response.text
    assert shared.spent_tokens == spent
    assert shared.curator.reserved_units == 0


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1},
        {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        {"user": "somebody", "extra_body": {"metadata": {"a": "b"}}},
        {"temperature": 0},
        {"temperature": 0.7, "stop": None, "n": None},
    ],
)
def test_options_that_change_nothing_or_work_are_taken(shared_client, options):
    assert shared_client.completions.create(model="clinic", prompt="the", max_tokens=2, **options).choices


def test_an_exhausted_budget_is_told_once_and_not_retried(start):
    live = start(per_token="2^-8", total="2^-4", on_exhausted="refuse")  # sixteen tokens
    with client_of(live, max_retries=4) as client:
        client.completions.create(model="clinic", prompt="the", max_tokens=10)
        before = num_requests(live)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="clinic", prompt="the", max_tokens=16)
        assert num_requests(live) == before + 1
    assert refused.value.type == "insufficient_quota"
    assert refused.value.code == "privacy_budget_exhausted"
    assert budget_exhausted(is_gone=False, is_spent=False).message in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert live.spent_tokens <= 10
    assert live.curator.reserved_units == 0
    assert not any(key.reserved_tokens for key in live.keys.list())


def test_the_public_model_answers_when_the_budget_is_gone_and_is_marked(start):
    live = start(per_token="2^-8", total="2^-6", on_exhausted="public")  # four tokens
    first = live.complete(max_tokens=1)
    assert first.json()["privacy"]["private_tokens"] == 1
    assert "paclm-budget" not in first.headers
    with client_of(live) as client:
        answer = client.completions.create(model="clinic", prompt="the", max_tokens=9, n=2)
        privacy = answer.model_extra["privacy"]
        assert (privacy["private_tokens"], privacy["remaining_tokens"]) == (3, 0)
        assert privacy["public_tokens"] > 0
        events = list(client.completions.create(model="clinic", prompt="the", max_tokens=4, stream=True))
        marks = [mark for event in events for mark in (event.model_extra or {}).get("privacy", {}).get("marks", [])]
        assert set(marks) == {"public"}
    for is_stream in (False, True):
        assert live.complete(max_tokens=2, stream=is_stream).headers["paclm-budget"] == "exhausted"


@pytest.mark.parametrize(("tokens", "is_spent"), [(4, True), (1.5, False)])
def test_a_budget_that_is_gone_is_told_from_a_price_above_what_is_left(start, tokens, is_spent):
    live = start(per_token="2^-8", total=tokens * 2.0**-8, on_exhausted="refuse")
    while live.spent_tokens < int(tokens):
        live.complete(max_tokens=int(tokens) - live.spent_tokens)
    refused = live.complete(max_tokens=1)
    assert refused.status_code == 429
    assert refused.json()["error"]["message"] == budget_exhausted(is_gone=True, is_spent=is_spent).message
    sentences = live.as_admin("/v1/admin/overview")["sentences"]
    for sentence in (live.http.get("/v1/privacy").json()["sentence"], sentences["left"], sentences["guarantee"]):
        assert ("One token costs more than is left of the budget" in sentence) is not is_spent
        assert ("budget is spent" in sentence) is is_spent


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_retry_with_the_same_idempotency_key_is_charged_once(client, live, is_stream):
    def ask(tokens):
        once = {"Idempotency-Key": "one"}
        answer = client.completions.create(
            model="clinic", prompt="the", max_tokens=tokens, stream=is_stream, extra_headers=once
        )
        return list(answer) if is_stream else answer

    first, spent = ask(6), live.spent_tokens
    assert ask(6) == first
    with pytest.raises(openai.ConflictError) as refused:
        ask(7)
    assert refused.value.code == "idempotency_key_reused"
    assert live.spent_tokens == spent > 0


def test_a_request_that_was_refused_leaves_its_idempotency_key_free(start):
    live = start(per_token="2^-8", total="2^-4", on_exhausted="refuse")
    with client_of(live) as client:
        ask = {"model": "clinic", "prompt": "the", "extra_headers": {"Idempotency-Key": "three"}}
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**ask, max_tokens=17)
        assert client.completions.create(**ask, max_tokens=3).choices


def test_a_key_has_its_quota_and_another_keys_is_not_touched(start):
    live = start(quota=10)
    other = live.keys.add("other", quota_tokens=100)
    with client_of(live) as client, client_of(live, other) as rich:
        client.completions.create(model="clinic", prompt="the", max_tokens=8, temperature=0)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="clinic", prompt="the", max_tokens=9)
        assert refused.value.code == "key_quota_exhausted"
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert rich.completions.create(model="clinic", prompt="the", max_tokens=20).choices
    used = {key.name: (key.used_tokens, key.reserved_tokens) for key in live.keys.list()}
    assert used["ward"][0] <= 8
    assert sum(tokens for tokens, _ in used.values()) == live.spent_tokens
    assert all(reserved == 0 for _, reserved in used.values())
