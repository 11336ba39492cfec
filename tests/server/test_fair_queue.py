"""Waiting lines take turns among keys."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from paclm.server.fair_queue import Lines


def drained(lines: Lines[int]) -> list[int]:
    return [lines.next() for _ in range(len(lines))]


def test_a_key_with_many_entries_delays_another_by_one() -> None:
    lines: Lines[int] = Lines()
    for entry in range(100):
        lines.join("busy", entry)
    assert lines.next() == 0
    lines.join("quiet", 1000)
    assert lines.next() == 1
    assert lines.next() == 1000
    assert lines.next() == 2


def test_whoever_leaves_is_not_served() -> None:
    lines: Lines[int] = Lines()
    for owner, entry in (("a", 1), ("b", 2), ("a", 3)):
        lines.join(owner, entry)
    assert lines.leave("a", 1)
    assert not lines.leave("a", 1)
    assert not lines.leave("c", 1)
    assert lines.leave("b", 2)
    assert (len(lines), lines.num_of("a"), lines.num_of("b")) == (1, 1, 0)
    assert drained(lines) == [3]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_everybody_is_served_once_in_their_own_order_and_nobody_twice_while_others_wait(
    moves: list[tuple[str, bool]],
) -> None:
    lines: Lines[tuple[str, int]] = Lines()
    served: list[tuple[str, int]] = []
    for number, (owner, is_joining) in enumerate(moves):
        if is_joining:
            lines.join(owner, (owner, number))
        elif len(lines):
            served.append(lines.next())
        assert len(lines) == sum(lines.num_of(owner) for owner in "abcd")
    rest = [lines.next() for _ in range(len(lines))]
    joined = [(owner, number) for number, (owner, is_joining) in enumerate(moves) if is_joining]
    assert sorted(served + rest) == sorted(joined)
    for owner in "abcd":
        numbers = [number for name, number in served + rest if name == owner]
        assert numbers == sorted(numbers)
    for first, second in pairwise(rest):  # nobody joins any more: twice in a row means nobody else
        if first[0] == second[0]:
            assert {owner for owner, _ in rest[rest.index(second) :]} == {first[0]}
