"""Who is next: one waiting line per API key, served in turns. Knows nothing of streams or budgets."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Lines(Generic[T]):
    """A key with a hundred waiting answers delays a key with one by one answer, not by a hundred."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}  # in the order of turns: whoever was served goes to the end
        self._num = 0  # counted, because other threads may ask while the lines change

    def __len__(self) -> int:
        return self._num

    def num_of(self, owner: str) -> int:
        """How many entries of this owner wait."""
        return len(self._lines.get(owner, ()))

    def join(self, owner: str, entry: T) -> None:
        """Wait behind the owner's other entries."""
        self._lines.setdefault(owner, deque()).append(entry)
        self._num += 1

    def next(self) -> T:
        """The first entry of the owner whose turn it is; the others' turns come before this owner's next."""
        owner = next(iter(self._lines))
        line = self._lines.pop(owner)
        entry = line.popleft()
        self._num -= 1
        if line:
            self._lines[owner] = line
        return entry

    def leave(self, owner: str, entry: T) -> bool:
        """Stop waiting; False for one that does not wait."""
        line = self._lines.get(owner, deque())
        if entry not in line:
            return False
        line.remove(entry)
        self._num -= 1
        if not line:
            del self._lines[owner]
        return True
