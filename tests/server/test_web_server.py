"""Connections that say nothing, say it slowly, never read or are too many; and requests no honest client sends."""

import contextlib
import json
import resource
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

import paclm
from curator.deployments import ScriptedEngine
from paclm.config import ServerConfig
from paclm.errors import ServiceError
from paclm.server import web_server
from paclm.server.address import allow_files
from paclm.server.web_server import _address
from server.live import bearer
from server.sockets import ask, connect, post_with_key, read_to_end, standing_still
from server.stepped import LONG, asking, num_known, sent, wait_until

HEAD = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"
IMPATIENT = ServerConfig(read_seconds=0.4)


@pytest.mark.parametrize("beginning", [b"", b"G", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_connection_that_does_not_finish_its_request_is_ended(start, beginning):
    said = ask(start(settings=IMPATIENT), beginning)  # comes to its end
    assert said.count(b"HTTP/1.1 200") == beginning.count(b"\r\n\r\n")


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(start):
    live = start(settings=IMPATIENT)
    with connect(live) as connection, pytest.raises(ConnectionError):
        wait_until(lambda: connection.sendall(b"x"))


def test_a_reader_that_never_reads_is_ended_and_one_that_reads_gets_everything(start):
    name, times = "vendor/uplot/uPlot.iife.min.js", 150
    script = (Path(paclm.__file__).parent / "server" / "static" / name).read_bytes()
    request = f"GET /static/{name} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode() * times

    patient = start(name="patient", settings=ServerConfig(read_seconds=600))
    patient.server.config.timeout_keep_alive = 600  # a test that is slow to look still finds the connection
    with connect(patient, SO_RCVBUF=65536) as connection:
        connection.sendall(request)
        is_behind = lambda: any(served._stall for served in list(patient.server.server_state.connections))  # noqa: E731
        wait_until(is_behind)
        whole = bytearray()
        while not (whole.endswith(script) and whole.count(b"HTTP/1.1 200") == times):
            piece = connection.recv(2**20)
            assert piece
            whole += piece
        (served,) = patient.server.server_state.connections
        wait_until(served._stall.cancelled)  # it has caught up, and the server knows
        assert served in patient.server.server_state.connections  # also the end of a connection stops its clock

    impatient = start(name="impatient", settings=IMPATIENT)
    with standing_still(impatient):
        connection = connect(impatient, SO_RCVBUF=4096)
        connection.sendall(request)
    with connection:
        state = impatient.server.server_state
        wait_until(lambda: bool(state.total_requests) and not state.connections)
        assert 0 < len(read_to_end(connection)) < len(whole)


def test_an_answer_may_take_longer_than_its_request_may(start):
    class Slow(ScriptedEngine):
        def collect(self):
            time.sleep(0.25)
            return super().collect()

    live = start(engine=Slow(), settings=IMPATIENT)
    for is_stream in (False, True):
        body = json.dumps({"model": "clinic", "prompt": "the", "max_tokens": 4, "stream": is_stream}).encode()
        said = ask(live, post_with_key(live) + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        assert said.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]\n\n" in said


@contextlib.contextmanager
def connections(live, num, said=b""):
    """So many connections, each of which has said this and waits."""
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            with contextlib.suppress(ConnectionError):  # it may have been closed already
                stack.enter_context(connect(live)).sendall(said)
        yield


def num_idle(live):
    return sum(served.is_waiting for served in list(live.server.server_state.connections))


@pytest.fixture
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"\r\n"], ids=["silent", "half a head", "answered and kept"])
def test_five_hundred_and_twelve_idle_connections_shut_out_nobody(start, many_files, said):
    live = start(settings=ServerConfig(max_connections=512, read_seconds=600))
    live.server.config.timeout_keep_alive = 600
    with connections(live, 512, said):
        wait_until(lambda: num_idle(live) >= 448)  # one address holds no more
        for _ in range(3):
            assert httpx.get(f"{live.url}/health").status_code == 200
            assert httpx.get(f"{live.url}/v1/models", headers=bearer(live.ward)).status_code == 200
        assert live.complete().status_code == 200
        assert len(live.server.server_state.connections) <= 512


def test_requests_whose_body_does_not_arrive_make_room(start):
    live = start(settings=ServerConfig(max_connections=8, read_seconds=600))
    with connections(live, 7, post_with_key(live) + b"content-length: 9\r\n\r\n{"):
        wait_until(lambda: [s.cycle is not None for s in list(live.server.server_state.connections)] == [True] * 7)
        wait_until(lambda: num_idle(live) == 7)
        assert live.complete().status_code == 200


