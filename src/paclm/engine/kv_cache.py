"""Keys and values of every world for every running sequence, allocated once.

Slot-major: the first n slots are contiguous, so that a step over n sequences reads views and never copies. Adapters
change keys and values, so no two worlds can share them, not even for the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class KVCache:
    """keys[layer], values[layer]: (slots, W, kv heads, positions, head size)."""

    def __init__(
        self, num_layers: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write_block(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (W, heads, c, size) at positions start … start+c; returns all of the slot so far."""
        end = start + keys.shape[2]
        all_keys, all_values = self.keys[layer][slot, :, :, :end], self.values[layer][slot, :, :, :end]
        all_keys[:, :, start:] = keys
        all_values[:, :, start:] = values
        return all_keys, all_values

    def write_step(
        self, layer: int, positions: Tensor, reach: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (n, W, heads, size) of the first n slots, each at its own position.

        Returns views of the first `reach` positions, one row per slot, world and head: (n·W·heads, reach, size).
        """
        n = positions.shape[0]
        slots = torch.arange(n, device=positions.device)
        with _distinct_writes():  # one place per slot
            self.keys[layer][slots, :, :, positions] = keys
            self.values[layer][slots, :, :, positions] = values
        return self.keys[layer][:n, :, :, :reach].flatten(0, 2), self.values[layer][:n, :, :, :reach].flatten(0, 2)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :, :length] = tensor[source, :, :, :length]


@contextmanager
def _distinct_writes() -> Iterator[None]:
    """For scattered writes to distinct places: order does not matter, so torch need not sort them."""
    was = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
