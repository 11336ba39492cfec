"""Attempts on what the server promises: charges, holds, replies, other people's figures, and what a stream may say."""

import json
import signal
import sqlite3
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import openai
import pytest

from curator.deployments import ScriptedEngine
from paclm.config import ServerConfig
from paclm.privacy.accounting import units_up
from paclm.server import completions, database, service
from paclm.server.database import service_path
from paclm.server.idempotency import Replies
from paclm.server.openai_format import TextReply
from server.live import bearer, serve
from server.stepped import SteppedEngine, asking, num_known, sent, wait_until

ASK = {"model": "clinic", "prompt": "the", "max_tokens": 4, "temperature": 0}


def ward(live):
    return next(key for key in live.keys.list() if key.name == "ward")


def nothing_is_held(live):
    return ward(live).reserved_tokens == 0 and live.curator.reserved_units == 0 and num_known(live) == 0


def fail(*_, **__):
    raise RuntimeError("ZEBRA")


def num_disputed(engine):
    return sum(len(set(votes.tolist())) > 1 for ballot in engine.ballots for votes in ballot.votes)


def test_whoever_chooses_the_coins_pays_for_exactly_the_disputed_tokens(start):
    engine = ScriptedEngine(dissent=0.5)
    live = start(engine=engine, charge="dissent", per_token="2^-12", total="2^-2")
    for seed in (0, 1, -1, 2**63 - 1, 7, 7):
        assert live.complete(max_tokens=8, seed=seed, temperature=1.0).status_code == 200
    disputed = num_disputed(engine)
    assert 0 < disputed < live.curator.account.tokens
    assert live.curator.account.dissent_tokens == live.curator.account.charged_tokens == disputed
    assert live.curator.account.spent_units == disputed * units_up(2**-12)


def test_a_budget_that_ends_in_the_middle_of_a_batch_is_not_overdrawn(start):
    """Five disputed tokens are paid for; from then on all come from the public model, also where the worlds agree."""
    engine = ScriptedEngine(dissent=0.6)
    live = start(engine=engine, charge="dissent", per_token="2^-6", total="0.08", on_exhausted="public")
    body = {"model": "clinic", "prompt": ["the", "a", "of", "in"], "n": 2, "max_tokens": 8, "stream": True, "seed": 3}
    said = live.http.post("/v1/completions", json=body, headers=bearer(live.admin)).text
    marks = [m for e in events(said) for m in e.get("privacy", {}).get("marks", [])]
    assert marks.count("disputed") == live.curator.account.charged_tokens == 5
    assert live.curator.account.spent_units <= live.curator.account.total_units
    assert marks.count("public") > num_disputed(engine) - 5 > 0


@pytest.mark.parametrize("temperature", [1e-36, -0.0, 2])
def test_the_smallest_and_largest_temperatures_are_served_and_no_others(shared, temperature):
    assert shared.complete(temperature=temperature).status_code == 200
    assert shared.service.state == "serving"
    spent = shared.spent_tokens
    for beyond in (2.0000001, -1e-9, 1e308, 9e-37, 1e-45, 5e-324, True, "1"):
        refused = shared.complete(temperature=beyond)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert shared.spent_tokens == spent


def test_a_repeated_request_asks_neither_engine_nor_noise_and_another_key_gets_its_own(start):
    engine = ScriptedEngine(dissent=0.5)
    live = start(engine=engine)
    other = live.keys.add("other")
    once = {"idempotency-key": "again"}
    first = live.complete(max_tokens=12, headers=once)
    asked, spent = len(engine.ballots), live.spent_tokens
    assert live.complete(max_tokens=12, headers=once).content == first.content
    assert (len(engine.ballots), live.spent_tokens) == (asked, spent)
    theirs = live.complete(max_tokens=12, headers={**once, **bearer(other)})
    assert "idempotent-replayed" not in theirs.headers
    assert theirs.json()["id"] != first.json()["id"]
    assert live.spent_tokens > spent


