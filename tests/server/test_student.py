"""A student over HTTP: ordinary answers with log-probabilities, nothing charged, and the figures of its folder."""

import json
import re

import openai
import pytest

from paclm.privacy.bounds import format_bound
from paclm.server.openapi import (
    ChatCompletion,
    Completion,
    Error,
    History,
    Models,
    PlainOverview,
    StudentPlan,
    StudentPrivacy,
)
from paclm.server.responses_openapi import ResponseObject
from paclm.server.student import CLAIMED, NO_BUDGET, StudentService
from server.live import bearer, serve_student
from worlds.students import CORPUS, HALF, TOTAL, WORLDS, make_student

ASK = {"model": "clinic", "max_tokens": 8, "seed": 3}
CHAT = [{"role": "user", "content": "the patient"}]
NOTHING = {"world_id_bound": None, "total_nats": None, "epsilon": None, "delta": None, "unit": "record"}
CLAIMS = {
    "half": {**NOTHING, "promise": "half", "total_nats": TOTAL, **HALF},
    "corpus": {**NOTHING, "promise": "corpus", **CORPUS},
}


def claims_of(live):
    return CLAIMS[live.curator.figures["promise"]]


def client_of(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.ward, max_retries=0, timeout=60)


def test_answers_are_the_same_whole_and_streamed_and_carry_the_claims(student):
    claims = claims_of(student)
    assert isinstance(student.service, StudentService)
    with client_of(student) as client:
        whole = client.completions.create(prompt="the patient", logprobs=3, **ASK)
        events = list(
            client.completions.create(
                prompt="the patient", logprobs=3, stream=True, stream_options={"include_usage": True}, **ASK
            )
        )
        said = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **ASK)
    text = "".join(choice.text for event in events for choice in event.choices)
    assert text == whole.choices[0].text
    assert whole.privacy == events[-1].privacy == said.privacy == claims
    assert "marks" not in json.dumps([event.model_dump() for event in events])
    found = whole.choices[0].logprobs
    rows = zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    assert all(top[token] == own <= 0 for token, own, top in rows)
    assert all(len(one.top_logprobs) == 2 for one in said.choices[0].logprobs.content)


def test_an_answer_is_what_the_decoder_says(student, small_base, chat_tokenizer, tmp_path):
    found = student.complete("the patient", 8, temperature=0, logprobs=2).json()["choices"][0]
    again = make_student(tmp_path / "clinic", small_base, claims_of(student)["promise"])
    with serve_student(again, str(small_base), chat_tokenizer) as live:
        assert live.complete("the patient", 8, temperature=0, logprobs=2).json()["choices"][0] == found


def test_every_endpoint_has_its_shape(student):
    for path, more, shape in (
        ("/v1/completions", {"prompt": "the", "logprobs": 2}, Completion),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True}, ChatCompletion),
        ("/v1/privacy/plan", {"prompt": "the"}, StudentPlan),
    ):
        shape.model_validate(student.http.post(path, json={**ASK, **more}).json())
    response = {"model": "clinic", "input": "the", "max_output_tokens": 3}
    ResponseObject.model_validate(student.http.post("/v1/responses", json=response).json())
    for path, shape in (
        ("/v1/models", Models),
        ("/v1/privacy", StudentPrivacy),
        ("/v1/admin/overview", PlainOverview),
        ("/v1/admin/history", History),
        ("/nothing", Error),
    ):
        shape.model_validate(student.as_admin(path))
    assert student.http.get("/v1/admin/overview").status_code == 403


def test_the_figures_are_those_of_its_description_and_are_called_claims(student):
    claims, found = claims_of(student), student.http.get("/v1/privacy").json()
    assert {name: found[name] for name in claims} == claims
    assert found["worlds"] == (WORLDS if claims["promise"] == "half" else None)
    assert found["budget"] == NO_BUDGET
    assert found["not_promised"].startswith(CLAIMED)
    shown = student.as_admin("/v1/admin/overview")["sentences"]
    assert (shown["guarantee"], shown["not_promised"]) == (found["sentence"], found["not_promised"])
    assert format_bound(claims["mia_bound"]) in found["sentence"]
    assert ("committed total of 2^-4 nats" if claims["promise"] == "half" else "ε = 8") in found["sentence"]


def test_headers_carry_the_claims_that_are_there(student):
    claims, headers = claims_of(student), student.complete().headers
    for name, value in claims.items():
        assert headers.get(f"paclm-{name.replace('_', '-')}") == (None if value is None else str(value))
    assert "paclm-budget" not in headers


def test_metrics_count_tokens_and_know_no_budget(student):
    student.complete()
    text = student.http.get("/metrics", headers=bearer(student.admin)).text
    assert float(re.search(r'paclm_tokens_total\{mark="student"\} (\S+)', text)[1]) > 0
    assert not re.search("paclm_budget|paclm_promise", text)
    assert "\npaclm_ledger_commit_seconds_count 0.0\n" in text


def test_an_idempotent_reply_is_sent_again_and_kept_outside_of_the_folder(tmp_path, small_base, chat_tokenizer):
    made = make_student(tmp_path / "clinic", small_base)
    before = {path: path.read_bytes() for path in made.path.rglob("*")}
    made.path.chmod(0o500)
    try:
        with serve_student(made, str(small_base), chat_tokenizer, quota=20) as live:
            first, again = (live.complete(headers={"idempotency-key": "abcdefgh"}) for _ in range(2))
            assert again.content == first.content
            assert again.headers["idempotent-replayed"] == "true"
            used = live.http.get("/v1/privacy").json()["key"]["used_tokens"]
            assert used == first.json()["usage"]["completion_tokens"]
            assert live.complete(max_tokens=20).status_code == 429
    finally:
        made.path.chmod(0o700)
    assert {path: path.read_bytes() for path in made.path.rglob("*")} == before


@pytest.mark.parametrize("topic", ["usage", "leak"])
def test_there_is_no_ledger_and_no_belief_to_ask_for(student, topic):
    terms = student.scheduler._terms
    assert terms.promise == "student"
    with pytest.raises(Exception, match="invalid"):
        getattr(terms, topic)()
