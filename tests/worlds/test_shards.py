from __future__ import annotations

import numpy as np
import pytest

from paclm.errors import InvalidInput
from paclm.worlds.assignment import assign_shards


def test_every_record_is_in_exactly_one_shard_and_shards_are_even() -> None:
    shards = assign_shards(range(103), 8, seed=1)
    assert shards.shape == (103, 8)
    assert (shards.sum(axis=1) == 1).all()
    assert np.ptp(shards.sum(axis=0)) <= 1


def test_records_of_one_unit_share_a_shard() -> None:
    units = [f"patient {number // 3}" for number in range(60)]
    shards = assign_shards(units, 4, seed=2)
    assert (shards.reshape(20, 3, 4) == shards[::3, None]).all()


def test_a_seed_names_one_assignment() -> None:
    assert np.array_equal(assign_shards(range(40), 4, seed=3), assign_shards(range(40), 4, seed=3))
    assert not np.array_equal(assign_shards(range(40), 4, seed=3), assign_shards(range(40), 4, seed=4))


@pytest.mark.parametrize("num_shards", [0, 1, 41])
def test_shards_that_cannot_be_filled_are_refused(num_shards: int) -> None:
    with pytest.raises(InvalidInput, match="shards"):
        assign_shards(range(40), num_shards, seed=0)
