"""Promised answers: held before they run, all or none, and never forgotten."""

import pytest

from curator.deployments import ScriptedEngine, Talkative
from paclm.errors import BudgetExceeded, CuratorError, InvalidInput
from paclm.privacy.accounting import units_up

B = 2.0**-16
SIXTEEN = {"per_token": "2^-8", "total": "2^-4", "on_exhausted": "refuse"}


def test_what_is_held_is_not_promised_twice(make, open_curator):
    with open_curator(make(**SIXTEEN)) as curator:
        first = curator.hold([curator.request("the", 6), curator.request("a", 6)])
        assert curator.reserved_units == 12 * 2**52
        assert curator.num_active == 0
        assert curator.step() == []
        with pytest.raises(BudgetExceeded, match="4 tokens"):
            curator.submit(curator.request("the", 5))
        with pytest.raises(BudgetExceeded):
            curator.hold([curator.request("the", 3), curator.request("the", 2)])
        assert curator.reserved_units == 12 * 2**52  # all or none: the three were not kept
        curator.cancel(first[0])
        assert curator.reserved_units == 6 * 2**52
        assert first[0].finish_reason == "cancelled"
        assert len(curator.hold([curator.request("the", 10)])) == 1


def test_a_held_stream_runs_when_it_is_started_and_only_once(make, open_curator):
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


def test_a_cancelled_stream_or_one_of_another_curator_cannot_be_started(make, open_curator):
    with open_curator(make("one")) as one, open_curator(make("two"), engine=ScriptedEngine()) as two:
        (stream,) = one.hold([one.request("the", 3)])
        with pytest.raises(InvalidInput):
            two.start(stream)
        one.cancel(stream)
        with pytest.raises(InvalidInput):
            one.start(stream)


def test_closing_ends_what_is_held(make, open_curator):
    with open_curator(make()) as curator:
        (stream,) = curator.hold([curator.request("the", 3)])
    assert stream.finish_reason == "cancelled"
    with pytest.raises(CuratorError):
        curator.hold([stream.request])


def test_the_leak_estimate_has_three_digits_and_moves_with_the_belief(make, open_curator):
    with open_curator(make(per_token="2^-8", total="2^-1"), engine=ScriptedEngine(dissent=1.0)) as curator:
        assert curator.leak_estimate() == 0.0
        curator.generate("the", 30)
        assert curator.leak_estimate() == float(f"{curator.leak_estimate():.3g}") > 0


def test_usage_is_told_by_tag_and_by_hour(make, open_curator):
    with open_curator(make()) as curator:
        curator.generate("the", 3, tag="ward")
        curator.generate("the", 2, tag="desk")
        usage = curator.usage()
        assert {tag: entry.tokens for tag, entry in usage.by_tag.items()} == {"ward": 3, "desk": 2}
        assert sum(entry.tokens for entry in usage.by_hour.values()) == 5
        assert all(len(hour) == len("2026-11-20T14") for hour in usage.by_hour)


def test_a_request_that_might_not_fit_is_refused_at_once_with_numbers(make, open_curator):
    with open_curator(make(total=str(10 * B), on_exhausted="refuse")) as curator:
        running = curator.submit(curator.request("the", 6))
        with pytest.raises(BudgetExceeded, match=r"5 tokens.* 4 tokens") as caught:
            curator.submit(curator.request("the", 5))
        assert "paclm ledger extend" in str(caught.value)
        other = curator.submit(curator.request("the", 4))
        while curator.num_active:
            curator.step()
        assert running.marks.count("public") == other.marks.count("public") == 0
        assert curator.account.remaining_units == 0
        with pytest.raises(BudgetExceeded):
            curator.generate("the", 1)


def test_what_was_held_free_and_not_used_is_given_back(make, open_curator, small_tokenizer):
    ends = Talkative([5, 6, small_tokenizer.eos_token_id])
    with open_curator(make(total=str(10 * B), on_exhausted="refuse"), engine=ends) as curator:
        assert curator.generate([1], 10).private_tokens == 3
        assert curator.reserved_units == 0
        cancelled = curator.submit(curator.request([1], 7))
        assert curator.reserved_units == 7 * units_up(B)
        curator.step()
        assert curator.reserved_units == 6 * units_up(B)
        curator.cancel(cancelled)
        assert curator.reserved_units == 0
        assert cancelled.finish_reason == "cancelled"
        assert curator.result(cancelled).private_tokens == 1


@pytest.mark.parametrize(("release", "charge"), [("plurality", "every-token"), ("gaussian", "dissent")])
def test_the_worst_case_is_what_the_rule_can_charge(make, open_curator, release, charge):
    with open_curator(make(total=str(3 * B), on_exhausted="refuse", release=release, charge=charge)) as curator:
        if release == "plurality":
            assert curator.generate("the", 30).charged_nats == 0
        else:
            with pytest.raises(BudgetExceeded):
                curator.generate("the", 4)
            assert curator.generate("the", 3).public_tokens == 0
