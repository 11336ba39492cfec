"""Secret and belief appear nowhere: logs, reprs, tracebacks with all variables, pickles, JSON, errors, files.

The secret is planted as a world number that occurs nowhere else, and the belief as numbers that can be searched for.
"""

import copy
import dataclasses
import gc
import json
import logging
import pickle
import re
import sys
import time
import traceback
import tracemalloc
import warnings

import numpy as np
import pytest

from curator.deployments import UNCOMMITTED, WORLDS, ScriptedEngine
from curator.reporter import everything_in
from paclm import Noise
from paclm.curator.redacted import Redacted
from paclm.curator.secret import Secret, prior_belief
from paclm.errors import PaclmError
from paclm.privacy.releases import Rule, rule_named


class PlantedIndex(int):
    """A world number whose every print is a word that can be searched for."""

    def __repr__(self):
        return "PLANTED-SECRET"

    __str__ = __format__ = __repr__


@pytest.fixture
def curator(make, open_curator, monkeypatch):
    """Noise and coins are the same every time, and clocks coarse: of fresh ones, forty to a step, some share their
    digits with the belief once in a few hundred runs.
    """
    clock = time.perf_counter
    monkeypatch.setattr("os.urandom", np.random.default_rng(3).bytes)
    monkeypatch.setattr("secrets.randbits", lambda _: 3)
    monkeypatch.setattr("time.perf_counter", lambda: round(clock(), 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curator = open_curator(make(per_token="2^-5", total="1"), engine=ScriptedEngine(dissent=1.0, distinct=3))
    curator._custody.secret._Secret__world = Redacted(PlantedIndex(5))
    curator.generate("the", 10)
    yield curator
    curator.close()


def telltales(curator):
    """Ways in which the belief could be written: digits of each number, as logarithm or probability, and raw bytes."""
    belief = curator._custody.belief.reveal()
    assert len(set(belief.tolist())) > 1
    numbers = [f"{x:.12f}"[:-6] for x in (*np.unique(belief), *np.unique(np.exp(belief)))]  # cut: not to be rounded
    return ["PLANTED-SECRET", *(number.lstrip("-") for number in numbers), belief.tobytes().hex()[:32]]


def assert_silent(said, curator):
    found = [telltale for telltale in telltales(curator) if telltale in said]
    assert not found, f"{len(found)} telltales were said"


def test_the_search_finds_what_is_not_hidden(curator):
    belief = curator._custody.belief.reveal()
    with np.printoptions(precision=12, suppress=True):
        for said in (repr(belief), repr(np.exp(belief)), repr(belief.tolist()), repr(PlantedIndex(5))):
            with pytest.raises(AssertionError, match="telltales"):
                assert_silent(said, curator)


def test_nothing_that_prints_objects_or_answers_leaks(curator):
    custody = curator._custody
    things = [curator, custody, custody.secret, custody.belief, custody.keys, custody.ledger]
    things += [vars(curator), custody.ledger.state, curator.figures(), curator.account, curator.config]
    for thing in things:
        assert_silent(f"{thing!r} {thing} {[thing]}", curator)
    out = curator.generate("the", 5)
    assert_silent(json.dumps(dataclasses.asdict(out)) + repr(out), curator)


def test_nothing_can_be_pickled_or_copied(curator):
    for thing in (curator, curator._custody.secret, curator._custody.belief, curator._custody.keys, curator._custody):
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises((PaclmError, TypeError)):
                attempt(thing)
        with pytest.raises(TypeError):
            json.dumps(thing)


FAILURES = {
    "in the calibration": "paclm.privacy.gaussian.calibrate_noise",
    "in the belief's update": "paclm.privacy.gaussian.update_belief",
    "in the noise": "paclm.privacy.randomness.NoiseSource.standard_normal",
    "in the sealing": "paclm.curator.master_key.AESGCM",
    "in the ledger": "paclm.ledger.sqlite_store.add_sums",
    "in the account": "paclm.privacy.accounting.Account.affords",
}


@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, MemoryError])
def test_no_traceback_tells_wherever_a_step_fails(curator, monkeypatch, place, kind):
    def fail(*values, **more):
        raise kind(f"failed on {values} {more}")

    belief = curator._custody.belief
    stream = curator.submit(curator.request("the", 3))
    monkeypatch.setattr(FAILURES[place], fail)
    try:
        curator.step()
        pytest.fail("the step should have failed")
    except BaseException as error:
        if isinstance(error, pytest.fail.Exception):
            raise
        said = everything_in(error)
    monkeypatch.undo()
    assert "curator.py" in said  # the reporter saw frames of the step and their variables
    assert_silent(said, curator)
    assert stream.tokens == []
    assert curator._custody.belief is belief