def test_places_are_kept_for_health_and_callers_with_keys(start, engine):
    """Seven of eight places are at work for one address: it gets the last for these alone, and then none."""
    live = start(engine=engine, settings=ServerConfig(max_connections=8))
    with asking(engine) as pool, contextlib.ExitStack() as clients:
        for number in range(1, 8):
            clients.enter_context(sent(live))
            wait_until(lambda number=number: num_known(live) == number)
        keyless = httpx.get(f"{live.url}/v1/models")
        assert (keyless.status_code, keyless.json()["error"]["code"]) == (503, "too_many_connections")
        assert httpx.get(f"{live.url}/v1/models", headers=bearer("paclm-guess")).status_code == 401
        kept = httpx.get(f"{live.url}/health")
        assert (kept.status_code, kept.headers["connection"]) == (200, "close")
        last = pool.submit(httpx.post, f"{live.url}/v1/completions", json=LONG, headers=bearer(live.ward), timeout=60)
        wait_until(lambda: num_known(live) == 8)
        refused = ask(live, HEAD + b"\r\n")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 2" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        engine.run_free()
        assert last.result(60).status_code == 200
    wait_until(lambda: not live.server.server_state.connections)
    assert live.complete().status_code == 200


def test_one_address_cannot_take_the_places_of_another(start, monkeypatch):
    """Addresses are counted by network; the newcomer takes the place of the oldest at the fullest address."""
    assert [_address((host, 1)) for host in ("10.0.0.1", "2001:db8::1", "2001:db8::2:0:0:7", "fe80::1%eth0")] == [
        "10.0.0.1",
        "2001:db8::/64",
        "2001:db8::/64",
        "fe80::/64",
    ]
    live = start(settings=ServerConfig(max_connections=8, read_seconds=600))
    come = []
    monkeypatch.setattr(web_server, "_address", lambda _: come.append("there" if len(come) < 5 else "here") or come[-1])
    with contextlib.ExitStack() as stack:
        for number in range(1, 25):
            stack.enter_context(connections(live, 1))
            wait_until(lambda number=number: len(come) == number and num_idle(live) == min(number, 8))
        assert Counter(served.address for served in live.server.server_state.connections) == {"here": 5, "there": 3}


def test_a_process_that_may_not_open_enough_files_does_not_serve(monkeypatch):
    limits = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_files(64)
    assert len(limits) == 1  # enough already
    allow_files(512)
    assert limits[-1] == (640, 1024)
    with pytest.raises(ServiceError, match="max_connections"):
        allow_files(1000)


KEYLESS = b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"origin: http://[\r\n", 403),
        (HEAD + b"origin: http://127.0.0.1\r\norigin: http://evil.example\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: ftp://127.0.0.1\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: evil.example@127.0.0.1\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1/evil.example\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1#evil.example\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1:port\r\n", 403),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: evil.example\r\n", 400),
        (b"GET /health HTTP/1.0\r\n", 403),
        (b"GET http://127.0.0.1/health HTTP/1.1\r\nhost: 127.0.0.1\r\n", 404),
        (b"TRACE / HTTP/1.1\r\nhost: 127.0.0.1\r\n", 405),
        (b"GET /v1/models?api_key=KEY HTTP/1.1\r\nhost: 127.0.0.1\r\n", 401),
        (b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y\r\n authorization: Bearer KEY\r\n", 401),
        (b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization : Bearer KEY\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: KEY\r\ncookie: authorization=KEY\r\n", 401),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 200_000 + b"\r\n", 400),
        (b"GET /static/%00 HTTP/1.1\r\nhost: 127.0.0.1\r\n", 404),
        (b"GET /%ff%fe HTTP/1.1\r\nhost: 127.0.0.1\r\n", 404),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n", 403),
    ],
)
def test_what_no_honest_client_sends_gets_a_4xx(shared, head, status):
    said = ask(shared, head.replace(b"KEY", shared.ward.encode()) + KEYLESS)
    assert said.startswith(b"HTTP/1.1 %d" % status), said[:200]
    assert shared.ward.encode() not in said


@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"content-length: 5\r\ncontent-length: 60\r\n",
        b"transfer-encoding: identity\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"content-length: -1\r\n",
        b"content-length: +5\r\n",
    ],
)
def test_a_body_whose_end_can_be_read_in_two_ways_is_refused_and_the_connection_ended(shared, lengths):
    """Behind a proxy that reads the other end, the rest would be somebody else's request."""
    body = json.dumps({"model": "clinic", "prompt": "the", "max_tokens": 2}).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    spent = shared.spent_tokens
    said = ask(shared, post_with_key(shared) + lengths + b"\r\n" + chunked + HEAD + b"\r\n")
    assert said.startswith(b"HTTP/1.1 400"), said[:200]
    assert said.count(b"HTTP/1.1") == 1
    assert b'"ok"' not in said
    assert shared.spent_tokens == spent
