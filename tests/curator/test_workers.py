"""Worlds on several ranks: the same votes as in one process, and nothing charged for what a worker spoils."""

import dataclasses
import os
import shutil
import signal
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

from curator.joined import joined, leaving, stranger
from paclm import Curator
from paclm.config import RuntimeConfig
from paclm.curator.research import ResearchSession
from paclm.engine.distributed import check_proof, identity
from paclm.engine.launch import start_workers
from paclm.engine.loading import open_engine
from paclm.engine.wire import FRAME, Order, Wire, WireBroken, as_text
from paclm.engine.worker import Worker, run_worker
from paclm.engine.workers import digest_of
from paclm.errors import CuratorError, EngineError
from paclm.ledger.verify import verify
from paclm.privacy.accounting import charge_units
from paclm.privacy.randomness import Coins, ResearchNoise, next_gumbel
from paclm.privacy.releases import rule_named
from paclm.worlds.workspace import Workspace

STREAMS, TOKENS, SUPPORT = 6, 20, 40
PER_TOKEN = 2.0**-8
NEAR = 1e-4


@dataclasses.dataclass
class Run:
    """A few streams in research mode, step by step."""

    votes: list = dataclasses.field(default_factory=list)
    tokens: list = dataclasses.field(default_factory=list)
    units: list = dataclasses.field(default_factory=list)
    is_near: list = dataclasses.field(default_factory=list)
    """Votes (n, m) that were decided by less than `NEAR`."""
    belief: object = None


def research(engine, follow=None, before_step=lambda number: None):
    """Vote, release and charge; contexts grow by the tokens of the run to follow, if one is given."""
    handles = [engine.add([5 + i, 6, 7, 8 + i] * (1 + i), TOKENS) for i in range(STREAMS)]
    coins, run, rule = [Coins(seed) for seed in range(STREAMS)], Run(), rule_named("gaussian")
    session = ResearchSession(engine.num_worlds, rule, PER_TOKEN, ResearchNoise(1))
    for number in range(TOKENS - 1):
        before_step(number)
        drawn = next_gumbel(coins, SUPPORT)
        if follow is None:
            best = np.sort(engine.scores(handles)[1].numpy()[:, :-1] + drawn[:, None], axis=2)
            run.is_near.append(best[..., -1] - best[..., -2] < NEAR)
        ballot = engine.step(handles, drawn, [1.0] * STREAMS)
        released = [session.release(votes) for votes in ballot.votes]
        run.votes.append(ballot.votes)
        run.tokens.append([release.token for release in released])
        run.units += [
            charge_units("dissent", PER_TOKEN, reads_secret=rule.reads_secret, is_dissent=release.is_dissent)
            for release in released
        ]
        for handle, coin, token in zip(handles, coins, (follow or run).tokens[number], strict=True):
            engine.append(handle, token)
            coin.step += 1
    run.belief = session.belief
    engine.clear()
    return run


def assert_same(run, one):
    differing = np.array(run.votes) != np.array(one.votes)
    near = differing & np.array(one.is_near)
    message = f"{differing.sum()} of {differing.size} votes differ from one process's, {near.sum()} of them near ties"
    assert np.array_equal(differing, near), message
    if not differing.any():
        assert (run.tokens, run.units) == (one.tokens, one.units), message
        assert np.array_equal(run.belief, one.belief), message


@pytest.fixture(scope="module")
def one(template):
    run = research(open_engine(Workspace.open(template), SUPPORT))
    assert 0 < sum(map(bool, run.units)) < len(run.units)  # some agree, some dispute
    return run


def test_two_workers_give_the_votes_tokens_and_charges_of_one_process_also_after_a_kill(template, one):
    said = []
    with start_workers(template, 2, announce=said.append) as group:
        engine = open_engine(Workspace.open(template), SUPPORT, workers=group)

        def kill(number):
            if number == 7:
                os.kill(group._processes[1].pid, signal.SIGKILL)

        assert_same(research(engine, one), one)
        assert said == []
        assert_same(research(engine, one, kill), one)
        assert [(news.kind, news.rank) for news in said] == [("lost", 1), ("back", 1)]
    assert group._processes[1].poll() == 0


def test_four_workers_give_the_votes_tokens_and_charges_of_one_process(template, one):
    with joined(Workspace.open(template), *[run_worker] * 3) as group:
        assert_same(research(open_engine(Workspace.open(template), SUPPORT, workers=group), one), one)


def test_votes_of_another_world_are_noticed(template, one, monkeypatch):
    """The comparison above finds one vote of one world that is wrong."""
    workspace = Workspace.open(template)

    def answer(output):
        votes = output.votes[:, :4].astype(np.int32)
        votes[0, 0] = output.support[0, -1]
        return [digest_of(output), votes]

    with joined(workspace) as group:
        engine = open_engine(workspace, SUPPORT, workers=group)
        lie(monkeypatch, answer)
        with pytest.raises(AssertionError, match="votes differ"):
            assert_same(research(engine, one), one)


