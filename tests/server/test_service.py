"""Many requests at once: batching, turns among keys, full queues, clients that leave, and the end of the server."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx

from paclm.config import ServerConfig
from paclm.server.curator_client import CuratorClient
from paclm.server.scheduler import Scheduler
from paclm.server.service import HalfService
from server.live import bearer, ledger_rows, serve
from server.stepped import LONG, SteppedEngine, asking, num_known, sent, wait_until


def test_requests_join_and_leave_between_steps(start, engine):
    live = start(engine=engine)
    with asking(engine) as pool:
        long = pool.submit(live.complete, max_tokens=20, temperature=0)
        engine.let(2)
        engine.wait_until_it_stands()
        short = pool.submit(live.complete, max_tokens=1, temperature=0)
        wait_until(lambda: num_known(live) == 2)
        engine.let(3)  # this one, the next, which is launched when this one ends, and the first with both
        assert short.result(60).status_code == 200
        assert not long.done()
        engine.run_free()
        assert long.result(60).json()["usage"]["completion_tokens"] <= 20
    assert [len(order) for order in engine.orders[:6]] == [1, 1, 1, 1, 2, 1]


def test_a_busy_key_delays_a_quiet_one_by_its_running_answers_only(start, engine):
    live = start(engine=engine)
    quiet = live.keys.add("quiet")
    done = []

    def ask(name, key):
        assert live.complete(max_tokens=2, temperature=0, headers=bearer(key)).status_code == 200
        done.append(name)

    with asking(engine) as pool:
        busy = [pool.submit(ask, "busy", live.ward) for _ in range(8)]
        wait_until(lambda: num_known(live) == 8)
        one = pool.submit(ask, "quiet", quiet)
        wait_until(lambda: num_known(live) == 9)
        engine.let(5)
        one.result(60)
        assert done.count("busy") <= 4
        engine.run_free()
        for job in busy:
            job.result(60)


def test_a_client_that_leaves_frees_its_place_at_once_and_pays_for_what_left(start, engine):
    live = start(engine=engine, on_exhausted="refuse")
    engine.let(3)
    with live.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: losing it would end the connection
        assert next(lines).startswith("data:")
        engine.wait_until_it_stands()
        assert live.spent_tokens == 3
    wait_until(lambda: live.num_calls == 1)
    engine.let(1)  # the step that was under way when it left
    wait_until(lambda: live.scheduler.num_running == 0 and live.curator.reserved_units == 0)
    assert live.spent_tokens == 4
    wait_until(lambda: not any(key.reserved_tokens for key in live.keys.list()))
    assert sum(key.used_tokens for key in live.keys.list()) == 4


def test_a_client_that_leaves_the_queue_is_never_charged(start, engine):
    live = start(engine=engine)
    with asking(engine) as pool:
        jobs = [pool.submit(live.complete, max_tokens=9, temperature=0) for _ in range(2)]
        wait_until(lambda: num_known(live) == 2)
        engine.let(1)
        engine.wait_until_it_stands()
        assert live.scheduler.num_running == 2
        with sent(live):
            wait_until(lambda: num_known(live) == 3)
            engine.let(1)
            engine.wait_until_it_stands()
            assert live.scheduler.num_waiting == 1
        wait_until(lambda: live.num_calls == 1)
        engine.run_free()
        tokens = sum(job.result(60).json()["usage"]["completion_tokens"] for job in jobs)
    wait_until(lambda: num_known(live) == 0)
    assert live.spent_tokens == tokens


def test_with_an_idempotency_key_a_client_that_left_finds_its_answer(start, engine):
    live = start(engine=engine)
    key = {"idempotency-key": "again"}
    with sent(live, **key):
        engine.wait_until_it_stands()
    engine.run_free()
    again = live.http.post("/v1/completions", json=LONG, headers=key)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["usage"]["completion_tokens"] == live.spent_tokens


def test_a_budget_held_by_others_is_worth_waiting_for(start, engine):
    live = start(engine=engine, per_token="2^-8", total="2^-4", on_exhausted="refuse")  # sixteen tokens
    with asking(engine) as pool:
        pool.submit(live.complete, max_tokens=10, temperature=0)
        engine.wait_until_it_stands()
        waiting = pool.submit(live.complete, max_tokens=8)
        wait_until(lambda: num_known(live) == 2)
        engine.let(1)
        refused = waiting.result(60)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "privacy_budget_held"


def test_an_admitted_answer_never_dies_midway(start, engine):
    """Twelve streams of four tokens want 48, and 16 are there: those that are admitted get all of theirs."""
    engine.run_free()
    live = start(engine=engine, per_token="2^-8", total="2^-4", on_exhausted="refuse")
    with asking(engine) as pool:
        jobs = [pool.submit(live.complete, max_tokens=4, temperature=0) for _ in range(12)]
        answers = [job.result(60) for job in jobs]
    good = [answer.json() for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} <= {200, 429, 503}
    assert len(good) >= 4
    assert all(answer["privacy"]["public_tokens"] == 0 for answer in good)
    assert sum(answer["usage"]["completion_tokens"] for answer in good) == live.spent_tokens <= 16


def test_a_step_that_fails_ends_the_service_and_says_nothing(start, engine):
    live = start(engine=engine)
    stopped = threading.Event()
    live.service.on_failure = stopped.set
    with asking(engine) as pool:
        jobs = [pool.submit(live.complete, max_tokens=5) for _ in range(2)]
        wait_until(lambda: num_known(live) == 2)
        engine.fails = True
        engine.let(1)
        answers = [job.result(60) for job in jobs]
    assert stopped.wait(60)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "ZEBRA" not in "".join(answer.text for answer in answers)
    assert live.http.get("/health").status_code == 503
    assert live.complete().status_code == 503
    assert live.spent_tokens == 0


def test_a_signal_before_the_start_is_kept_for_it(live):
    said = []
    Scheduler(live.curator, SimpleNamespace(send=lambda *message: said.append(message)), 1).hello()
    ((_, hello),) = said
    service = HalfService(None, CuratorClient(hello), live.service.setup, None, live.keys, live.service.replies)
    service.drain()
    assert service.state == "draining"


def count_looks(live):
    """Grows whenever uvicorn looks whether it should exit, by what it found."""
    looks = []
    look = live.server.on_tick

    async def counted(counter):
        looks.append(await look(counter))
        return looks[-1]

    live.server.on_tick = counted
    return looks


def test_the_port_stays_open_and_says_draining_until_the_last_answer(start, engine):
    """A balancer that asks on a new connection must learn that it is to look elsewhere, not find nobody."""
    live = start(engine=engine)
    with asking(engine) as pool:
        job = pool.submit(live.complete, max_tokens=4, temperature=0)
        wait_until(lambda: num_known(live) == 1)
        looks = count_looks(live)
        live.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: len(looks) >= 3)  # the first of them may have begun before the signal
        health = httpx.get(f"{live.url}/health", timeout=60)
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert live.complete().status_code == 503
        engine.run_free()
        assert job.result(60).status_code == 200

    def is_closed():
        try:
            httpx.get(f"{live.url}/health", timeout=60)
        except httpx.TransportError:
            return True
        return False

    wait_until(is_closed)


def test_the_ledger_has_what_clients_received_after_a_stop_in_the_middle(make, small_tokenizer):
    workspace = make()
    received = []
    engine = SteppedEngine(dissent=0.0)
    with ThreadPoolExecutor(4) as clients, serve(workspace, engine, small_tokenizer) as live, asking(engine):
        jobs = [clients.submit(stream_tokens, live, received) for _ in range(4)]
        wait_until(lambda: num_known(live) == 4)
        engine.let(5)
        engine.wait_until_it_stands()
        assert live.spent_tokens >= 8
    for job in jobs:
        job.result(60)
    assert ledger_rows(workspace.path) >= sum(received) > 0


def test_what_does_not_end_in_time_is_cut_off_and_charged(make, small_tokenizer):
    workspace, received = make(), []
    engine, settings = SteppedEngine(), ServerConfig(shutdown_seconds=0.1)
    with serve(workspace, engine, small_tokenizer, settings=settings) as live, asking(engine) as pool:
        job = pool.submit(stream_tokens, live, received)
        engine.let(2)
        engine.wait_until_it_stands()
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)  # the time to end is over, in the middle of a step
        engine.run_free()
        assert job.result(60) == "answer_cut_off"
    assert sum(received) == ledger_rows(workspace.path) == 3  # the step that was under way, and none after it


def test_a_stream_that_is_cut_off_shows_what_was_held_back(make, small_tokenizer):
    """All that was said could have become the stop string; when the server stops, it cannot any more."""
    engine = SteppedEngine(dissent=0.0)
    settings = ServerConfig(shutdown_seconds=0.5)
    with serve(make(), engine, small_tokenizer, settings=settings) as live:
        with asking(engine) as pool:
            engine.run_free()
            whole = live.complete(**LONG).json()["choices"][0]["text"]
            engine.stand_still()
            stop = f"{whole}, and this will never be said"
            job = pool.submit(live.complete, **LONG, stop=stop, stream=True)
            wait_until(lambda: num_known(live) == 1)
            before = live.spent_tokens
            engine.let(10)
            engine.wait_until_it_stands()
            assert live.spent_tokens == before + 10
            live.service.drain()
            wait_until(lambda: live.num_calls == 1)
            engine.let(1)
        events = [json.loads(line[6:]) for line in job.result(60).text.splitlines() if line.startswith("data: {")]
    assert len(events) == 2
    said = events[0]["choices"][0]["text"]
    assert 0 < len(said) < len(whole)
    assert whole.startswith(said)
    assert events[1]["error"]["code"] == "answer_cut_off"


def test_answers_that_nobody_listens_to_share_the_time_to_end_with_the_others(make, small_tokenizer):
    """With an Idempotency-Key an answer goes on without its client; it must not double the time that a stop takes."""
    engine = SteppedEngine(dissent=0.0)
    workspace, settings = make(), ServerConfig(shutdown_seconds=0.1)
    with serve(workspace, engine, small_tokenizer, settings=settings) as live, asking(engine):
        with sent(live, **{"idempotency-key": "kept"}):
            engine.let(1)
            engine.wait_until_it_stands()
            assert live.spent_tokens == 1
        live.service.drain()
        wait_until(lambda: live.num_calls == 1)  # the time to end is over, in the middle of a step
        engine.let(1)
        wait_until(lambda: live.service.state == "stopped")  # and there was no second time for this answer
    assert len(engine.orders) == 2
    assert ledger_rows(workspace.path) == 2


def stream_tokens(live, received):
    """Count the tokens that really arrived; returns the code of an error in the stream."""
    code = None
    body, headers = {**LONG, "stream": True}, bearer(live.admin)  # marks count tokens exactly
    with httpx.stream("POST", live.url + "/v1/completions", json=body, headers=headers, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                received.append(len(event.get("privacy", {}).get("marks", [])))
                code = event.get("error", {}).get("code", code)
    return code