def test_a_token_that_was_not_committed_is_in_no_traceback(curator, monkeypatch):
    """A token in a crash report has left, and nobody paid for it. All votes may be seen: which was released may not."""
    votes = np.array([UNCOMMITTED[0]] * 4 + [UNCOMMITTED[1]] * 4)
    monkeypatch.setattr(curator._engine, "_vote", lambda *_: (np.arange(40), votes, 0))
    monkeypatch.setattr(curator._engine, "vocabulary", 10**12)
    curator.submit(curator.request("the", 3))
    monkeypatch.setattr("paclm.ledger.sqlite_store.add_sums", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        curator.step()
    frames = [
        frame for frame, _ in traceback.walk_tb(caught.value.__traceback__) if "paclm" in frame.f_code.co_filename
    ]
    assert len(frames) > 3
    for frame in frames:
        for name, value in frame.f_locals.items():
            if name not in ("votes", "ballot"):
                assert not re.search("{}|{}".format(*UNCOMMITTED), repr(value)), f"{frame.f_code.co_name}: {name}"
    assert any("'tokens': <redacted>" in repr(frame.f_locals) for frame in frames)


def test_nothing_is_logged_or_written_in_clear(make, open_curator, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    workspace = make()
    with open_curator(workspace, engine=ScriptedEngine(dissent=1.0)) as curator:
        curator.generate("a very private prompt", 20, tag="someone")
        said = caplog.text + "".join(capfd.readouterr())
        assert_silent(said, curator)
        assert "private prompt" not in said
        belief = curator._custody.belief.reveal()
        files = [path for path in workspace.curator_path.iterdir() if path.is_file()]
        assert {path.name for path in files} >= {"ledger.sqlite", "secret.json", "key"}
        for content in (path.read_bytes() for path in files):
            assert belief.tobytes()[:16] not in content
            assert b"private prompt" not in content


def calls_during(work):
    """Every Python and C function called, in order: what work was done, whatever the values."""
    calls = []

    def note(frame, event, argument):
        if event == "call":
            calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        elif event == "c_call":
            calls.append(f"{getattr(argument, '__module__', '')}.{argument.__qualname__}")

    gc.disable()  # a collection may fall anywhere, and libraries hang their own calls on it
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def peak_memory(work):
    """The least of a few looks: what other threads take meanwhile counts too, and can only add."""
    peaks = []
    gc.disable()
    try:
        for _ in range(5):
            tracemalloc.start()
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    finally:
        tracemalloc.stop()
        gc.enable()
    return min(peaks)


@pytest.mark.parametrize("release", ["gaussian", "channel", "plurality", "mixture"])
def test_the_work_of_a_release_does_not_depend_on_the_secret(release, monkeypatch):
    """The same belief, votes and noise, every world as the secret: the same calls in order, the same memory."""
    monkeypatch.setattr("os.urandom", lambda size: bytes(range(160, 160 + size)))
    belief, noise, rule = prior_belief(WORLDS), Noise(), rule_named(release)
    votes = np.array([3, 3, 9, 9, 9, 4, 4, 9])
    calls, memory = [], []
    for world in (0, *range(WORLDS)):
        secret = Secret(Redacted(world), WORLDS)

        def work(secret=secret):
            return secret.release(rule, [votes], belief, 2.0**-16, noise)

        work()  # fills caches
        calls.append(calls_during(work))
        memory.append(peak_memory(work))
    assert len(calls[0]) > 10
    assert all(trace == calls[0] for trace in calls)
    assert len(set(memory)) == 1


def test_whole_steps_do_the_same_work_for_every_secret(make, open_curator, monkeypatch):
    """Engine, releases, sealing, commit, delivery. Noise so large, and the same, that all secrets have one history."""
    traces, histories = [], set()
    for run, world in enumerate((0, *range(WORLDS))):
        with open_curator(make(f"run-{run}", per_token="2^-40"), engine=ScriptedEngine(dissent=1.0)) as curator:
            curator._custody.secret._Secret__world = Redacted(world)
            monkeypatch.setattr("os.urandom", np.random.default_rng(3).bytes)
            streams = [curator.submit(curator.request("the", 9, greedy=True)) for _ in range(2)]

            def work(curator=curator):
                for _ in range(9):
                    curator.step()

            traces.append(calls_during(work))
            monkeypatch.undo()
            histories.add(tuple(token for stream in streams for token in stream.tokens))
    assert len(histories) == 1
    assert len(traces[1]) > 1000
    assert all(trace == traces[1] for trace in traces[1:])  # the first run filled caches


def test_the_trace_notices_work_that_depends_on_the_secret(make, open_curator):
    good = rule_named("gaussian")

    def leaky(votes, belief, secret, per_token, noise):
        if secret == 5:
            np.exp(belief).sum()
        return good.release(votes, belief, secret, per_token, noise)

    rule, traces = Rule("leaky", leaky, True), []
    with open_curator(make()) as curator:
        secret, belief, noise = curator._custody.secret, curator._custody.belief, curator._releaser._noise
        for world in (0, 5):
            secret._Secret__world = Redacted(world)
            traces.append(calls_during(lambda: secret.release(rule, [np.arange(WORLDS)], belief, 2.0**-16, noise)))
    assert traces[0] != traces[1]
