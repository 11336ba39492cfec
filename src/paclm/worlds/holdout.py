"""Setting non-members aside before any world is drawn: attacks and held-out figures need records no world has seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paclm.errors import InvalidInput
from paclm.worlds.assignment import check_seed, check_whole
from paclm.worlds.records import Record

FEWEST_UNITS = 8
_STREAM = 1  # keeps these draws apart from those of other files under the same seed


def units_of(records: Sequence[Record]) -> list[str]:
    """The unit of privacy of each record: its group, or the record itself."""
    return [f"group:{record.group}" if record.group is not None else f"record:{record.id}" for record in records]


def default_holdout(num_records: int) -> int:
    """min(512, 20 %)."""
    return min(512, num_records // 5)


def split_holdout(records: Sequence[Record], num_held_out: int, seed: int) -> tuple[list[Record], list[Record]]:
    """Split into (train, held out), both in reading order; whole units are drawn until `num_held_out` is reached."""
    check_whole("holdout", num_held_out, at_least=0)
    units = units_of(records)
    sizes: dict[str, int] = {}
    for unit in units:
        sizes[unit] = sizes.get(unit, 0) + 1
    names = list(sizes)
    held_out: set[str] = set()
    num_drawn = 0
    for index in np.random.default_rng([check_seed(seed), _STREAM]).permutation(len(names)):
        if num_drawn >= num_held_out:
            break
        held_out.add(names[index])
        num_drawn += sizes[names[index]]
    if len(names) - len(held_out) < FEWEST_UNITS:
        kind = "groups" if any(record.group is not None for record in records) else "records"
        raise InvalidInput(
            f"{len(names):,} {kind} with {len(held_out):,} held out leave {len(names) - len(held_out):,} for the "
            f"worlds, and fewer than {FEWEST_UNITS} hide nobody. "
            + ("Bring more records." if len(names) < FEWEST_UNITS else "Lower --holdout, or bring more records.")
        )
    train = [record for record, unit in zip(records, units, strict=True) if unit not in held_out]
    return train, [record for record, unit in zip(records, units, strict=True) if unit in held_out]
