from __future__ import annotations

import pytest

from paclm.errors import InvalidInput
from paclm.study.text import Passage, cut_passages, take_positions


def test_every_token_but_the_first_is_a_target_exactly_once() -> None:
    passage = Passage.of(range(23))
    windows = cut_passages([passage], 8)
    assert [token for window in windows for token in window.tokens[1:]] == list(range(1, 23))
    assert max(map(len, windows)) == 8


def test_windows_keep_what_is_not_to_be_scored() -> None:
    passage = Passage(tuple(range(10)), tuple(i % 3 != 0 for i in range(10)))
    windows = cut_passages([passage], 4)
    assert sum(window.num_scored for window in windows) == passage.num_scored == 6


def test_a_rest_without_a_target_is_dropped() -> None:
    assert [len(window) for window in cut_passages([Passage.of(range(8)), Passage.of([1])], 8)] == [8]


def test_a_window_without_a_target_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 2 tokens"):
        cut_passages([Passage.of(range(4))], 1)


@pytest.mark.parametrize("wanted", [1, 6, 7, 8, 20])
def test_as_many_positions_are_taken_as_asked_for_and_not_one_more(wanted: int) -> None:
    passages = cut_passages([Passage(tuple(range(30)), tuple(i % 2 == 0 for i in range(30)))], 8)
    taken = take_positions(passages, wanted)
    assert sum(passage.num_scored for passage in taken) == min(wanted, 14)
    assert all(passage.num_scored for passage in taken)


def test_a_few_positions_are_taken_from_many_documents() -> None:
    long = [Passage.of(range(100 * i, 100 * i + 30)) for i in range(4)]
    windows = cut_passages(long, 11)
    assert [passage.document for passage in windows] == [0, 1, 2, 3] * 3
    assert [passage.document for passage in take_positions(windows, 35)] == [0, 1, 2, 3]
    assert [passage.document for passage in take_positions(windows, 45)] == [0, 1, 2, 3, 0]
