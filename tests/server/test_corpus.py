"""The promise `corpus` over HTTP: every feature of the server, nothing charged, and nothing of the records in sight."""

import json
import re
import shutil
import socket

import openai
import pytest

from curator.deployments import build_workspace, set_mechanism
from curator.dp_deployments import GUARANTEE, with_dp_adapter
from paclm import Workspace
from paclm.config import ServerConfig
from paclm.curator.dp_decoder import DpDecoder
from paclm.errors import LedgerTampered
from paclm.ledger.dp_log import DpLog
from paclm.server import corpus_terms, run
from paclm.server.corpus import NO_BUDGET, CorpusService
from paclm.server.messages import Link
from paclm.server.openapi import (
    ChatCompletion,
    Completion,
    CorpusPlan,
    CorpusPrivacy,
    Error,
    History,
    Models,
    PlainOverview,
)
from paclm.server.scheduler import Scheduler
from paclm.server.stats import MIXED
from paclm.worlds.layout import DP_FILE, dp_log_path
from server.live import bearer, own_notes
from server.stepped import wait_until

PROMISE = {
    "promise": "corpus",
    "epsilon": GUARANTEE.epsilon,
    "delta": GUARANTEE.delta,
    "unit": "record",
    "mia_bound": GUARANTEE.mia_bound,
    "is_promised": True,
}
ASK = {"model": "clinic", "max_tokens": 8, "seed": 3}
CHAT = [{"role": "user", "content": "the patient"}]


def client_of(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.ward, max_retries=0, timeout=60)


def events_of(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# --- answers -----------------------------------------------------------------------------------------------------


def test_an_answer_has_the_promise_and_no_charge_whole_and_streamed(corpus):
    answer = corpus.complete("the patient", 8, seed=3)
    whole = answer.json()
    assert whole["privacy"] == PROMISE
    assert "paclm-budget" not in answer.headers
    events = events_of(corpus.complete("the patient", 8, seed=3, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == whole["choices"][0]["text"]
    assert (events[-1]["privacy"], events[-1]["usage"]) == (PROMISE, whole["usage"])
    as_admin = events_of(corpus.complete("the", 4, stream=True, headers=bearer(corpus.admin)))
    assert "marks" not in json.dumps(as_admin)


def test_several_answers_stop_strings_and_seeds_work_as_ever(corpus):
    with client_of(corpus) as client:
        several = client.completions.create(prompt=["the", "a patient"], n=2, **ASK)
        again = client.completions.create(prompt=["the", "a patient"], n=2, **ASK)
        texts = [choice.text for choice in several.choices]
        assert texts == [choice.text for choice in again.choices]
        assert len(set(texts)) > 2
        text = client.completions.create(prompt="the patient", **ASK).choices[0].text
        stop = text[2:4]
        cut = client.completions.create(prompt="the patient", stop=stop, **ASK).choices[0]
        assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
        said = client.chat.completions.create(messages=CHAT, **ASK)
        assert said.choices[0].message.content
        assert said.privacy == PROMISE


def test_an_answer_is_what_the_decoder_says(corpus, dp_template, dp_engine, small_tokenizer, tmp_path):
    found = corpus.complete("the patient", 8, temperature=0, logprobs=2).json()["choices"][0]
    wait_until(lambda: corpus.service.is_idle)
    workspace = Workspace.open(shutil.copytree(dp_template, tmp_path / "clinic"))
    with own_notes(workspace), DpDecoder.open(workspace, engine=dp_engine, tokenizer=small_tokenizer) as decoder:
        said = decoder.generate("the patient", 8, greedy=True, num_logprobs=2)
    assert found["text"] == said.text
    assert found["logprobs"]["token_logprobs"] == [one.own for one in said.logprobs][: len(found["logprobs"]["tokens"])]


# --- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_of_a_completion_have_openais_form_whole_and_streamed(corpus):
    with client_of(corpus) as client:
        choice = client.completions.create(prompt="the patient", logprobs=3, **ASK).choices[0]
        pieces = [
            event.choices[0].logprobs
            for event in client.completions.create(prompt="the patient", logprobs=3, stream=True, **ASK)
        ]
    found = choice.logprobs
    assert found.text_offset[0] == len("the patient")
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or ("the patient" + choice.text)[offset:].startswith(token)
    assert all(value <= 0 for value in found.token_logprobs)
    for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == own
        assert 3 <= len(top) <= 4
        assert len([value for value in top.values() if value > own]) <= 3
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for piece in pieces for one in getattr(piece, name)] == getattr(found, name)


def test_logprobs_of_a_chat_have_openais_form_whole_and_streamed(corpus):
    with client_of(corpus) as client:
        choice = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=20, **ASK).choices[0]
        plain = client.chat.completions.create(messages=CHAT, logprobs=True, **ASK).choices[0]
        pieces = [
            event.choices[0]
            for event in client.chat.completions.create(
                messages=CHAT, logprobs=True, top_logprobs=20, stream=True, **ASK
            )
        ]
    found = choice.logprobs.content
    said = bytes(byte for one in found for byte in one.bytes).decode(errors="replace")
    assert said == choice.message.content
    assert [len(one.top_logprobs) for one in found] == [20] * len(found)
    assert all(one.top_logprobs[0].logprob >= one.logprob for one in found)
    ranked = [[other.logprob for other in one.top_logprobs] for one in found]
    assert ranked == [sorted(one, reverse=True) for one in ranked]
    streamed = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content]
    assert streamed == found
    assert [(one.token, one.logprob, one.top_logprobs) for one in plain.logprobs.content] == [
        (one.token, one.logprob, []) for one in found
    ]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "the", "logprobs": 6}),
        ("/v1/completions", {"prompt": "the", "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 1}),
    ],
)
def test_logprobs_that_are_not_offered_are_refused(corpus, path, more):
    assert corpus.http.post(path, json={**ASK, **more}).status_code == 400


