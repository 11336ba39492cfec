"""Requests that no honest client sends, to a served curator: clients that leave, floods, and games with headers.

Whatever they do, what a client received was charged, nothing stays reserved, and the next honest request is answered.
"""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.live import bearer
from server.sockets import ask, connect, post_with_key, read_to_end
from server.stepped import num_known, wait_until

ASK = {"model": "clinic", "prompt": "the patient", "max_tokens": 6, "seed": 1}
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"


def ward(live):
    return next(key for key in live.keys.list() if key.name == "ward")


def check_at_rest(live):
    """Nothing is held for anyone, and an honest client is served."""
    wait_until(lambda: ward(live).reserved_tokens == 0 and live.curator.reserved_units == 0 and num_known(live) == 0)
    assert live.complete(max_tokens=1).status_code == 200


def tokens_in(said):
    """Tokens that a stream has delivered at least: one for each whole event with text."""
    events = map(json.loads, re.findall(rb"^data: (\{.*\})\n\n", said, re.MULTILINE))
    return sum(any(choice["text"] for choice in event.get("choices", ())) for event in events)


def streamed(live, **headers):
    body = json.dumps({**ASK, "stream": True}).encode()
    more = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return post_with_key(live) + more + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body


def test_clients_that_leave_after_every_event_received_no_more_than_was_charged(start):
    live = start(per_token="2^-16", total="2^-3")
    whole = ask(live, streamed(live))
    _, _, content = whole.partition(b"\r\n\r\n")
    num_events = content.count(b"data: ")
    assert 0 < tokens_in(content) <= ASK["max_tokens"]
    received, spent = tokens_in(content), live.spent_tokens
    for number in range(num_events + 1):
        with connect(live) as connection:
            connection.sendall(streamed(live))
            said = bytearray()
            while said.count(b"data: ") < number and (piece := connection.recv(1 + number * 7)):
                said += piece
        received += tokens_in(bytes(said).partition(b"\r\n\r\n")[2])
    check_at_rest(live)
    assert live.spent_tokens > spent
    assert received <= live.spent_tokens
    assert live.curator.usage().by_tag["ward"].tokens == live.spent_tokens  # all on the key that asked
    assert ward(live).used_tokens >= live.spent_tokens