@contextmanager
def books_locked(live):
    other = sqlite3.connect(live.keys.database.path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


@pytest.fixture
def impatient_books(monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(service, "_HOUSEKEEPING_SECONDS", 0.2)


def test_when_the_books_do_not_answer_nobody_is_told_that_their_key_is_wrong(impatient_books, start):
    live = start()
    with books_locked(live):
        for headers in ({}, {"idempotency-key": "one"}):
            refused = live.complete(headers=headers)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "books_unavailable"
            assert str(service_path(live.keys.database.path.parent)) not in refused.text
    assert live.spent_tokens == 0
    assert live.complete().status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_books_cannot_take_at_the_end_of_an_answer_is_brought_in_later(
    impatient_books, start, engine, is_stream
):
    live = start(engine=engine, quota=100)
    body, once = {**ASK, "stream": is_stream}, {"idempotency-key": "once"}
    with asking(engine) as pool:
        job = pool.submit(live.http.post, "/v1/completions", json=body, headers=once)
        wait_until(lambda: live.scheduler.num_running == 1)
        with books_locked(live):
            engine.run_free()
            answer = job.result(60)
            assert answer.status_code == 200
            assert ward(live).reserved_tokens == 4
        wait_until(lambda: nothing_is_held(live))
    assert ward(live).used_tokens == live.spent_tokens > 0
    wait_until(lambda: live.http.post("/v1/completions", json=body, headers=once).content == answer.content)


def test_an_answer_that_cannot_be_prepared_holds_nothing(start, monkeypatch):
    live = start(on_exhausted="refuse")

    monkeypatch.setattr(completions, "reply_for", fail)
    answer = live.complete(headers={"idempotency-key": "one"})
    assert answer.status_code == 500
    assert "ZEBRA" not in answer.text
    assert nothing_is_held(live)
    assert live.spent_tokens == 0
    monkeypatch.undo()
    assert live.complete(headers={"idempotency-key": "one"}).status_code == 200


@pytest.mark.parametrize("part", ["whole", "events", "closing"])
def test_an_answer_that_breaks_midway_frees_what_it_held_and_does_not_end_like_a_whole_one(start, monkeypatch, part):
    live = start(on_exhausted="refuse", quota=100)

    monkeypatch.setattr(TextReply, part, fail)
    answer = live.complete(stream=part != "whole", headers={"idempotency-key": "one"})
    assert "ZEBRA" not in answer.text
    assert "[DONE]" not in answer.text
    assert '"internal_error"' in answer.text
    assert part != "whole" or answer.headers["x-should-retry"] == "false"
    wait_until(lambda: nothing_is_held(live))
    assert ward(live).used_tokens == live.spent_tokens > 0
    again = live.complete(stream=part != "whole", headers={"idempotency-key": "one"})
    assert again.json()["error"]["code"] == "idempotency_reply_lost"


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_reply_that_the_database_cannot_take_any_more_is_sent_and_never_charged_twice(
    make, small_tokenizer, postgres, database, monkeypatch, is_stream
):
    """Its tokens are charged, so its client gets them; asked for again it is lost, as documented."""
    monkeypatch.setenv("PACLM_LEDGER", database)
    finish = Replies.finish

    def finish_without_connection(replies, ticket, **reply):
        postgres.kill_backend(replies._db._writer.info.backend_pid, by=signal.SIGTERM)
        finish(replies, ticket, **reply)

    with serve(make(), ScriptedEngine(), small_tokenizer) as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replies, "finish", finish_without_connection)
        answer = live.complete(stream=is_stream, headers={"idempotency-key": "one"})
        ward = bearer(live.ward)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") or not is_stream
    with serve(make(), ScriptedEngine(), small_tokenizer, admin_name="second") as live:
        before = live.spent_tokens
        again = live.complete(stream=is_stream, headers={"idempotency-key": "one", **ward})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_reply_lost")
        assert live.spent_tokens == before > 0


def test_a_client_that_left_before_its_admission_is_never_admitted(start, engine):
    live = start(engine=engine, on_exhausted="refuse")
    with asking(engine) as pool:
        running = pool.submit(live.complete, max_tokens=2, temperature=0)
        engine.wait_until_it_stands()
        with sent(live):
            wait_until(lambda: live.num_calls == 1)
        wait_until(lambda: b"paclm_disconnects_total 1.0" in scrape(live))
        engine.let(2)
        assert running.result(60).status_code == 200
        wait_until(lambda: nothing_is_held(live))
    assert [len(order) for order in engine.orders] == [1, 1]
    assert live.service.num_requests["ward"] == 1
    assert ward(live).used_tokens == live.spent_tokens


def test_an_answer_that_never_started_may_be_sent_again(make, small_tokenizer):
    """At a stop nothing was charged for it: its idempotency key is free, and a retry is suggested."""
    engine, once = SteppedEngine(num_slots=1, dissent=0.0), {"idempotency-key": "waiting"}
    workspace, settings = make(), ServerConfig(shutdown_seconds=0.1)
    with serve(workspace, engine, small_tokenizer, settings=settings) as live, asking(engine) as pool:
        pool.submit(live.complete, max_tokens=30, temperature=0)
        engine.wait_until_it_stands()
        waiting = pool.submit(live.http.post, "/v1/completions", json=ASK, headers=once)
        wait_until(lambda: live.num_calls == 1)
        engine.let(1)
        engine.wait_until_it_stands()
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)
        engine.run_free()
        refused = waiting.result(60)
    assert refused.json()["error"]["code"] == "server_stopping"
    assert refused.headers["retry-after"]
    with serve(workspace, ScriptedEngine(), small_tokenizer, admin_name="again") as live:
        headers = {**bearer(live.keys.add("ward-2")), **once}
        assert live.http.post("/v1/completions", json=ASK, headers=headers).status_code == 200