def lie(monkeypatch, answer):
    """From now on workers in threads answer steps with these arrays, by their output."""
    send, outputs = Wire.send, []
    monkeypatch.setattr("paclm.engine.worker.digest_of", lambda output: outputs.append(output) or digest_of(output))

    def lying_send(wire, kind, number, arrays=(), seconds=None):
        is_ballot = kind == Order.ANSWER and len(arrays) == 2
        send(wire, kind, number, answer(outputs[-1]) if is_ballot else arrays, seconds)

    monkeypatch.setattr(Wire, "send", lying_send)


# --- workers that spoil a step ----------------------------------------------------------------------------------------


@pytest.fixture
def spoiled(make, small_tokenizer):
    """A curator with one worker in a thread; at the end nothing was charged but what it released."""

    def spoiled(error, spoil, *run, **options):
        workspace = make()
        with (
            joined(workspace, *run, **options) as group,
            Curator.open(workspace, tokenizer=small_tokenizer, workers=group) as curator,
        ):
            released = len(curator.generate("the patient", 3).tokens)
            belief = curator._custody.belief.reveal().copy()
            spoil()
            stream = curator.submit(curator.request("the nurse reports", 20))
            with pytest.raises(error) as failure:
                curator.step()
            assert stream.tokens == []
            assert np.array_equal(curator._custody.belief.reveal(), belief)
            with pytest.raises(CuratorError):
                curator.step()
        report = verify(workspace.ledger_address)
        assert report.intact
        assert report.contents.state.tokens == released
        return failure

    return spoiled


@pytest.mark.parametrize(
    "answer",
    [
        (lambda output: [np.zeros(16, np.uint8), output.votes[:, :4].astype(np.int32)]),
        (lambda output: [digest_of(output), output.votes[:, :3].astype(np.int32)]),
        (lambda output: [digest_of(output), output.votes[:, :4].astype(np.float64)]),
        (lambda output: [digest_of(output)]),
        (lambda output: [digest_of(output), np.full((1, 4), 10**6, np.int32)]),
        (lambda output: [digest_of(output), np.full((1, 4), -1, np.int32)]),
        (lambda output: [digest_of(output), one_outside(output)]),
    ],
)
def test_a_worker_that_lies_stops_everything_and_nothing_is_charged(spoiled, monkeypatch, answer):
    spoiled(EngineError, lambda: lie(monkeypatch, answer))


def one_outside(output):
    """Votes of which the last is for a token that the support does not have."""
    votes = output.votes[:, :4].astype(np.int32)
    votes[-1, -1] = np.setdiff1d(np.arange(output.support.max()), output.support)[0]
    return votes


def test_an_answer_that_comes_before_its_order_stops_everything(spoiled, monkeypatch):
    send = Wire.send

    def early(wire, kind, number, arrays=(), seconds=None):
        send(wire, kind, number + (kind == Order.ANSWER), arrays, seconds)

    spoiled(EngineError, lambda: monkeypatch.setattr(Wire, "send", early))


def test_a_repeated_answer_does_not_count_for_the_next_step(template, one, monkeypatch):
    send, last = Wire.send, []

    def again(wire, kind, number, arrays=(), seconds=None):
        if kind == Order.ANSWER:
            for answer in last:
                send(wire, *answer)
            last[:] = [(kind, number, arrays)]
        send(wire, kind, number, arrays, seconds)

    monkeypatch.setattr(Wire, "send", again)
    with joined(Workspace.open(template)) as group:
        assert_same(research(open_engine(Workspace.open(template), SUPPORT, workers=group), one), one)


def test_a_worker_that_dies_in_each_step_is_given_up_and_nothing_is_charged(spoiled, monkeypatch):
    """It proves what it holds every time, and would otherwise be waited for without an end."""
    dying, follow, said = threading.Event(), Worker._follow, []

    def die(worker, message):
        if dying.is_set() and message.kind == Order.STEP:
            worker._wire.__dict__.clear()  # closes the connection
            raise WireBroken("as if killed")
        follow(worker, message)

    monkeypatch.setattr(Worker, "_follow", die)
    spoiled(EngineError, dying.set, announce=said.append)
    assert [news.kind for news in said].count("back") == 5


def test_a_step_with_an_array_that_the_worker_does_not_know_is_refused(template):
    """Such as of a later version; the handshake refuses other versions before."""
    with joined(Workspace.open(template)) as group:
        engine = open_engine(Workspace.open(template), SUPPORT, workers=group)
        engine.votes([1, 2, 3])
        number = group.order(Order.STEP, [np.zeros(1)] * 6 + [np.zeros((100, 2**14), np.uint8)])
        with pytest.raises(EngineError, match="a step of 7 arrays"):
            group.answers(number)


