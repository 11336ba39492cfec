"""Figures over time and by key, from the stored sums by hour and key."""

from __future__ import annotations

from collections.abc import Iterable

from paclm.ledger.events import COUNTS, Usage
from paclm.ledger.reading import UsageTable, hour_of


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


class Sums:
    """The same figures while a ledger is open: taken once from the table, then kept with every row that is added."""

    def __init__(self, table: UsageTable) -> None:
        self._keys = by_key(table)
        self._hours = by_hour(table)

    def add(self, at: str, entries: Iterable[Usage]) -> None:
        """What an event at that time had."""
        for entry in entries:
            _add(self._keys, entry.key, entry)
            _add(self._hours, hour_of(at), entry)

    def by_key(self) -> dict[str, Usage]:
        """As the function of that name."""
        return dict(sorted(self._keys.items()))

    def by_hour(self) -> dict[str, Usage]:
        """As the function of that name."""
        return dict(sorted(self._hours.items()))


def _add(sums: dict[str, Usage], name: str, more: Usage) -> None:
    had = sums.get(name, Usage(name))
    sums[name] = Usage(name, **{count: getattr(had, count) + getattr(more, count) for count in COUNTS})
