"""Calls from inside a step, as signal handlers and finalizers make them: refused or put off, and never harmful."""

import gc
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from curator.deployments import WORLDS, ScriptedEngine
from curator.sequential import Reference, belief_of, recorded_noise, world_of
from paclm.curator.call_guard import CallGuard
from paclm.curator.secret import Secret
from paclm.errors import CuratorError, UnsoundState


class Interrupted(ScriptedEngine):
    """Calls somebody in the middle of a step, once."""

    def __init__(self):
        super().__init__(dissent=1.0)
        self.call = None

    def collect(self):
        ballot = super().collect()
        call, self.call = self.call, None
        if call is not None:
            call()
        return ballot


@pytest.mark.parametrize("what", ["step", "submit", "generate"])
def test_a_call_from_inside_a_step_is_refused_and_the_step_goes_on(make, open_curator, what):
    engine = Interrupted()
    with open_curator(make(), engine=engine) as curator:
        stream = curator.submit(curator.request("the", 4))
        calls = {
            "step": curator.step,
            "submit": lambda: curator.submit(stream.request),
            "generate": lambda: curator.generate("the", 2),
        }

        def call():
            with pytest.raises(CuratorError):
                calls[what]()

        engine.call = call
        assert len(curator.step()) == 1
        assert engine.call is None
        assert curator.generate("the", 3).private_tokens == 3
        assert (len(stream.tokens), curator.account.tokens) == (4, 7)


def test_no_belief_is_lost_to_a_step_between_release_and_commit(make, open_curator, monkeypatch):
    engine = ScriptedEngine(dissent=1.0)
    with recorded_noise() as draws, open_curator(make(per_token="2^-10"), engine=engine) as curator:
        draws.clear()
        original, refused = Secret.release, []

        def release(self, *args):
            released = original(self, *args)
            try:
                curator.step()
            except CuratorError as error:
                refused.append(error)
            return released

        monkeypatch.setattr(Secret, "release", release)
        stream = curator.submit(curator.request("the", 3))
        while curator.num_active:
            curator.step()
        reference = Reference(WORLDS, world_of(curator), draws)
        for ballot in engine.ballots:
            reference.follow(ballot, [True], "gaussian", 2.0**-10)
        assert len(refused) == len(engine.ballots) == len(stream.tokens) == 3
        assert belief_of(curator).tobytes() == reference.belief.tobytes()
        assert np.ptp(belief_of(curator)) > 0


def test_a_commit_that_would_undo_another_is_refused(make, open_curator):
    """The second line: were a step let in nevertheless, its belief would not be overwritten."""
    engine = Interrupted()
    with open_curator(make(), engine=engine) as curator:
        curator.submit(curator.request("the", 4))
        original = curator._releaser.release

        def let_in(*args):
            curator._releaser.release = original
            released = original(*args)
            curator._guard._is_inside = False
            curator.step()
            return released

        curator._releaser.release = let_in
        with pytest.raises(UnsoundState):
            curator.step()
        assert curator.account.tokens == 1


def test_a_stream_cancelled_inside_a_step_ends_with_it(make, open_curator):
    engine = Interrupted()
    with open_curator(make(on_exhausted="refuse"), engine=engine) as curator:
        first, second = (curator.submit(curator.request("the", 5)) for _ in range(2))
        engine.call = lambda: curator.cancel(first)
        assert [stream for stream, _ in curator.step()] == [first, second]
        assert (first.finish_reason, len(first.tokens)) == ("cancelled", 1)  # paid for, so it is there
        assert list(engine.sequences) == [second.handle]
        assert curator.reserved_units == second.reserved_units > 0
        assert len(curator.step()) == 1


def test_a_lost_iterator_that_is_collected_inside_a_step_harms_nobody(make, open_curator):
    engine = Interrupted()
    with open_curator(make(), engine=engine) as curator:
        kept = curator.submit(curator.request("the", 5))
        lost = [curator.stream("patient", 5)]
        next(lost[0])
        gc.disable()  # or it might come before the step
        try:
            lost.append(lost)  # only the garbage collector can free it
            del lost
            engine.call = gc.collect
            assert len(curator.step()) == 2
        finally:
            gc.enable()
        assert (curator.num_active, len(engine.sequences)) == (1, 1)
        curator.step()
        assert len(kept.tokens) == 3


def test_a_signal_that_closes_the_curator_lets_the_step_end_first(make, open_curator):
    engine = Interrupted()
    workspace = make()
    curator = open_curator(workspace, engine=engine)
    stream = curator.submit(curator.request("the", 5))
    before = signal.signal(signal.SIGUSR1, lambda *_: curator.close())
    try:
        engine.call = lambda: signal.raise_signal(signal.SIGUSR1)
        assert len(curator.step()) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (stream.finish_reason, len(stream.tokens), engine.sequences) == ("cancelled", 1, {})
    with pytest.raises(CuratorError, match="closed"):
        curator.step()
    with open_curator(workspace) as restarted:
        assert restarted.account.tokens == 1


def test_many_clients_that_read_slowly_get_every_token_they_paid_for(make, open_curator):
    def read(curator, number):
        count = 0
        for _ in curator.stream("the", 12, coins_seed=number):
            count += 1
            time.sleep(0.0005)
        return count

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with open_curator(make(per_token="2^-32")) as curator:
            with ThreadPoolExecutor(12) as threads:
                assert list(threads.map(lambda number: read(curator, number), range(12))) == [12] * 12
            assert curator.account.tokens == 144
    finally:
        sys.setswitchinterval(interval)


def test_a_finalizer_never_waits_for_another_thread_and_its_work_is_done_after_the_turn():
    turns, done = CallGuard(), []
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay():
        with turns.exclusive():
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert is_inside.wait(60)
    turns.when_free(lambda: done.append("later"), may_wait=False)
    assert done == []
    may_leave.set()
    turns.when_free(lambda: done.append("waited"))
    thread.join()
    assert done == ["later", "waited"]


def test_work_that_fails_is_not_done_again_and_stops_nobody():
    turns, done = CallGuard(), []
    with pytest.raises(ZeroDivisionError):
        turns.when_free(lambda: done.append(1 / 0))
    turns.when_free(lambda: done.append(1))
    with turns.exclusive():
        done.append(2)
    assert done == [1, 2]
