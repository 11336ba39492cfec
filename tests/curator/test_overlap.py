"""The next step is computed while this one is committed, prompts are read in between, and nothing leaves early."""

import re
import traceback

import numpy as np
import pytest

from curator.deployments import UNCOMMITTED, ScriptedEngine, Talkative
from curator.sequential import recorded_noise
from paclm import Coins
from paclm.errors import EngineError, UnsoundState

B = 2.0**-16


def handles_in_flight(engine):
    return [handle for handle, *_ in engine.launched or ()]


def test_the_next_step_is_launched_before_the_commit_with_the_streams_that_go_on(make, open_curator, monkeypatch):
    engine = ScriptedEngine()
    with open_curator(make(), engine=engine) as curator:
        streams = [curator.submit(curator.request("the", n)) for n in (1, 3, 2)]
        handles = [stream.handle for stream in streams]
        at_commit = []
        commit = curator._custody.ledger.commit

        def watched(*args):
            at_commit.append((handles_in_flight(engine), [len(stream.tokens) for stream in streams]))
            commit(*args)

        monkeypatch.setattr(curator._custody.ledger, "commit", watched)
        while curator.num_active:
            curator.step()
        assert at_commit == [(handles[1:], [0, 0, 0]), ([handles[1]], [1, 1, 1]), ([], [1, 2, 2])]
        assert engine.launched is None
        assert engine.sequences == {}


def test_the_end_token_is_never_given_to_the_engine(make, open_curator, small_tokenizer):
    engine = Talkative([5, small_tokenizer.eos_token_id])
    with open_curator(make(), engine=engine) as curator:
        stream = curator.submit(curator.request([1], 40))
        curator.step()
        assert handles_in_flight(engine) == [stream.handle]
        curator.step()
        assert (stream.finish_reason, engine.launched, engine.sequences) == ("stop", None, {})


def test_votes_on_a_stream_that_was_cancelled_in_flight_are_dropped_unread(make, open_curator):
    """They are a dispute: had they been read they would be charged, and noise would be drawn."""
    engine = ScriptedEngine(dissent=0.0)
    with recorded_noise() as draws, open_curator(make(charge="dissent"), engine=engine) as curator:
        draws.clear()
        leaving, staying = (curator.submit(curator.request("the", 9, tag=tag)) for tag in ("leaving", "staying"))
        curator.step()
        assert leaving.handle in handles_in_flight(engine)
        curator.cancel(leaving)
        assert [stream for stream, _ in curator.step()] == [staying]
        assert handles_in_flight(engine) == [staying.handle]
        assert (leaving.finish_reason, len(leaving.tokens)) == ("cancelled", 1)
        assert curator.usage().by_tag["leaving"].tokens == 1
        assert (curator.account.tokens, curator.account.spent_units, draws) == (3, 0, [])


def test_votes_on_a_stream_that_a_stop_string_ended_are_dropped_unread(make, open_curator, small_tokenizer):
    engine = Talkative(small_tokenizer.encode(" fever\n\nNext patient"))
    with recorded_noise() as draws, open_curator(make(charge="dissent"), engine=engine) as curator:
        draws.clear()
        stopped = curator.submit(curator.request([1], 40, stop="\n\nN"))
        other = curator.submit(curator.request([1], 40))
        while stopped.finish_reason is None:
            curator.step()
        assert stopped.finish_reason == "stop"
        assert stopped.handle in handles_in_flight(engine)  # its next token is under way
        released = curator.account.tokens
        assert [stream for stream, _ in curator.step()] == [other]
        assert (curator.account.tokens, curator.account.spent_units, draws) == (released + 1, 0, [])
        assert len(engine.ballots[-1].votes) == 1


def test_a_step_whose_streams_all_left_is_dropped_and_the_next_request_is_served(make, open_curator):
    engine = ScriptedEngine(dissent=0.0)
    with open_curator(make(charge="dissent"), engine=engine) as curator:
        leaving = curator.submit(curator.request("the", 9))
        curator.step()
        curator.cancel(leaving)
        assert curator.num_active == 0
        assert engine.launched is not None
        assert curator.step() == []
        assert engine.launched is None
        leaving = curator.submit(curator.request("the", 9))
        curator.step()
        curator.cancel(leaving)
        assert curator.generate("patient", 3).charged_nats == 0.0
        assert curator.account.tokens == 5


