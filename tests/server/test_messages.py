"""What the curator does with messages of a front that is broken, or in the hands of an attacker."""

import asyncio
import dataclasses
import socket
import threading

import pytest

from curator.deployments import ScriptedEngine
from paclm import Curator
from paclm.config import MechanismConfig
from paclm.curator.streams import Limits, Request
from paclm.server.curator_client import CuratorClient
from paclm.server.messages import MAX_BYTES, BrokenLink, Link, Unpacker, pack
from paclm.server.refusals import Refused
from paclm.server.scheduler import Scheduler
from server.stepped import wait_until

GOOD = [[1, 2, 3], 4, 0.0, [], None, None, None]


@pytest.fixture
def link(make, small_tokenizer):
    """The front's end of a link to a curator whose loop runs in a thread, and what the loop raised."""
    own, its = socket.socketpair()
    raised = []

    def run(curator):
        try:
            Scheduler(curator, Link(own), max_waiting=4).run()
        except BaseException as error:
            raised.append(error)

    with Curator.open(make(), engine=ScriptedEngine(num_slots=2), tokenizer=small_tokenizer) as curator, own, its:
        its.settimeout(60)
        thread = threading.Thread(target=run, args=(curator,))
        thread.start()
        yield its, curator, raised, thread
        its.close()
        thread.join(60)
        assert not thread.is_alive()


def answers(end):
    """What comes back, message by message."""
    unpacker = Unpacker()
    while data := end.recv(65536):
        yield from unpacker.feed(data)


@pytest.mark.parametrize(
    "sent",
    [
        *(pack(message) for message in ([], {}, None, 7, "stop", ["stop"], ["stop", "1"], ["eval", 1, "1+1"])),
        pack(["query", 1, "secret"]),
        pack(["query", 1, ["usage"]]),
        pack(["cancel", 1, [1.5]]),
        pack(["cancel", 1, "12"]),
        pack(["admit", 1, "ward", 0, []]),
        pack(["admit", 1, 7, 0, [GOOD]]),
        pack(["admit", 1, "ward", 0, [GOOD[:5]]]),
        pack(["admit", 1, "ward", 0, ["12345"]]),
        pack(["admit", 1, "ward", -1, [GOOD]]),
        pack(["admit", 1, "ward", 0, [GOOD]]) + pack(["admit", 2, "ward", 0, [GOOD]]),
        b"\0\0\0\4{]{]",
        b"\0\0\0\2\xff\xff",
        (MAX_BYTES + 1).to_bytes(4, "big"),
        b"\0\1\0\0" + b"[" * 65536,
    ],
)
def test_a_message_of_a_wrong_form_ends_the_server_in_order(link, sent):
    end, curator, raised, thread = link
    end.sendall(sent)
    last = list(answers_until_stopped(end))[-1]
    thread.join(60)
    assert last == ["stopped", True]
    assert [type(error) for error in raised] == [BrokenLink]
    assert curator.reserved_units == 0


def answers_until_stopped(end):
    for message in answers(end):
        yield message
        if message[0] == "stopped":
            return


@pytest.mark.parametrize(
    ("owner", "wrong"),
    [
        ("ward", [[1, -1], 4, 0.0, [], None, None, None]),
        ("ward", [[700], 4, 0.0, [], None, None, None]),
        ("ward", [["the"], 4, 0.0, [], None, None, None]),
        ("ward", [[[1]], 4, 0.0, [], None, None, None]),
        ("ward", [[1], 0, 0.0, [], None, None, None]),
        ("ward", [[1], 2**70, 0.0, [], None, None, None]),
        ("ward", [[1], 4, float("nan"), [], None, None, None]),
        ("ward", [[1], 4, -1.0, [], None, None, None]),
        ("ward", [[1], 4, 10**400, [], None, None, None]),
        ("ward", [[1], 4, 0.0, [7], None, None, None]),
        ("ward", [[1], 4, 0.0, [""], None, None, None]),
        ("ward", [[1], 4, 0.0, [], -1, None, None]),
        ("ward", [[1], 4, 0.0, [], 2**128, None, None]),
        ("ward", [[1], 4, 0.0, [], None, 21, None]),
        ("ward", [[1], 4, 0.0, [], None, None, ""]),
        ("ward", [[1], 4, 0.0, [], None, None, 'start: "\ud800"']),
        ("w" * 300, GOOD),
        ("\ud800", GOOD),
    ],
)
def test_wrong_values_are_refused_and_nothing_is_charged(link, owner, wrong):
    end, *_ = link
    end.sendall(pack(["admit", 5, owner, 0, [GOOD, wrong]]))
    end.sendall(pack(["query", 6, "figures"]))
    said = answers(end)
    assert next(said) == ["refused", 5, "invalid"]
    kind, number, state = next(said)
    assert (kind, number) == ("reply", 6)
    assert (state["tokens"], state["reserved_units"], state["running"], state["waiting"]) == (0, 0, 0, 0)


