"""Requests are checked before they wait, and streams end when their reader has gone."""

import math

import pytest

from curator.deployments import CONTEXT, ScriptedEngine
from paclm.curator.streams import Limits, Request
from paclm.errors import InvalidInput


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens"),
        ({"max_new_tokens": 3.0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": CONTEXT}, "64"),
        ({"temperature": -1.0}, "temperature"),
        *(({"temperature": value}, "temperature") for value in (math.nan, math.inf, 1e39, 2e36, 9e-37, 5e-324)),
        ({"temperature": 1.0, "greedy": True}, "greedy"),
        ({"stop": ("",)}, "stop"),
        ({"prompt": [1, 700]}, "699"),
        ({"prompt": [-1]}, "699"),
        *(({"prompt": kind(b"x")}, kind.__name__) for kind in (bytes, bytearray, memoryview)),
        ({"prompt": "caf\udce9"}, "4"),
        ({"tag": "x" * 201}, "200"),
        ({"tag": "\ud800"}, "UTF-8"),
        ({"tag": b"x"}, "bytes"),
        ({"tag": ["a"]}, "list"),
        ({"tag": None}, "NoneType"),
        ({"coins_seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_charged(make, open_curator, options, named):
    with open_curator(make()) as curator:
        with pytest.raises(InvalidInput, match=named) as caught:
            curator.generate(**{"prompt": "patient zero", "max_new_tokens": 3, **options})
        assert "patient zero" not in str(caught.value)
        assert curator.account.spent_units == 0
        assert curator.num_active == 0
        curator.generate("the", 1)


@pytest.mark.parametrize("tag", ["\x00", "naïve 🩺", "x" * 200, "'; drop table events; --"])
def test_any_text_can_be_a_tag(make, open_curator, tag):
    with open_curator(make()) as curator:
        curator.generate("the", 2, tag=tag)
        assert curator._custody.ledger.by_key()[tag].tokens == 2


def test_a_request_that_would_fail_in_a_step_cannot_be_made(make, open_curator):
    with open_curator(make()) as curator:
        for prompt in ((), (700,), (1,) * CONTEXT):
            with pytest.raises(InvalidInput):
                Request(prompt=prompt, max_new_tokens=2, temperature=0.0, limits=Limits(700, CONTEXT))
        assert curator.num_active == 0
        curator.generate("the", 1)


def test_requests_beyond_the_engines_places_wait_their_turn(make, open_curator):
    with open_curator(make(), engine=ScriptedEngine(num_slots=2)) as curator:
        streams = [curator.submit(curator.request("the", 3)) for _ in range(5)]
        sizes = []
        while curator.num_active:
            sizes.append(len(curator.step()))
        assert sizes == [2, 2, 2, 2, 2, 2, 1, 1, 1]
        assert all(stream.finish_reason == "length" for stream in streams)
        assert curator.step() == []


@pytest.mark.parametrize("pieces_read", [0, 1])
@pytest.mark.parametrize("how", ["closed", "lost"])
def test_a_stream_that_is_closed_early_or_lost_ends(make, open_curator, scripted, how, pieces_read):
    with open_curator(make(on_exhausted="refuse")) as curator:
        pieces = curator.stream("the", 10)
        for _ in range(pieces_read):
            next(pieces)
        assert curator.num_active == 1
        if how == "closed":
            pieces.close()
            assert list(pieces) == []
        del pieces
        assert (curator.num_active, curator.reserved_units, scripted.sequences) == (0, 0, {})
        curator.generate("patient", 5)
        assert curator.account.tokens == 5 + pieces_read


def test_pieces_that_came_while_others_were_served_are_not_lost(make, open_curator):
    with open_curator(make()) as curator:
        pieces = curator.stream("the", 5)
        first = next(pieces)
        curator.generate("patient", 10)  # carries the stream to its end
        assert len([first, *pieces]) == 5
        assert curator.account.tokens == 15
