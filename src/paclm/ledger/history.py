"""Figures over time and by key, from the stored sums by hour and key."""

from __future__ import annotations

from paclm.ledger.events import COUNTS, Usage
from paclm.ledger.reading import UsageTable


def by_day(table: UsageTable) -> dict[str, Usage]:
    """Each day (UTC) and what was had on it; `key` of the entries is the day."""
    return _grouped({place: place[0][:10] for place in table}, table)


def by_key(table: UsageTable) -> dict[str, Usage]:
    """Each key and what it had."""
    return _grouped({place: place[1] for place in table}, table)


def by_hour(table: UsageTable) -> dict[str, Usage]:
    """Each hour (UTC) that has any tokens and what was had in it, oldest first; `key` of the entries is the hour."""
    return _grouped({place: place[0] for place in table}, table)


def _grouped(groups: dict[tuple[str, str], str], table: UsageTable) -> dict[str, Usage]:
    sums: dict[str, list[int]] = {}
    for place, counts in table.items():
        total = sums.setdefault(groups[place], [0] * len(COUNTS))
        sums[groups[place]] = [a + b for a, b in zip(total, counts, strict=True)]
    return {name: Usage(name, **dict(zip(COUNTS, total, strict=True))) for name, total in sorted(sums.items())}