def test_closing_waits_for_the_step_in_flight_and_reads_nothing_of_it(make, open_curator):
    engine, workspace = ScriptedEngine(dissent=1.0), make()
    with open_curator(workspace, engine=engine) as curator:
        stream = curator.submit(curator.request("the", 9))
        curator.step()
        assert engine.launched is not None
    assert (engine.launched, engine.sequences) == (None, {})
    assert (stream.finish_reason, len(stream.tokens)) == ("cancelled", 1)
    with open_curator(workspace, engine=engine) as restarted:
        assert restarted.account.tokens == 1
        assert restarted.generate("the", 2).private_tokens == 2


def test_the_lock_is_given_back_also_when_the_step_in_flight_fails_at_the_end(make, open_curator, monkeypatch):
    engine, workspace = ScriptedEngine(), make()
    curator = open_curator(workspace, engine=engine)
    curator.submit(curator.request("the", 9))
    curator.step()
    monkeypatch.setattr(engine, "collect", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        curator.close()
    with open_curator(workspace, engine=ScriptedEngine()) as restarted:
        assert restarted.account.tokens == 1


class Telling(ScriptedEngine):
    """An engine whose errors say everything: which token it was given, in variables and messages."""

    def __init__(self, fails_in):
        super().__init__(vocabulary=10**12)
        self.fails_in = fails_in

    def _vote(self, tokens, coins, temperature):
        return np.arange(self.support_size), np.array([UNCOMMITTED[0]] * 4 + [UNCOMMITTED[1]] * 4), 0

    def append(self, handle, token):
        if self.fails_in == "append":
            raise ValueError(f"cannot take {token}")
        super().append(handle, token)

    def launch(self, handles, coins, temperature, allowed):
        last = [self.sequences[handle][-1] for handle in handles]
        if self.fails_in == "launch" and last != [1]:  # not at the prompt
            raise EngineError("Out of GPU memory.") from ValueError(f"{last}")
        super().launch(handles, coins, temperature, allowed)


@pytest.mark.parametrize("place", ["append", "launch"])
def test_no_traceback_of_the_engine_carries_a_token_that_was_not_committed(make, open_curator, place):
    """All votes may be seen; which of them was released may not. It is charged: that it failed may depend on it."""
    engine = Telling(fails_in=place)
    with open_curator(make(), engine=engine) as curator:
        curator.submit(curator.request([1], 9))
        with pytest.raises((UnsoundState, EngineError)) as caught:
            curator.step()
        assert curator.account.tokens == 1
    error = caught.value
    assert (place == "launch") == ("Out of GPU memory" in str(error))
    assert error.__context__ is None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "paclm" in frame.f_code.co_filename]
    assert any("'tokens': <redacted>" in repr(frame.f_locals) for frame in frames)
    for name, value in [("message", error), *(item for frame in frames for item in frame.f_locals.items())]:
        if name != "votes":
            assert not re.search("{}|{}".format(*UNCOMMITTED), repr(value)), name


# --- coins ------------------------------------------------------------------------------------------------------------


def test_every_step_of_every_stream_has_the_coins_of_its_seed_and_number(make, open_curator):
    """Also of streams that came later, waited for room or had their prompt read in chunks."""
    votes = []

    class Noting(ScriptedEngine):
        def launch(self, handles, coins, temperature, allowed):
            votes.extend(zip(handles, coins, strict=True))
            super().launch(handles, coins, temperature, allowed)

    with open_curator(make(), engine=Noting(num_slots=3, chunk=4)) as curator:
        seeds, streams = (7, 2**127 + 5, 7, 0, 11), []
        for seed in seeds:
            streams.append(curator.submit(curator.request("the patient reports a cough", 6, coins_seed=seed)))
            curator.step()
        while curator.num_active:
            curator.step()
    for stream in streams:
        drawn = [coins for handle, coins in votes if handle == stream.handle]
        coins = Coins(stream.request.coins_seed)
        assert [row.tobytes() for row in drawn] == [coins.gumbel(40).tobytes() for _ in range(6)]


