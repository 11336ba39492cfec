"""Keys and values of every world in blocks of positions, allocated once and given to sequences on demand.

    block: (W, kv heads, page, head size)        table of a sequence: block of positions 0 … page-1, of the next page, …

Adapters change keys and values, so no two worlds can share them; in the layers of the trunk, below all adapters, one
row serves all worlds. Memory that was never written costs nothing on a CPU: the system provides it on first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PAGES = {"cuda": 16, "cpu": 64}
"""Positions per block: few where kernels gather them, many where each block is a call of torch."""


class Run(NamedTuple):
    """Rows of a pass that are consecutive positions of one block."""

    block: int
    place: int  # of the first row, in the block
    row: int
    length: int


class KVCache:
    """keys[layer], values[layer]: (blocks, W, kv heads, page, head size), with 1 for W in the trunk."""

    def __init__(
        self, rows: Sequence[int], shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Rows of each layer, W or 1; shape: blocks, kv heads, page, head size."""
        num_blocks, *inner = shape
        self.keys = [torch.empty(num_blocks, each, *inner, dtype=dtype, device=device) for each in rows]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    def write(self, layer: int, runs: Iterable[Run], keys: Tensor, values: Tensor) -> None:
        """Write keys and values (W, tokens, heads, size) by slices."""
        for kept, new in ((self.keys[layer], keys), (self.values[layer], values)):
            for block, place, row, length in runs:
                kept[block, :, :, place : place + length] = new[:, row : row + length].transpose(1, 2)

    def scatter(self, layer: int, blocks: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `write` in one launch: row i of keys and values goes to places[i] of blocks[i], both on the device."""
        with _distinct_writes():
            self.keys[layer][blocks, :, :, places] = keys.transpose(0, 1)
            self.values[layer][blocks, :, :, places] = values.transpose(0, 1)

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of blocks (n, pages): (n, W, heads, pages · page, size)."""
        keys, values = (kept[layer][table].movedim(1, 3).flatten(3, 4) for kept in (self.keys, self.values))
        return keys, values

    def copy(self, layer: int, blocks: Sequence[int], worlds: slice) -> tuple[Tensor, Tensor]:
        """As `gather` for some worlds of one sequence, by slices: (worlds, heads, pages · page, size)."""
        found = []
        for kept in (self.keys[layer], self.values[layer]):
            some = [kept[block, worlds] for block in blocks]
            found.append(torch.cat(some, 2))
        return found[0], found[1]


@contextmanager
def _distinct_writes() -> Iterator[None]:
    """For scattered writes to distinct places: order does not matter, so torch need not sort them."""
    was = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
