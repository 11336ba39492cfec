"""Which records are held out, and who is in which world or shard.

Every record is in exactly half of the worlds, uniformly and independently of all others. Draws come from a seed that
may be public (the paper's adversary knows all worlds, `sec:threat-model`). Knows nothing of the realized world.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paclm.errors import InvalidInput
from paclm.worlds.records import Record

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

MOST_WORLDS = 65_536
FEWEST_UNITS = 8
_SHARDS_STREAM = 5  # keeps draws under one seed apart, as _STREAM does elsewhere
_ROWS_AT_ONCE = 4096  # keys of 128 worlds: 4 MiB


def assign_worlds(num_records: int, num_worlds: int, seed: int) -> BoolArray:
    """Draw the membership matrix (n, m): each row has exactly m/2 true entries, all such rows equally likely.

    The raw stream of the bit generator is used, which NumPy keeps stable over versions and platforms, so a seed
    always gives the same assignment.
    """
    num_records = check_whole("num_records", num_records, at_least=1)
    num_worlds = check_num_worlds(num_worlds)
    bits = np.random.PCG64(check_seed(seed))
    membership = np.empty((num_records, num_worlds), dtype=np.bool_)  # (n, m)
    for start in range(0, num_records, _ROWS_AT_ONCE):
        rows = membership[start : start + _ROWS_AT_ONCE]
        rows[:] = _draw_rows(bits, *rows.shape)
    return membership


def assign_groups(groups: Sequence[Hashable], num_worlds: int, seed: int) -> BoolArray:
    """Draw the membership matrix (n, m) with one row per group: records of one group are in the same worlds.

    Groups are numbered by first appearance, and group g gets row g of `assign_worlds`.
    """
    numbers: dict[Hashable, int] = {}
    return assign_units(
        np.array([numbers.setdefault(group, len(numbers)) for group in groups], dtype=np.int64), num_worlds, seed
    )


def assign_units(number_of: IntArray, num_worlds: int, seed: int) -> BoolArray:
    """`assign_groups` for units that are numbered by first appearance, (n,)."""
    if len(number_of) == 0:
        raise InvalidInput("There is no record to assign to worlds.")
    rows = assign_worlds(int(number_of.max()) + 1, num_worlds, seed)  # (g, m)
    return rows if len(rows) == len(number_of) else np.take(rows, number_of, axis=0)  # (n, m)


def assign_shards(units: Sequence[Hashable], num_shards: int, seed: int) -> BoolArray:
    """Deal units of privacy (`units_of`) into disjoint shards at random: (n, shards), one true entry per row.

    Records of one unit share a shard; shards differ in size by at most one unit.
    """
    num_shards = check_whole("shards", num_shards, at_least=2)
    numbers: dict[Hashable, int] = {}
    number_of = np.array([numbers.setdefault(unit, len(numbers)) for unit in units])  # (n,)
    if len(numbers) < num_shards:
        raise InvalidInput(
            f"{len(numbers):,} records, or groups of them, cannot fill {num_shards:,} shards. Ask for fewer shards."
        )
    order = np.random.default_rng([check_seed(seed), _SHARDS_STREAM]).permutation(len(numbers))
    shard_of = np.empty(len(numbers), dtype=np.int64)
    shard_of[order] = np.arange(len(numbers)) % num_shards
    shards: BoolArray = shard_of[number_of][:, None] == np.arange(num_shards)
    return shards


def units_of(records: Iterable[Record]) -> list[str]:
    """The unit of privacy of each record: its group, or the record itself."""
    return [f"group:{record.group}" if record.group is not None else f"record:{record.id}" for record in records]


def number_units(records: Iterable[Record]) -> IntArray:
    """The units of privacy of records with different ids, numbered by first appearance: (n,)."""
    numbers, number_of, num_units = dict[str, int](), array("q"), 0
    for record in records:
        number = num_units if record.group is None else numbers.setdefault(record.group, num_units)
        number_of.append(number)
        num_units += number == num_units
    return np.array(number_of, dtype=np.int64)


def default_holdout(num_records: int) -> int:
    """How many records are expected to be held out: min(512, 20 %)."""
    return min(512, num_records // 5)


def draw_holdout(records: Iterable[Record], units: IntArray, rate: float, seed: int) -> BoolArray:
    """Which records are held out, (n,): each unit independently with chance `rate`; `units` as `number_units` has them.

    A keyed hash of the unit's group, or of the record's text, decides, and no other record: one record more or less
    changes no other's side, which a promise about the corpus needs.
    """
    threshold = int(rate * 2**64)
    key = hashlib.blake2b(f"paclm holdout {check_seed(seed)}".encode()).digest()
    sides, has_groups = bytearray(), False
    for record in records:
        content = f"text:{record.text}" if record.group is None else f"group:{record.group}"
        drawn = int.from_bytes(hashlib.blake2b(content.encode(), key=key, digest_size=8).digest())
        sides.append(drawn < threshold)
        has_groups = has_groups or record.group is not None
    held_out = np.frombuffer(sides, dtype=np.bool_)
    num_units, num_left = len(np.unique(units)), len(np.unique(units[~held_out]))
    if num_left < FEWEST_UNITS:
        raise InvalidInput(
            f"{num_units:,} {'groups' if has_groups else 'records'} with {num_units - num_left:,} held out leave "
            f"{num_left:,} for the worlds; at least {FEWEST_UNITS} are needed for a record to hide among others. "
            + ("Bring more records." if num_units < FEWEST_UNITS else "Lower --holdout, or bring more records.")
        )
    return held_out


def check_num_worlds(num_worlds: int) -> int:
    """Refuse a number of worlds that is odd, or too large to train."""
    num_worlds = check_whole("The number of worlds", num_worlds, at_least=2)
    if num_worlds > MOST_WORLDS:
        raise InvalidInput(
            f"The number of worlds must be at most {MOST_WORLDS:,}, not {num_worlds:,}: each is trained, kept in "
            "memory and run for every token. The paper uses 128."
        )
    if num_worlds % 2:
        raise InvalidInput(
            f"The number of worlds must be even, because every record is in half of them, not {num_worlds}."
        )
    return num_worlds


def check_seed(seed: int) -> int:
    """Refuse a seed that is not a whole number of at least 0."""
    return check_whole("seed", seed, at_least=0)


def check_whole(name: str, value: int, at_least: int) -> int:
    """Refuse anything but a whole number of at least `at_least`, naming the value and the rule."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidInput(f"{name} must be a whole number, not {value!r}.") from None
    if isinstance(value, (bool, np.bool_)) or number < at_least:
        raise InvalidInput(f"{name} must be a whole number of at least {at_least}, not {value!r}.")
    return number


def _draw_rows(bits: np.random.PCG64, num_rows: int, num_worlds: int) -> BoolArray:
    """Rows that are true where a random key is among the row's m/2 smallest.

    The keys of a row are exchangeable, so given that the m/2-th smallest is not tied with the next, every set of m/2
    worlds is equally likely. A row where they are tied (chance below m²/2^64) is drawn again.
    """
    half = num_worlds // 2
    keys = bits.random_raw(num_rows * num_worlds).reshape(num_rows, num_worlds)  # (r, m) uint64
    rows = keys <= np.partition(keys, half - 1, axis=1)[:, half - 1 : half]  # (r, m)
    tied = np.flatnonzero(rows.sum(axis=1) != half)
    if tied.size:
        rows[tied] = _draw_rows(bits, tied.size, num_worlds)
    return rows
