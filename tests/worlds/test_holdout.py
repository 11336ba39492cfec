"""Held-out records: drawn at random, whole groups only, and never so many that nobody is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paclm.errors import InvalidInput
from paclm.worlds.assignment import default_holdout, split_holdout
from paclm.worlds.records import Record


def numbered(count: int, group_size: int | None = None) -> list[Record]:
    return [Record(str(i), f"text {i}", None if group_size is None else f"g{i // group_size}") for i in range(count)]


@given(st.integers(20, 80), st.integers(0, 10), st.integers(0, 99))
def test_train_and_held_out_are_the_whole_corpus_in_order(count: int, wanted: int, seed: int) -> None:
    records = numbered(count)
    train, held_out = split_holdout(records, wanted, seed)
    assert len(held_out) == wanted
    assert sorted([*train, *held_out], key=lambda record: int(record.id)) == records
    assert [int(record.id) for record in held_out] == sorted(int(record.id) for record in held_out)


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 99))
def test_groups_are_held_out_whole(group_size: int, wanted: int, seed: int) -> None:
    train, held_out = split_holdout(numbered(40 * group_size, group_size), wanted, seed)
    assert wanted <= len(held_out) < wanted + group_size
    assert not {record.group for record in train} & {record.group for record in held_out}


def test_each_record_is_held_out_equally_often() -> None:
    records = numbered(20)
    counts = np.zeros(20)
    for seed in range(2000):
        for record in split_holdout(records, 5, seed)[1]:
            counts[int(record.id)] += 1
    # 20 binomial(2000, 1/4) counts, standard deviation 19.4: five of them miss with chance 20 x 6e-7
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_the_default_is_a_fifth_and_at_most_512() -> None:
    assert [default_holdout(count) for count in (4, 100, 2560, 50_000)] == [0, 20, 512, 512]


def test_too_few_units_are_refused_by_their_name() -> None:
    with pytest.raises(InvalidInput, match="10 records with 3 held out leave 7 for the worlds"):
        split_holdout(numbered(10), 3, 1)
    with pytest.raises(InvalidInput, match="5 groups with 0 held out leave 5 for the worlds"):
        split_holdout(numbered(50, 10), 0, 1)
    with pytest.raises(InvalidInput, match="holdout must be a whole number of at least 0, not -1"):
        split_holdout(numbered(10), -1, 1)
