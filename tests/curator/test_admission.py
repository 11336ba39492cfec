"""Promised answers: held before they run, all or none, and never forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from curator.deployments import ScriptedEngine
from paclm import Curator, Workspace
from paclm.errors import BudgetExceeded, CuratorError, InvalidInput

Make = Callable[..., Workspace]
OpenCurator = Callable[..., Curator]

SIXTEEN = {"per_token": "2^-8", "total": "2^-4", "on_exhausted": "refuse"}


def test_what_is_held_is_not_promised_twice(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make(**SIXTEEN)) as curator:
        first = curator.hold([curator.request("the", 6), curator.request("a", 6)])
        assert curator.reserved_units == 12 * 2**52
        assert curator.num_active == 0
        assert curator.step() == []
        with pytest.raises(BudgetExceeded, match="at most 4 tokens"):
            curator.submit(curator.request("the", 5))
        with pytest.raises(BudgetExceeded):
            curator.hold([curator.request("the", 3), curator.request("the", 2)])
        assert curator.reserved_units == 12 * 2**52  # all or none: the three were not kept
        curator.cancel(first[0])
        assert curator.reserved_units == 6 * 2**52
        assert first[0].finish_reason == "cancelled"
        assert len(curator.hold([curator.request("the", 10)])) == 1


def test_a_held_stream_runs_when_it_is_started_and_only_once(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make(**SIXTEEN), engine=ScriptedEngine(num_slots=2)) as curator:
        streams = curator.hold([curator.request("the", 3) for _ in range(3)])
        assert curator.num_free == 2
        for stream in streams[:2]:
            curator.start(stream)
        assert curator.num_free == 0
        with pytest.raises(InvalidInput):
            curator.start(streams[0])
        while curator.num_active:
            curator.step()
        assert streams[0].finish_reason is not None
        assert streams[2].finish_reason is None
        curator.start(streams[2])
        while curator.num_active:
            curator.step()
        assert streams[2].finish_reason is not None
        assert curator.reserved_units == 0
        with pytest.raises(InvalidInput):
            curator.start(streams[2])


def test_a_stream_of_another_curator_cannot_be_started(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make("one")) as one, open_curator(make("two"), engine=ScriptedEngine()) as two:
        (stream,) = one.hold([one.request("the", 3)])
        with pytest.raises(InvalidInput):
            two.start(stream)


def test_a_cancelled_stream_cannot_be_started(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make()) as curator:
        (stream,) = curator.hold([curator.request("the", 3)])
        curator.cancel(stream)
        with pytest.raises(InvalidInput):
            curator.start(stream)


def test_closing_ends_what_is_held(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make()) as curator:
        (stream,) = curator.hold([curator.request("the", 3)])
    assert stream.finish_reason == "cancelled"
    with pytest.raises(CuratorError):
        curator.hold([stream.request])


def test_the_leak_estimate_has_three_digits_and_moves_with_the_belief(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make(per_token="2^-8", total="2^-1"), engine=ScriptedEngine(dissent=1.0)) as curator:
        assert curator.leak_estimate() == 0.0
        curator.generate("the", 30)
        leak = curator.leak_estimate()
        assert leak > 0
        assert leak == float(f"{leak:.3g}")


def test_usage_is_told_by_tag_and_by_hour(make: Make, open_curator: OpenCurator) -> None:
    with open_curator(make()) as curator:
        curator.generate("the", 3, tag="ward")
        curator.generate("the", 2, tag="desk")
        usage = curator.usage()
        assert {tag: entry.tokens for tag, entry in usage.by_tag.items()} == {"ward": 3, "desk": 2}
        assert sum(entry.tokens for entry in usage.by_hour.values()) == 5
        assert all(len(hour) == len("2026-11-20T14") for hour in usage.by_hour)