def test_a_panic_in_the_scheduler_thread_stops_the_service(start, monkeypatch):
    """Native libraries raise panics as BaseException: no caller may wait for ever."""
    live, stopped = start(), threading.Event()
    live.service.on_failure = stopped.set
    for name in ("hold", "step"):
        monkeypatch.setattr(live.curator, name, Mock(side_effect=GeneratorExit))
        assert live.complete().status_code == 503
        monkeypatch.undo()
    assert stopped.wait(60)


def test_one_key_cannot_fill_the_queue_for_the_others(start, engine):
    live = start(engine=engine, settings=ServerConfig(max_waiting=3, max_answers=3))
    quiet = live.keys.add("quiet")
    with asking(engine) as pool:
        greedy = [pool.submit(live.complete, max_tokens=20, temperature=0) for _ in range(5)]
        wait_until(lambda: num_known(live) == 5)
        engine.let(1)
        engine.wait_until_it_stands()
        assert live.scheduler.num_waiting == 3
        more = [pool.submit(live.complete, max_tokens=2, headers=bearer(key)) for key in (live.ward, quiet)]
        wait_until(lambda: live.num_calls == 2)
        engine.run_free()
        refused = more[0].result(60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        assert more[1].result(60).status_code == 200
        assert [job.result(60).status_code for job in greedy] == [200] * 5
    assert live.complete().status_code == 200


def test_an_answer_cut_off_by_the_server_is_not_asked_for_again_by_itself(start, engine):
    """Something was charged: a client that retries by itself would pay twice without knowing."""
    live = start(engine=engine)
    live.service.on_failure = lambda: None  # it would end before its metrics are read
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.ward, max_retries=3)
    with asking(engine) as pool:
        job = pool.submit(lambda: client.completions.create(model="clinic", prompt="the", max_tokens=5, temperature=0))
        engine.let(2)
        engine.wait_until_it_stands()
        assert live.spent_tokens == 2
        engine.fails = True
        engine.let(1)
        with pytest.raises(openai.InternalServerError) as caught:
            job.result(60)
    assert caught.value.code == "answer_cut_off"
    wait_until(lambda: ward(live).reserved_tokens == 0)
    assert ward(live).used_tokens == 3  # a step that failed may have been committed: never counted too low
    assert live.service.num_requests["ward"] == 1
    assert b'paclm_refusals_total{reason="stopping"} 0.0' in scrape(live)


def scrape(live):
    return live.http.get("/metrics", headers=bearer(live.admin)).content


def events(said):
    """The events of a stream, by the letter of the standard: lines, and data in front."""
    lines = [line for line in said.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    "trick", ["\n\ndata: [DONE]\n\n", "\r\rdata: {}\r\r", "\u2028\u0085\x0b\x0c", "</script>", "\0"]
)
def test_no_text_can_speak_for_the_server_in_a_stream(shared, trick):
    plain = shared.complete(prompt=f"the {trick}", echo=True, temperature=0, max_tokens=2)
    assert plain.status_code == 200
    said = shared.complete(prompt=f"the {trick}", echo=True, temperature=0, max_tokens=2, stream=True)
    assert events(said.text)[0]["choices"][0]["text"] == f"the {trick}"


def test_a_key_sees_its_own_figures_and_no_other_names(live):
    other = live.keys.add("other", quota_tokens=50)
    live.complete()
    for path in ("/v1/privacy", "/v1/models", "/openapi.json"):
        said = live.http.get(path, headers=bearer(other)).text
        assert "ward" not in said
    own = live.http.get("/v1/privacy", headers=bearer(other)).json()["key"]
    assert own == {"name": "other", "quota_tokens": 50, "used_tokens": 0}
