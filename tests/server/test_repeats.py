"""A repeat with the Idempotency-Key of a request under way waits, gets the same bytes, and costs nothing."""

import asyncio
import json

import openai
import pytest

from paclm.config import ServerConfig
from paclm.server import answer, repeats, web_server
from paclm.server.refusals import queue_full
from server.live import bearer, ledger_rows, serve
from server.stepped import LONG, SteppedEngine, asking, sent, wait_until

ONCE = {"idempotency-key": "once"}
STREAM = {**LONG, "stream": True}


def ask(live, is_stream=False, **headers):
    return live.http.post("/v1/completions", json=STREAM if is_stream else LONG, headers={**ONCE, **headers})


def num_waiting(live, name="ward"):
    return live.service.repeats._num_waiting[name]


def used(live):
    return {key.name: (key.used_tokens, key.reserved_tokens) for key in live.keys.list()}


def error_of(text):
    """The code of the last event of a stream that ends with an error."""
    return json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"]


@pytest.fixture
def keeps_alive_often(monkeypatch):
    for module in (answer, web_server):
        monkeypatch.setattr(module, "KEEP_ALIVE_SECONDS", 0.02)


@pytest.mark.parametrize("is_stream", [False, True])
def test_repeats_that_come_meanwhile_get_the_same_bytes_and_all_are_charged_once(start, engine, monkeypatch, is_stream):
    monkeypatch.setattr(repeats, "MOST_WAITING", 3)
    live = start(engine=engine)
    other = bearer(live.keys.add("other"))
    with asking(engine) as pool:
        first = pool.submit(ask, live, is_stream)
        engine.wait_until_it_stands()
        waiting = [pool.submit(ask, live, is_stream) for _ in range(3)]
        wait_until(lambda: num_waiting(live) == 3)
        refused = ask(live, is_stream)  # a key has no more places to wait
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_in_progress")
        assert refused.headers["x-should-retry"] == "true"
        theirs = pool.submit(ask, live, is_stream, **other)  # another API key has its own answers, and its own places
        wait_until(lambda: live.num_calls == 1)
        assert not any(job.done() for job in (first, theirs, *waiting))
        engine.run_free()
        whole, mine = first.result(60), theirs.result(60)
        for job in waiting:
            again = job.result(60)
            assert (again.status_code, again.content) == (200, whole.content)
            assert again.headers["idempotent-replayed"] == "true"
    for fresh in (whole, mine):
        assert "idempotent-replayed" not in fresh.headers
    assert whole.content != mine.content
    assert live.spent_tokens == 2 * 40
    assert used(live) == {"admin": (0, 0), "ward": (40, 0), "other": (40, 0)}
    assert num_waiting(live) == 0
    assert not live.service.repeats._waiting


def test_a_repeat_gets_the_answer_of_a_client_whose_connection_was_lost(start, engine):
    live = start(engine=engine)
    with asking(engine) as pool:
        with sent(live, **ONCE):
            engine.wait_until_it_stands()
        again = pool.submit(ask, live)
        wait_until(lambda: num_waiting(live) == 1)
        engine.run_free()
        answered = again.result(60)
    assert answered.headers["idempotent-replayed"] == "true"
    assert answered.json()["usage"]["completion_tokens"] == live.spent_tokens == 40
    assert used(live)["ward"] == (40, 0)


def test_a_client_with_a_short_timeout_gets_its_answer_by_retrying_and_is_charged_once(start, engine):
    """The official client retries by itself, with the same headers."""
    live = start(engine=engine)
    options = {"api_key": live.ward, "timeout": 0.3, "max_retries": 9}
    with asking(engine) as pool, openai.OpenAI(base_url=f"{live.url}/v1", **options) as client:
        job = pool.submit(client.completions.create, **LONG, extra_headers=ONCE)
        wait_until(lambda: num_waiting(live) == 1)
        engine.run_free()
        usage = job.result(60).usage
    assert usage.completion_tokens == live.spent_tokens == 40
    assert used(live)["ward"] == (40, 0)