def test_the_pieces_of_a_step_are_one_message_and_cancelled_streams_stop(link):
    end, curator, _, _ = link
    end.sendall(pack(["admit", 0, "ward", 10, [GOOD, GOOD]]) + pack(["cancel", 1, [11, 99]]))
    steps = []
    for message in answers(end):
        if message[0] == "step":
            steps.append(message[1])
            if steps[-1][0][5] is not None:
                break
    assert [[row[0] for row in pieces] for pieces in steps] == [[10]] * len(steps)
    assert len(steps) == curator.account.tokens <= 4


def test_a_front_that_does_not_read_delays_the_steps_and_loses_nothing(make, small_tokenizer):
    own, its = socket.socketpair()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine, workspace = ScriptedEngine(dissent=0.0), make(per_token="2^-40")
    with Curator.open(workspace, engine=engine, tokenizer=small_tokenizer) as curator, own, its:
        scheduler = Scheduler(curator, Link(own), max_waiting=64)
        thread = threading.Thread(target=scheduler.run)
        its.sendall(pack(["admit", 0, "ward", 0, [[[1, 2, 3], 50, 0.0, [], None, None, None]] * 32]))
        thread.start()
        wait_until(lambda: curator.account.tokens > 0)
        stands = -1
        while stands != curator.account.tokens:  # it fills what the system keeps, and waits
            stands = curator.account.tokens
            threading.Event().wait(0.2)
        assert stands < 32 * 50
        received = 0
        for message in answers(its):
            received += len(message[1]) if message[0] == "step" else 0
            if received == curator.account.tokens and not curator.num_active:
                break
        its.sendall(pack(["stop", 1]))
        thread.join(60)
    assert received > stands


class Counting:
    """A subscriber that needs no pieces: the transcripts count them."""

    def receive(self, at, pieces):
        pass

    def interrupt(self):
        pass


STATE = {"spent_nats": 0.0, "total_nats": 1.0, "remaining_tokens": 5, "mia_bound": 0.5, "world_id_bound": 0.1}
HELLO = {
    "vocabulary": 100,
    "context": 100,
    "num_worlds": 4,
    "num_places": 4,
    "worst_price": 1,
    "cautions": [],
    "config": dataclasses.asdict(MechanismConfig(per_token=2**-16, total=0.01)),
    "state": STATE,
    "default_temperature": 1.0,
    "are_promises_mixed": False,
}
REQUEST = Request(prompt=(1, 2), max_new_tokens=50, temperature=0.0, limits=Limits(100, 100), tag="k")


def test_while_a_worker_is_waited_for_queries_are_refused_and_requests_wait():
    async def ask():
        front, curator = socket.socketpair()
        client = CuratorClient(HELLO)
        await client.start(front)
        admitting = asyncio.create_task(client.admit(Counting(), [REQUEST], []))
        asked = asyncio.create_task(client.ask_leak())
        await asyncio.sleep(0)  # both messages are sent: calls 0 and 1
        curator.sendall(pack(["workers", 1]))
        for query in (asked, client.ask_usage()):
            with pytest.raises(Refused) as refused:
                await query
            assert (refused.value.status, refused.value.code) == (503, "waiting_for_workers")
        assert not admitting.done()
        curator.sendall(pack(["workers", 0]) + pack(["reply", 0, None]) + pack(["reply", 1, 0.5]))
        await admitting
        later = asyncio.create_task(client.ask_leak())
        await asyncio.sleep(0)
        curator.sendall(pack(["reply", 2, 0.25]))
        assert await later == 0.25
        curator.close()
        client.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_admitted", [True, False], ids=["running", "reply unread"])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes first"])
def test_all_that_a_dead_curator_had_sent_is_counted(writes, is_admitted):
    """A write to a closed link fails and ends it, with messages still unread: tokens that were committed."""

    async def count():
        front, curator = socket.socketpair()
        client = CuratorClient(HELLO)
        await client.start(front)
        transcripts, ended = [], asyncio.Event()
        client.on_end = lambda has_failed: ended.set()
        admitting = asyncio.create_task(client.admit(Counting(), [REQUEST], transcripts))
        await asyncio.sleep(0)  # its message is sent
        curator.sendall(pack(["reply", 0, None]))
        if is_admitted:
            await admitting
        for _ in range(7):
            curator.sendall(pack(["step", [[0, 5, "x", "agreed", 1, None]], STATE, 0.0, 0.0]))
        curator.close()
        if writes:
            client.stop()
        await asyncio.wait_for(ended.wait(), 60)
        await admitting
        return [(transcript.num_tokens, transcript.num_unknown) for transcript in transcripts]

    assert asyncio.run(count()) == [(7, 1)]
