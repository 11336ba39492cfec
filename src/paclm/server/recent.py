"""The last minutes in bins of a few seconds, in memory: what a dashboard draws while it is watched. Counts only."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paclm.curator.streams import Mark

BIN_SECONDS = 2
KEEP_SECONDS = 600
_RATE_SECONDS = 10


@dataclass(slots=True)
class Bin:
    """What left in a few seconds."""

    number: int
    """The bin's start in seconds since 1970, divided by its length."""
    private_tokens: int = 0
    public_tokens: int = 0
    dissent_tokens: int = 0
    """Private tokens on which the worlds differed."""
    steps: int = 0

    @property
    def tokens(self) -> int:
        """All that left."""
        return self.private_tokens + self.public_tokens

    @property
    def at(self) -> int:
        """When it began, in seconds since 1970."""
        return self.number * BIN_SECONDS


class Recent:
    """Written by the stepping thread, read by anybody."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bins: deque[Bin] = deque(maxlen=KEEP_SECONDS // BIN_SECONDS)

    def add(self, marks: Sequence[Mark]) -> None:
        """Count one step."""
        number = self._now()
        with self._lock:
            if not self._bins or self._bins[-1].number < number:
                self._bins.append(Bin(number))
            bin_ = self._bins[-1]
            bin_.steps += 1
            bin_.private_tokens += len(marks) - marks.count("public")
            bin_.public_tokens += marks.count("public")
            bin_.dissent_tokens += marks.count("disputed")

    def bins(self) -> list[Bin]:
        """Every bin of the time kept, also those in which nothing happened; the one that still fills is left out."""
        now = self._now()
        with self._lock:
            known = {bin_.number: bin_ for bin_ in self._bins}
        return [known.get(number) or Bin(number) for number in range(now - KEEP_SECONDS // BIN_SECONDS, now)]

    def rates(self) -> tuple[float, float]:
        """Tokens and steps per second, over the last whole bins."""
        last = self.bins()[-_RATE_SECONDS // BIN_SECONDS :]
        return sum(bin_.tokens for bin_ in last) / _RATE_SECONDS, sum(bin_.steps for bin_ in last) / _RATE_SECONDS

    def _now(self) -> int:
        return int(self._clock() // BIN_SECONDS)
