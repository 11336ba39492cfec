"""Waiting lines take turns among keys."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paclm.server.scheduler import FairQueue


def test_whoever_leaves_is_not_served():
    lines = FairQueue()
    for owner, entry in (("a", 1), ("b", 2), ("a", 3)):
        lines.put(owner, entry)
    assert [lines.remove(*entry) for entry in (("a", 1), ("a", 1), ("c", 1), ("b", 2))] == [True, False, False, True]
    assert (len(lines), lines.num_of("a"), lines.num_of("b")) == (1, 1, 0)
    assert lines.get() == 3


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_everybody_is_served_once_in_their_own_order_and_nobody_twice_while_others_wait(moves):
    lines = FairQueue()
    served = []
    for number, (owner, is_joining) in enumerate(moves):
        if is_joining:
            lines.put(owner, (owner, number))
        elif len(lines):
            served.append(lines.get())
        assert len(lines) == sum(lines.num_of(owner) for owner in "abcd")
    rest = [lines.get() for _ in range(len(lines))]
    joined = [(owner, number) for number, (owner, is_joining) in enumerate(moves) if is_joining]
    assert sorted(served + rest) == sorted(joined)
    for owner in "abcd":
        numbers = [number for name, number in served + rest if name == owner]
        assert numbers == sorted(numbers)
    for first, second in pairwise(rest):  # nobody joins any more: twice in a row means nobody else
        if first[0] == second[0]:
            assert {owner for owner, _ in rest[rest.index(second) :]} == {first[0]}