def test_rank_0_and_a_worker_with_another_protocol_refuse_each_other(template, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("paclm.engine.worker.PROTOCOL", 1)
        with pytest.raises(EngineError, match="version 2 of the workers' protocol, and this worker version 1"):
            opened(Workspace.open(template))
    own = identity("", RuntimeConfig())
    with pytest.raises(EngineError, match="protocol"):
        check_proof(1, {name: value for name, value in own.items() if name != "protocol"}, own)


def test_a_worker_that_does_not_come_back_stops_everything_and_nothing_is_charged(spoiled, monkeypatch):
    monkeypatch.setattr("paclm.engine.workers.START_SECONDS", 1.0)
    said, is_gone = [], threading.Event()
    failure = spoiled(EngineError, is_gone.set, leaving(lambda *_: None, is_gone), announce=said.append)
    assert [news.kind for news in said][-2:] == ["lost", "missing"]
    assert "--rank 1 --workers 2 --rendezvous 127.0.0.1:" in str(failure.value)


# --- workers that are not let in --------------------------------------------------------------------------------------


def opened(workspace, *run, **options):
    """An engine over these workers answers once."""
    with joined(workspace, *run, **options) as group:
        engine = open_engine(workspace, SUPPORT, workers=group)
        return engine.votes([1, 2, 3])


def test_a_worker_with_one_changed_byte_of_one_adapter_is_refused_before_anything_is_served(make, tmp_path):
    workspace = make()
    other = Workspace.open(shutil.copytree(workspace.path, tmp_path / "other"))
    file = other.adapters_path / "worlds.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # the last bit of a number of the last world
    file.write_bytes(content)
    with pytest.raises(EngineError, match="other adapters"):
        opened(workspace, lambda _, *where: run_worker(other, *where))
    assert len(opened(workspace)) == workspace.num_worlds


def test_a_worker_with_another_base_or_other_libraries_is_refused(make, monkeypatch):
    workspace = make()
    with monkeypatch.context() as patch:
        patch.setattr("paclm.engine.worker.identity", lambda _, runtime: identity("another", runtime))
        with pytest.raises(EngineError, match=r"Worker 1 .*base model"):
            opened(workspace)
    with monkeypatch.context() as patch:
        own = identity("", workspace.runtime)["versions"]
        patch.setattr("paclm.engine.worker.identity", lambda *found: identity(*found) | {"versions": {**own, "x": "1"}})
        with pytest.raises(EngineError, match="versions of libraries"):
            opened(workspace)


def unparsed(wire):
    """Bytes that are no message."""
    wire._pair.send([torch.full((FRAME,), 255, dtype=torch.uint8)], 0, 0).wait()


STRANGERS = {
    "unparsed": unparsed,
    "other words": lambda wire: wire.send(Order.PROOF, 0, [as_text("hello")]),
    "no proof": lambda wire: wire.send(Order.PROOF, 0, [as_text("{}")]),
    "a list": lambda wire: wire.send(Order.PROOF, 0, [as_text("[1]")]),
    "nothing": lambda wire: wire.send(Order.PROOF, 0),
    "gone": lambda wire: None,
}


@pytest.mark.parametrize("send", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_that_comes_in_the_place_of_a_worker_is_refused(template, send):
    with pytest.raises(EngineError, match="Worker 1"):
        opened(Workspace.open(template), stranger(lambda *_: None, send))


@pytest.mark.parametrize("send", [unparsed, STRANGERS["other words"], STRANGERS["gone"]])
def test_after_a_stranger_came_in_the_place_of_a_lost_worker_the_real_one_is_let_in(template, one, send):
    is_gone, said = threading.Event(), []
    work = leaving(stranger(run_worker, send), is_gone)
    with joined(Workspace.open(template), work, announce=said.append) as group:
        engine = open_engine(Workspace.open(template), SUPPORT, workers=group)
        assert_same(research(engine, one, lambda number: number == 5 and is_gone.set()), one)
    kinds = [news.kind for news in said if news.kind != "missing"]
    assert kinds == ["lost", "lost", "back"]


def test_noise_at_the_rendezvous_disturbs_nobody(template, one):
    with joined(Workspace.open(template)) as group:
        host, _, port = group.address.rpartition(":")
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 300, b"\xff" * 2**16, b""):
            with socket.create_connection((host, int(port))) as caller, suppress(OSError):
                caller.sendall(noise)
        assert_same(research(open_engine(Workspace.open(template), SUPPORT, workers=group), one), one)