def test_greedy_streams_draw_no_coins(make, open_curator, monkeypatch):
    with open_curator(make()) as curator:
        monkeypatch.setattr("paclm.privacy.randomness._gumbel_of", lambda words: np.full(words.shape, np.nan))
        engine = curator._engine
        streams = [curator.submit(curator.request("the", 2, greedy=is_greedy)) for is_greedy in (True, False)]
        curator.step()
        coins = {handle: row for handle, _, row, _ in engine.launched}
        assert not coins[streams[0].handle].any()
        assert np.isnan(coins[streams[1].handle]).all()


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_read_one_chunk_a_step_while_others_go_on(make, open_curator):
    engine = ScriptedEngine(chunk=4)
    with open_curator(make(), engine=engine) as curator:
        running = curator.submit(curator.request([1], 20))
        curator.step()
        late = curator.submit(curator.request([1] * 10, 2))
        unread, tokens = [], []
        while late.finish_reason is None:
            tokens.append([stream for stream, _ in curator.step()])
            unread.append(engine.unread.get(late.handle))
        assert unread == [6, 2, 0, 0, None]
        assert tokens == [[running]] * 3 + [[running, late]] * 2


def test_while_nothing_runs_a_step_reads_one_chunk_and_returns_nothing(make, open_curator):
    engine = ScriptedEngine(chunk=4)
    with open_curator(make(), engine=engine) as curator:
        stream = curator.submit(curator.request([1] * 10, 2))
        assert [len(curator.step()) for _ in range(5)] == [0, 0, 1, 1, 0]
        assert stream.finish_reason == "length"
        out = curator.generate([1] * 30, 3)
        assert (out.private_tokens, curator.account.tokens) == (3, 5)


def test_a_stream_that_is_cancelled_while_its_prompt_is_read_costs_nothing(make, open_curator):
    engine = ScriptedEngine(chunk=4)
    with open_curator(make(on_exhausted="refuse"), engine=engine) as curator:
        stream = curator.submit(curator.request([1] * 10, 2))
        assert curator.step() == []
        curator.cancel(stream)
        assert (curator.num_active, curator.reserved_units, engine.sequences, engine.launched) == (0, 0, {}, None)
        assert curator.step() == []
        assert curator.account.tokens == 0


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_large_request_waits_for_room_and_is_not_overtaken(make, open_curator):
    engine = ScriptedEngine(num_slots=8, num_blocks=40)
    with open_curator(make(), engine=engine) as curator:
        sizes = {"first": 25, "large": 30, "small": 5}
        streams = {name: curator.submit(curator.request([1], n - 1)) for name, n in sizes.items()}
        assert {name: stream.handle is not None for name, stream in streams.items()} == {
            "first": True,
            "large": False,
            "small": False,  # there is room for it, and it must not take it
        }
        assert curator.num_free == 0
        ended = []
        while curator.num_active:
            ended += [stream for stream, piece in curator.step() if piece.finish_reason]
        assert [name for stream in ended for name, own in streams.items() if own is stream] == [
            "first",
            "small",
            "large",
        ]
        assert curator.num_free == 8


def test_prompts_are_added_under_the_name_of_their_key(make, open_curator):
    """Computed prompts are shared inside one owner only."""
    engine = ScriptedEngine()
    with open_curator(make(), engine=engine) as curator:
        for tag in ("ward", "desk"):
            curator.generate("the", 1, tag=tag)
    assert engine.owners == ["ward", "desk"]


def test_a_commit_that_fails_leaves_no_grammar_that_has_followed_the_token(make, open_curator, monkeypatch):
    """Its next mask would tell the token, which is not charged."""
    with open_curator(make(), engine=ScriptedEngine()) as curator:
        stream = curator.submit(curator.request("the", 9, json_schema={"type": "object"}))
        curator.step()

        def failing(*args):
            assert stream.grammar is not None  # the next step has been launched with it
            raise OSError("no space left")

        monkeypatch.setattr(curator._custody.ledger, "commit", failing)
        with pytest.raises(OSError, match="no space"):
            curator.step()
        assert (len(stream.tokens), stream.grammar) == (1, None)