def test_under_half_logprobs_are_refused_by_the_front_and_by_the_curator(start, chat_tokenizer):
    live = start(tokenizer=chat_tokenizer)
    for path, more in (
        ("/v1/completions", {"prompt": "the", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True}),
        ("/v1/privacy/plan", {"prompt": "the", "logprobs": 0}),
    ):
        answer = live.http.post(path, json={**ASK, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        assert answer.json()["error"]["message"].endswith("They are answered under the promise corpus.")
    live.service.has_logprobs = True
    assert live.complete(logprobs=5).status_code == 500
    assert live.spent_tokens == 0


# --- keys --------------------------------------------------------------------------------------------------------


def test_a_reply_of_one_promise_is_not_repeated_under_the_other(start_corpus, monkeypatch):
    live, once = start_corpus(), {"idempotency-key": "once"}
    assert live.complete(max_tokens=2, temperature=0, headers=once).status_code == 200
    monkeypatch.setattr(CorpusService, "promise", "half")  # as a server of the other promise looks it up
    refused = live.complete(max_tokens=2, temperature=0, headers=once)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_quotas_and_stored_replies_work_without_a_budget(start_corpus):
    live = start_corpus(quota=10)
    once = {"idempotency-key": "once"}
    first = live.complete(max_tokens=6, temperature=0, headers=once)
    again = live.complete(max_tokens=6, temperature=0, headers=once)
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    used = first.json()["usage"]["completion_tokens"]
    refused = live.complete(max_tokens=10 - used + 1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_quota_exhausted")
    key = live.http.get("/v1/privacy").json()["key"]
    assert key == {"name": "ward", "quota_tokens": 10, "used_tokens": used}
    row = next(row for row in live.as_admin("/v1/admin/overview")["keys"] if row["name"] == "ward")
    assert (row["tokens"], row["used_tokens"], row["requests"]) == (used, used, 1)
    plan = live.http.post("/v1/privacy/plan", json={**ASK, "prompt": "the", "max_tokens": 10}).json()
    assert (plan["fits"], plan["max_tokens"], plan["remaining_quota_tokens"]) == (False, 10, 10 - used)
    CorpusPlan.model_validate(plan)


# --- what is said about the promise ------------------------------------------------------------------------------


def test_every_endpoint_has_its_shape_and_none_speaks_of_a_budget_left(corpus):
    for path, more, shape in (
        ("/v1/completions", {"prompt": "the", "logprobs": 2}, Completion),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True}, ChatCompletion),
        ("/v1/privacy/plan", {"prompt": "the"}, CorpusPlan),
    ):
        shape.model_validate(corpus.http.post(path, json={**ASK, **more}).json())
    for path, shape in (
        ("/v1/models", Models),
        ("/v1/privacy", CorpusPrivacy),
        ("/v1/admin/overview", PlainOverview),
        ("/v1/admin/history", History),
        ("/nothing", Error),
    ):
        found = corpus.as_admin(path)
        shape.model_validate(found)
        assert not re.search(r"nats|remaining_tokens|dissent_rate|belief|world_id", json.dumps(found)), path
    assert corpus.http.get("/v1/admin/overview").status_code == 403


def test_the_privacy_endpoint_states_the_promise_and_what_it_bounds(corpus):
    found = corpus.http.get("/v1/privacy").json()
    assert {name: found[name] for name in PROMISE} == PROMISE
    assert found["tpr_at_fpr_1_percent"] == GUARANTEE.tpr_at_fpr_1_percent
    assert "in the corpus succeeds more than 77.80% of the time" in found["sentence"]
    assert "finds at most 21.00% of those inside, at 1% at most 35.00%" in found["sentence"]
    assert found["budget"] == NO_BUDGET


def test_metrics_have_epsilon_and_no_budget(corpus):
    corpus.complete()
    text = corpus.http.get("/metrics", headers=bearer(corpus.admin)).text
    assert f"\npaclm_promise_epsilon {GUARANTEE.epsilon}\n" in text
    assert "\npaclm_promise_kept 1.0\n" in text
    assert float(re.search(r'paclm_tokens_total\{mark="dp"\} (\S+)', text)[1]) > 0
    assert "paclm_budget" not in text
    assert "\npaclm_ledger_commit_seconds_count 0.0\n" in text


def test_after_a_quiet_hour_nothing_old_is_told():
    """The first reply after it would otherwise be of the last look."""

    class Decoder:
        is_promised = True

        def promise_figures(self):
            return {"is_promised": self.is_promised}

    decoder = Decoder()
    terms = corpus_terms.CorpusTerms(decoder)
    decoder.is_promised = False
    assert terms.state()["is_promised"]  # no look for every token
    terms._looked_at -= 3600
    assert not terms.state()["is_promised"]


def test_promises_mixed_while_it_runs_are_told_from_the_next_look_on(start_corpus, tmp_path, monkeypatch):
    live = start_corpus()
    assert live.complete().json()["privacy"]["is_promised"] is True
    DpLog(dp_log_path(tmp_path / "clinic")).append("mixed", accepted="half")
    assert live.http.get("/v1/privacy").json()["is_promised"] is True  # not looked again yet
    monkeypatch.setattr(corpus_terms, "LOOK_SECONDS", 0.0)
    wait_until(lambda: not live.http.get("/v1/privacy").json()["is_promised"])
    figures = ("epsilon", "delta", "mia_bound")
    answer = live.complete().json()["privacy"]
    assert [answer[name] for name in ("is_promised", *figures)] == [False, None, None, None]
    found = live.http.get("/v1/privacy").json()
    assert found["sentence"] == MIXED
    assert {found[name] for name in (*figures, "tpr_at_fpr_0_1_percent", "tpr_at_fpr_1_percent")} == {None}
    assert "nothing is promised about the corpus" in found["sentence"].lower()
    metrics = live.http.get("/metrics", headers=bearer(live.admin)).text
    assert re.findall(r"^paclm_promise_\w+ (.*)$", metrics, re.MULTILINE) == ["NaN", "NaN", "0.0"]


def test_where_the_log_can_no_longer_be_read_nothing_is_promised(start_corpus, tmp_path, monkeypatch):
    live = start_corpus()
    monkeypatch.setattr(corpus_terms, "LOOK_SECONDS", 0.0)
    path = dp_log_path(tmp_path / "clinic")
    path.write_bytes(path.read_bytes().replace(b"2.064", b"9.064"))
    with pytest.raises(LedgerTampered):
        DpLog(path).events()
    wait_until(lambda: not live.http.get("/v1/privacy").json()["is_promised"])
    assert live.complete().status_code == 200


def test_under_half_mixed_promises_are_told_too(start, make):
    assert start().http.get("/v1/privacy").json()["are_promises_mixed"] is False
    workspace = make("mixed")
    DpLog(dp_log_path(workspace.path)).append("mixed", accepted="half")
    with pytest.warns(UserWarning, match="Nothing is promised about the corpus"):
        live = start(name="mixed")
    found = live.http.get("/v1/privacy").json()
    assert (found["promise"], found["are_promises_mixed"]) == ("half", True)
    assert found["not_promised"].startswith(MIXED)


# --- nothing of the records --------------------------------------------------------------------------------------


def hello_of(workspace, engine, tokenizer):
    """All that the front is told at the start, as JSON."""
    own, its = socket.socketpair()
    engine.clear()
    with own, its, own_notes(workspace), DpDecoder.open(workspace, engine=engine, tokenizer=tokenizer) as decoder:
        Scheduler(decoder, Link(own), 4).hello(setup=str(run._setup(workspace, ServerConfig(), "corpus")))
        return json.dumps(next(Link(its).receive(wait=True)))


def test_what_callers_see_is_the_same_for_other_records_with_the_same_adapter(
    tmp_path, texts, small_base, dp_template, dp_engine, chat_tokenizer, start_corpus
):
    """Other records, other counts and hashes, another training time; the adapter and its account are the same."""
    other = build_workspace(tmp_path / "other" / "clinic", texts[100:117], small_base, num_worlds=4)
    set_mechanism(other.path, support_size=40)
    other = with_dp_adapter(other)
    for name in ("adapters/" + DP_FILE, dp_log_path(dp_template).relative_to(dp_template)):
        shutil.copy2(dp_template / name, other.path / name)
    details = Workspace.open(dp_template).manifest.adapters[DP_FILE]["dp"]
    other = Workspace.open(other.with_adapters(DP_FILE, {"dp": details}).path)
    one = Workspace.open(shutil.copytree(dp_template, tmp_path / "one" / "clinic"))
    assert one.manifest.digest != other.manifest.digest
    first, second = (hello_of(workspace, dp_engine, chat_tokenizer) for workspace in (one, other))
    assert first == second
    seen = []
    for workspace in (one, other):
        live = start_corpus(workspace)
        answer = live.complete("the patient", 8, seed=3, logprobs=5)
        pages = [live.http.get(path) for path in ("/v1/privacy", "/v1/models", "/health", "/openapi.json")]
        body = {name: value for name, value in answer.json().items() if name not in ("id", "created")}
        names = [sorted(set(page.headers) - {"date"}) for page in (answer, *pages)]
        seen.append((body, names, [page.json() for page in pages]))
        wait_until(lambda live=live: live.service.is_idle)
    assert seen[0] == seen[1]


# --- the curator process -----------------------------------------------------------------------------------------


async def _ask(live, topic):
    return await live.service.curator._ask(topic)


def test_a_front_cannot_ask_for_what_there_is_not(corpus):
    import asyncio

    loop = corpus.service._loop
    for topic in ("usage", "leak"):
        asked = asyncio.run_coroutine_threadsafe(_ask(corpus, topic), loop)
        with pytest.raises(Exception, match="Internal error"):
            asked.result(60)
    assert corpus.complete().status_code == 200