def test_one_idempotency_key_repeated_by_many_at_once_is_charged_once(start):
    live = start()
    headers = {**bearer(live.ward), "idempotency-key": "one"}

    def send(_):
        return live.http.post("/v1/completions", json=ASK, headers=headers)

    with ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(send, range(48)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    (content,) = {answer.content for answer in answers if answer.status_code == 200}
    charged = json.loads(content)["usage"]["completion_tokens"]
    assert live.spent_tokens == charged > 0
    other = live.http.post("/v1/completions", json={**ASK, "prompt": "another"}, headers=headers)
    assert other.status_code in (409, 422)  # the same key for another request
    assert live.spent_tokens == charged
    check_at_rest(live)


@pytest.mark.parametrize(
    "flood",
    [
        b"".join(b"x-%d: y\r\n" % n for n in range(20_000)),
        b"".join(b"authorization: Bearer x\r\n" for _ in range(2_000)),
        b"cookie: " + b"a=b; " * 40_000 + b"\r\n",
        b"x" * 100_000 + b": y\r\n",
    ],
)
def test_a_flood_of_headers_is_refused_and_costs_nothing(shared, flood):
    spent = shared.spent_tokens
    said = ask(shared, post_with_key(shared) + flood + b"content-length: 2\r\nconnection: close\r\n\r\n{}")
    assert said[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401", b"HTTP/1.1 431", b""), said[:100]
    assert shared.spent_tokens == spent
    assert b"200 OK" in ask(shared, HEALTH)


def test_bodies_that_nest_repeat_or_never_end_are_refused_and_cost_nothing(shared):
    spent = shared.spent_tokens
    bodies = [
        b"[" * 100_000,
        b'{"model": "clinic", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "clinic", "max_tokens": ' + b"9" * 5_000 + b', "prompt": "a"}',
        b'{"model": "clinic", "prompt": "a", "max_tokens": 1e400}',
        b'{"model": "clinic", "prompt": "a", "temperature": NaN}',
        b'{"model": "clinic", "prompt": "\\ud800"}',
        b'{"model": "clinic", "prompt": ["' + b'", "'.join([b"a"] * 5_000) + b'"]}',
        b'{"model": "clinic", "prompt": "a", "n": 100000}',
    ]
    for body in bodies:
        answer = shared.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, body[:60]
        assert answer.json()["error"]["message"]
    assert shared.spent_tokens == spent


GOOD = json.dumps({**ASK, "max_tokens": 1}).encode()
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"authorization: Bearer KEY\r\nauthorization: Bearer wrong\r\n",
        b"authorization: Bearer wrong\r\nauthorization: Bearer KEY\r\n",
        b"authorization: Bearer KEY, Bearer KEY\r\n",
        b"authorization: Bearer KEY\x00\r\n",
        b"authorization: Bearer\tKEY\r\n",
        b"authorization:\r\n Bearer KEY\r\nauthorization: Bearer none\r\n",
        b"proxy-authorization: Bearer KEY\r\n",
        b"Authorization: Bearer KEY\rx: y\r\n",
    ],
)
def test_a_key_that_two_parsers_could_read_differently_is_no_key(shared, head):
    spent = shared.spent_tokens
    lines = HIDDEN + b"content-type: application/json\r\n" + head.replace(b"KEY", shared.ward.encode())
    said = ask(shared, lines + b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(GOOD), GOOD))
    assert said[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401"), said[:100]
    assert shared.spent_tokens == spent


@pytest.mark.parametrize(
    "lengths",
    [
        b"content-length: 0\r\ntransfer-encoding:\tchunked\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"transfer-encoding\x0b: chunked\r\n",
        b"content-length: 0x5\r\n",
        b"content-length: 5 5\r\n",
        b"content-length: 5, 6\r\n",
        b"content-length: 00000000000000000000000000000000000000000000000000000000000000005\r\n\r\nHIDE",
        b"content-length: 99999999999999999999999999\r\n",
    ],
)
def test_no_request_is_smuggled_behind_another(shared, lengths):
    """The second request carries a good key and asks for tokens: it must not be answered as one of its own."""
    spent = shared.spent_tokens
    second = post_with_key(shared) + b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(GOOD), GOOD)
    said = ask(shared, post_with_key(shared) + lengths + b"\r\n0\r\n\r\n" + second)
    assert said.count(b"HTTP/1.1 ") <= 1, said
    assert not said.startswith(b"HTTP/1.1 2"), said[:100]
    assert shared.spent_tokens == spent


@pytest.mark.parametrize("size", [b"2;x=y", b"0x2", b"2 ", b"-2", b"+2", b"2\n"])
def test_chunks_of_odd_sizes_are_not_read_as_other_requests(shared, size):
    spent = shared.spent_tokens
    second = post_with_key(shared) + b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(GOOD), GOOD)
    head = post_with_key(shared) + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    said = ask(shared, head + size + b"\r\n{}\r\n0\r\n\r\n" + second)
    assert said.count(b"HTTP/1.1 ") <= 1, said
    assert not said.startswith(b"HTTP/1.1 2"), said[:100]
    assert shared.spent_tokens == spent


@pytest.mark.stress
def test_a_thousand_clients_that_leave_at_random_are_charged_at_least_what_they_received(start):
    live = start(per_token="2^-18", total="2^-2")
    rng = random.Random(7)

    def visit(most):
        with connect(live) as connection:
            connection.sendall(streamed(live)[: rng.choice([None, 300, 50])])
            said = bytearray()
            connection.settimeout(5)
            try:
                while len(said) < most and (piece := connection.recv(257)):
                    said += piece
            except TimeoutError:
                pass
        return tokens_in(bytes(said).partition(b"\r\n\r\n")[2])

    with ThreadPoolExecutor(16) as clients:
        received = sum(clients.map(visit, [rng.randrange(4000) for _ in range(1000)]))
    check_at_rest(live)
    assert 0 < received <= live.spent_tokens
    with connect(live) as connection:
        connection.sendall(HEALTH)
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")