def test_a_repeat_whose_client_leaves_waits_no_longer_and_the_first_is_not_disturbed(start, engine):
    live = start(engine=engine)
    with asking(engine) as pool:
        first = pool.submit(ask, live)
        engine.wait_until_it_stands()
        with sent(live, **ONCE):
            wait_until(lambda: num_waiting(live) == 1)
        wait_until(lambda: num_waiting(live) == 0)
        assert not first.done()
        engine.run_free()
        assert first.result(60).status_code == 200
    assert live.spent_tokens == 40
    assert live.service.state == "serving"


@pytest.mark.parametrize("is_stream", [False, True])
def test_if_the_first_is_refused_before_any_charge_a_repeat_takes_its_turn(start, monkeypatch, is_stream):
    """The first is refused while three wait: one of them is answered, once, and the others get its bytes."""
    live, tried = start(), []
    admit, gate = live.service.curator.admit, asyncio.Event()

    async def refuse_the_first(*arguments, **more):
        tried.append(True)
        await gate.wait()
        if len(tried) == 1:
            raise queue_full(7)
        await admit(*arguments, **more)

    monkeypatch.setattr(live.service.curator, "admit", refuse_the_first)
    with asking(SteppedEngine()) as pool:
        first = pool.submit(ask, live, is_stream)
        wait_until(lambda: tried)
        waiting = [pool.submit(ask, live, is_stream) for _ in range(3)]
        wait_until(lambda: num_waiting(live) == 3)
        live.service._loop.call_soon_threadsafe(gate.set)
        assert (first.result(60).status_code, first.result().json()["error"]["code"]) == (503, "queue_full")
        answers = [job.result(60) for job in waiting]
    assert {again.status_code for again in answers} == {200}
    assert len({again.content for again in answers}) == 1
    assert sum("idempotent-replayed" not in again.headers for again in answers) == 1
    assert len(tried) == 2
    assert used(live)["ward"] == (live.spent_tokens, 0)
    assert 0 < live.spent_tokens <= 40


def test_a_stream_that_waits_is_kept_alive_and_then_gets_all_events_at_once(start, engine, keeps_alive_often):
    live = start(engine=engine)
    with asking(engine) as pool:
        first = pool.submit(ask, live, True)
        engine.wait_until_it_stands()
        with live.http.stream("POST", "/v1/completions", json=STREAM, headers=ONCE) as again:
            assert again.headers["idempotent-replayed"] == "true"
            lines = again.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", ""] * 2
            engine.run_free()
            events = [line for line in lines if line.startswith("data: ")]
    expected = [line for line in first.result().text.splitlines() if line.startswith("data: ")]
    assert events == expected
    assert events[-1] == "data: [DONE]"
    assert live.spent_tokens == 40


def test_a_stream_that_has_begun_to_wait_says_it_if_the_first_fails(start, monkeypatch, keeps_alive_often):
    """Its headers have promised the first answer: a new one, which is charged, must not come in its place."""
    live, tried = start(), []
    gate = asyncio.Event()

    async def refuse(*_, **__):
        tried.append(True)
        await gate.wait()
        raise queue_full(7)

    with asking(SteppedEngine()) as pool, monkeypatch.context() as patch:
        patch.setattr(live.service.curator, "admit", refuse)
        pool.submit(ask, live, True)
        wait_until(lambda: tried)
        with live.http.stream("POST", "/v1/completions", json=STREAM, headers=ONCE) as again:  # its headers are here
            live.service._loop.call_soon_threadsafe(gate.set)
            assert error_of(again.read().decode()) == "idempotency_first_failed"
    assert live.spent_tokens == 0
    assert len(tried) == 1
    assert ask(live, True).status_code == 200  # the key is free


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_ends_the_waiting_with_a_clear_error(make, small_tokenizer, keeps_alive_often, is_stream):
    engine, workspace = SteppedEngine(dissent=0.0), make()
    settings = ServerConfig(shutdown_seconds=0.1)
    with serve(workspace, engine, small_tokenizer, settings=settings) as live, asking(engine) as pool:
        first = pool.submit(ask, live, is_stream)
        engine.let(1)
        engine.wait_until_it_stands()
        again = pool.submit(ask, live, is_stream)
        wait_until(lambda: num_waiting(live) == 1)
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)  # the time to end is over, in the middle of a step
        engine.let(1)
        codes = [error_of(job.result(60).text) for job in (first, again)]
    assert codes == ["answer_cut_off", "idempotency_reply_lost"]
    assert ledger_rows(workspace.path) == 2
