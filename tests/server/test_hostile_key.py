"""One hostile key takes its own turns: prompts, bodies and writes of another key do not wait for it.

`bench/hostile_key.py` measures by how much a first token is delayed.
"""

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from curator.deployments import CONTEXT
from paclm.config import ServerConfig
from paclm.server.api_keys import KeyStore
from paclm.server.database import open_database
from paclm.server.workers import Writer
from server.live import bearer
from server.sockets import connect, post_with_key
from server.stepped import wait_until

MEGABYTE = "the patient " * 80_000
LONG = {"stop": ["x" * 1000] * 4, "user": "x" * 500}
"""Fields that make a body too long to be tokenized on the event loop."""


class WatchedTokenizer:
    """Notes the longest text, and stops at those that begin with `hold` until `go` is set."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.longest = 0
        self.num_held = 0
        self.go = threading.Event()

    def encode(self, text, **options):
        self.longest = max(self.longest, len(text))
        if text.startswith("hold"):
            self.num_held += 1
            assert self.go.wait(60)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.fixture
def tokenizer(small_tokenizer):
    watched = WatchedTokenizer(small_tokenizer)
    yield watched
    watched.go.set()


def num_waiting(turns):
    return len(turns["ward"]._waiters or ())


@pytest.fixture
def many():
    """Clients that wait at the same time."""
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def other(live):
    return bearer(live.keys.add("other"))


@pytest.fixture
def live(start, tokenizer):
    return start(tokenizer=tokenizer)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/privacy/plan"])
def test_a_prompt_of_a_megabyte_is_refused_before_it_is_tokenized(start, chat_tokenizer, path):
    watched = WatchedTokenizer(chat_tokenizer)
    live = start(tokenizer=watched)
    said = (
        {"prompt": MEGABYTE}
        if path != "/v1/chat/completions"
        else {"messages": [{"role": "user", "content": MEGABYTE}]}
    )
    refused = live.http.post(path, json={"model": "clinic", "max_tokens": 2, **said})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        *said,
        "invalid_request_error",
    )
    assert "patient" not in refused.text
    assert watched.longest == 0
    assert live.complete("the", CONTEXT - 1).status_code == 200  # one that fits exactly is served
    assert live.complete("the", CONTEXT).json()["error"]["param"] == "max_tokens"
    assert live.spent_tokens <= CONTEXT


def test_prompts_of_one_key_that_take_long_to_tokenize_do_not_hold_up_another(live, other, tokenizer, many):
    slow = [many.submit(live.complete, "hold", **LONG) for _ in range(30)]
    wait_until(lambda: tokenizer.num_held == 1)
    assert live.complete(headers=other).status_code == 200
    assert live.http.get("/v1/models").status_code == 200  # nor the look-up of its own key
    assert tokenizer.num_held == 1
    tokenizer.go.set()
    assert {job.result(60).status_code for job in slow} == {200}


def test_a_client_that_leaves_does_not_free_the_thread_that_still_works_for_it(live, other, tokenizer):
    body = json.dumps({"model": "clinic", "prompt": "hold", "max_tokens": 2, **LONG}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            left = stack.enter_context(connect(live))
            left.sendall(post_with_key(live) + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: num_waiting(live.service.tokenizing._turns) == 11)
    wait_until(lambda: not live.server.server_state.connections)
    wait_until(lambda: tokenizer.num_held == 1)
    assert live.complete(headers=other).status_code == 200
    assert tokenizer.num_held == 1


def test_writes_of_one_key_leave_another_its_place_in_the_next_transaction():
    groups, stands, go = [], threading.Event(), threading.Event()

    def together(writes):
        groups.append([write() for write in writes])
        stands.set()
        assert go.wait(60)
        return groups[-1]

    async def write_many():
        writer = Writer(together)
        first = asyncio.create_task(writer.run("ward", str, "ward"))
        await asyncio.to_thread(stands.wait, 60)
        rest = [asyncio.create_task(writer.run(owner, str, owner)) for owner in ["ward"] * 200 + ["other"]]
        await asyncio.sleep(0)  # all of them wait now
        go.set()
        assert await asyncio.gather(first, *rest) == ["ward"] * 201 + ["other"]
        writer.close()

    asyncio.run(write_many())
    assert groups[0] == ["ward"]
    assert groups[1] == ["ward"] * 64 + ["other"]
    assert [len(group) for group in groups] == [1, 65, 64, 64, 8]


def test_a_key_is_looked_up_while_a_commit_takes_long(path, many):
    with open_database(path) as database:
        keys = KeyStore(database)
        key = keys.add("ward")
        with database.writing() as db:
            db.execute("UPDATE keys SET used_tokens = 7")
            found = many.submit(keys.identify, key).result(60)
            assert (found.name, found.used_tokens) == ("ward", 0)  # of the last commit
        assert keys.identify(key).used_tokens == 7


def test_large_bodies_of_one_key_are_read_two_at_a_time(start):
    """More would fill memory and the event loop; those of another key are read at once."""
    live = start(settings=ServerConfig(read_seconds=600))
    other = bearer(live.keys.add("other"))
    body = json.dumps({"model": "clinic", "prompt": "the", "max_tokens": 2, "user": "x"}).encode() + b" " * 100_000
    head = post_with_key(live) + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(live)) for _ in range(6)]
        for connection in slow:
            connection.sendall(head + body[:10])
        wait_until(lambda: num_waiting(live.service.large_bodies) == 4)
        large = live.http.post("/v1/completions", content=body, headers={**other, "content-type": "application/json"})
        assert large.status_code == 200
        assert live.complete().status_code == 200  # a small one of the same key does not wait either
        for connection in slow:
            connection.sendall(body[10:])
        for connection in slow:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
