"""Seeded draws that come out the same on every platform and every Python. Knows nothing about clinics.

Only `random.Random.random()` is used: it is the one method whose sequence Python promises never to change, and the
arithmetic on top of it is plain IEEE multiplication, without logarithms or powers that differ between C libraries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """One stream of randomness."""

    def __init__(self, seed: int | str) -> None:
        self.uniform = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self.uniform() < probability

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int((high - low + 1) * self.uniform())

    def pick(self, items: Sequence[T]) -> T:
        """Every item alike."""
        return items[int(len(items) * self.uniform())]

    def favour(self, items: Sequence[T]) -> T:
        """Long-tailed: the item of rank r comes about r to the power -2/3 as often as the first."""
        return items[int(len(items) * self.tail())]

    def several(self, items: Sequence[T], count: int) -> list[T]:
        """Up to `count` different items, the earlier ones more often and sooner."""
        left = list(items)
        return [left.pop(int(len(left) * self.tail())) for _ in range(min(count, len(left)))]

    def mixed(self, items: Sequence[T]) -> list[T]:
        """All items, in an order that treats them alike."""
        left = list(items)
        return [left.pop(int(len(left) * self.uniform())) for _ in items]

    def bell(self) -> float:
        """Bell-shaped, mean 0, variance 1, never beyond 3.47."""
        u = self.uniform
        return (u() + u() + u() + u() - 2.0) * 1.7320508075688772

    def tail(self) -> float:
        """Between 0 and 1, mostly small, now and then near 1."""
        u = self.uniform()
        return u * u * u
