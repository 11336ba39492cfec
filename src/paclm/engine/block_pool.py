"""Which blocks of the cache are in use, and which hold prompts that others of the same owner may share.

    acquire ─► shared blocks of the prompt, where its owner has them, and free ones      release ─► free again

A full block of a prompt is found by its parent (the block before it, or the owner) and its tokens: an exact match,
never a hash alone, never across owners. When its last user leaves, a filled one stays until its place is needed, the
least recently used first. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paclm.errors import EngineError

Key = tuple[int | str, tuple[int, ...]]
"""Serial of the parent block, or the owner, and the tokens of the block."""


@dataclass(slots=True)
class BlockState:
    """State of one block."""

    num_users: int = 0
    key: Key | None = field(default=None, repr=False)  # of the index, while it can be shared
    serial: int = 0  # never used twice, so that a key cannot name what a parent held before
    is_filled: bool = False


class BlockPool:
    """Blocks 1 … num_blocks - 1; block 0 is never given out."""

    def __init__(self, num_blocks: int, page: int) -> None:
        self.page = page
        self.num_blocks = num_blocks - 1
        self._blocks = [BlockState() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: memory that is in use already is used first
        self._kept: dict[int, None] = {}  # without users but in the index, least recently used first
        self._index: dict[Key, int] = {}
        self._next_serial = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be acquired, among them those kept for their content."""
        return len(self._free) + len(self._kept)

    def needed(self, num_tokens: int) -> int:
        """Blocks of a sequence of so many tokens."""
        return -(-num_tokens // self.page)

    def acquire(self, num_tokens: int, prompt: Sequence[int] = (), owner: str | None = None) -> list[int]:
        """Blocks for a sequence of so many tokens; full blocks of its prompt may be another's of the same owner."""
        if self.needed(num_tokens) > self.num_free:
            raise EngineError(
                f"{self.needed(num_tokens)} blocks of {self.page} tokens were asked for, and {self.num_free} of "
                f"{self.num_blocks} are free. Wait for a sequence to end, or raise cache_gib in [runtime]."
            )
        blocks: list[int] = []
        parent: int | str | None = owner
        for start in range(0, num_tokens, self.page):
            tokens = tuple(prompt[start : start + self.page])
            key = (parent, tokens) if parent is not None and len(tokens) == self.page else None
            number = self._index.get(key) if key is not None else None
            if number is None:
                number = self._take(key)
            block = self._blocks[number]
            block.num_users += 1
            self._kept.pop(number, None)
            blocks.append(number)
            parent = block.serial if key is not None else None
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """End a use of each; the last of them is the first to be given up."""
        for number in reversed(blocks):
            block = self._blocks[number]
            block.num_users -= 1
            if block.num_users == 0:
                if block.key is not None and block.is_filled:
                    self._kept[number] = None
                else:
                    self._forget(block)
                    self._free.append(number)

    def is_filled(self, block: int) -> bool:
        """Whether the prompt of this shared block is in the cache."""
        return self._blocks[block].is_filled

    def fill(self, block: int, is_filled: bool = True) -> None:
        """Note that the keys and values of a shared block are written."""
        self._blocks[block].is_filled = is_filled

    def forget(self) -> None:
        """The cache is empty: no block is filled, and none is kept for its content."""
        for block in self._blocks:
            block.is_filled = False
        for number in self._kept:
            self._forget(self._blocks[number])
            self._free.append(number)
        self._kept.clear()

    def _take(self, key: Key | None) -> int:
        """A block that nobody uses."""
        if self._free:
            number = self._free.pop()
        else:
            number = next(iter(self._kept))
            del self._kept[number]
            self._forget(self._blocks[number])
        block = self._blocks[number]
        block.is_filled = False
        if key is not None:
            self._next_serial += 1
            block.key, block.serial = key, self._next_serial
            self._index[key] = number
        return number

    def _forget(self, block: BlockState) -> None:
        if block.key is not None:
            del self._index[block.key]
            block.key = None
