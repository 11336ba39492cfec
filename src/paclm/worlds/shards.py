"""Disjoint shards of the corpus: every record in exactly one, for baselines that split instead of sharing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from paclm.errors import InvalidInput
from paclm.worlds.assignment import BoolArray, check_seed, check_whole

_STREAM = 5  # keeps these draws apart from those of other files under the same seed


def assign_shards(units: Sequence[Hashable], num_shards: int, seed: int) -> BoolArray:
    """Deal units of privacy (`holdout.units_of`) into shards at random: (n, shards), one true entry per row.

    Records of one unit share a shard; the numbers of units in two shards differ by at most one.
    """
    num_shards = check_whole("shards", num_shards, at_least=2)
    numbers: dict[Hashable, int] = {}
    number_of = np.array([numbers.setdefault(unit, len(numbers)) for unit in units])  # (n,)
    if len(numbers) < num_shards:
        raise InvalidInput(
            f"{len(numbers):,} records, or groups of them, cannot fill {num_shards:,} shards. Ask for fewer shards."
        )
    order = np.random.default_rng([check_seed(seed), _STREAM]).permutation(len(numbers))
    shard_of = np.empty(len(numbers), dtype=np.int64)
    shard_of[order] = np.arange(len(numbers)) % num_shards
    shards: BoolArray = shard_of[number_of][:, None] == np.arange(num_shards)
    return shards
