"""What the trunk makes of every token, computed once for all worlds and epochs.

    tokens of all blocks    b0 b0 b0 b1 b1 …          the first adapted layer
    states (tokens, d)      ·  ·  ·  ·  ·   ───────►  of each world, gathered for each batch

No layer below the first adapted one differs between worlds or changes in training. Causal attention keeps what stands
right of a block out of it, so padding may have any finite state. Groups of blocks are fixed, whatever the number of
worlds per step and wherever a run was stopped: a resumed run computes the same bits again.

States follow from private records. They are in memory, or in a file of the training folder that has no name: no other
user can open it, and it is gone when the process ends, even if it is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from paclm.engine.memory import free_bytes, sharing
from paclm.engine.training_forward import Forward, PlainForward, ResidualStream
from paclm.engine.training_order import Blocks, IntArray
from paclm.errors import EngineError

Place = Literal["device", "host", "disk"]

_SHARES = {"device": 0.25, "host": 0.5, "disk": 0.5}  # of what is free there
_POSITIONS = {"cpu": 2048, "cuda": 2**14}  # of a group


def num_bytes(blocks: Blocks, head: nn.Linear) -> int:
    """Bytes of the states of all blocks."""
    return len(blocks.tokens) * head.in_features * head.weight.dtype.itemsize


def choose_place(
    forward: Forward, head: nn.Linear, blocks: Blocks, layer: int, folder: Path | None, processes: int = 1
) -> Place | None:
    """Where to store the states at a layer: the fastest place with room. None: compute the trunk in every step.

    With several processes on a machine each has states of its own, and as much of what is free as any other.
    """
    if layer == 0 or not isinstance(forward, PlainForward):  # a model's own code runs as a whole
        return None
    device, size = head.weight.device, num_bytes(blocks, head)
    if size <= _SHARES["device"] * free_bytes(device) / sharing(device, processes):
        return "device"
    size *= processes
    if device.type != "cpu" and size <= _SHARES["host"] * free_bytes(torch.device("cpu")):
        return "host"
    if folder is not None and hasattr(os, "posix_fallocate"):  # not on macOS
        disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        if size <= _SHARES["disk"] * shutil.disk_usage(disk).free:
            return "disk"
    return None


@dataclass(frozen=True, slots=True)
class TrunkStates:
    """The residual stream that enters a decoder layer, for every token."""

    layer: int
    states: Tensor  # (tokens, d), in the order of `Blocks.tokens`
    device: torch.device  # the model's

    @classmethod
    def compute(
        cls, forward: Forward, head: nn.Linear, blocks: Blocks, layer: int, place: Place, folder: Path | None = None
    ) -> TrunkStates:
        """Compute the states of all blocks; those on disk are in the folder."""
        shape, device = (len(blocks.tokens), head.in_features), head.weight.device
        if place == "disk":
            assert folder is not None
            states = _on_disk(shape, head.weight.dtype, folder)
        else:
            states = torch.empty(shape, dtype=head.weight.dtype, device=device if place == "device" else "cpu")
        for group in groups_of(blocks, device.type):
            places, found = compute_group(forward, blocks, layer, group, device)
            states[torch.from_numpy(places).to(states.device)] = found.to(states.device)
        return cls(layer, states, device)

    @classmethod
    def alike(cls, head: nn.Linear, blocks: Blocks, layer: int) -> TrunkStates:
        """The same random state for every token: as much work for a batch as with true ones, and no memory."""
        one = torch.randn(1, head.in_features, generator=torch.Generator().manual_seed(0))
        return cls(layer, one.to(head.weight).expand(len(blocks.tokens), -1), head.weight.device)

    def at(self, places: IntArray) -> ResidualStream:
        """The stream of tokens by their places in `Blocks.tokens`; places beyond the last are padding."""
        wanted = torch.from_numpy(np.minimum(places, len(self.states) - 1))
        if self.device.type != "cuda":
            found = self.states.index_select(0, wanted.to(self.states.device))
        elif self.states.is_cuda:  # copies from pinned memory do not wait for earlier kernels
            found = self.states.index_select(0, wanted.pin_memory().to(self.device, non_blocking=True))
        else:
            gathered = torch.empty(len(wanted), self.states.shape[1], dtype=self.states.dtype, pin_memory=True)
            torch.index_select(self.states, 0, wanted, out=gathered)
            found = gathered.to(self.device, non_blocking=True)
        return ResidualStream(self.layer, found)


def groups_of(blocks: Blocks, device: str) -> Iterator[IntArray]:
    """All blocks by length, as many at a time as make a pass."""
    order, lengths = np.argsort(-blocks.lengths, kind="stable"), blocks.lengths
    first = 0
    while first < len(order):
        rows = max(1, _POSITIONS.get(device, 2048) // int(lengths[order[first]]))
        yield order[first : first + rows]
        first += rows


def compute_group(
    forward: Forward, blocks: Blocks, layer: int, group: IntArray, device: torch.device
) -> tuple[IntArray, Tensor]:
    """All tokens of some blocks: their places in `Blocks.tokens` and their states."""
    assert isinstance(forward, PlainForward)  # as `choose_place` requires
    lengths = blocks.lengths[group]
    offsets = np.arange(lengths.max())
    places = np.minimum(blocks.starts[group][:, None] + offsets, len(blocks.tokens) - 1)  # (rows, length)
    is_token = offsets < lengths[:, None]
    stream = forward.stream(torch.from_numpy(blocks.tokens[places].astype(np.int64)).to(device), layer)
    return places[is_token], stream.states[torch.from_numpy(is_token.ravel()).to(device)]


def _on_disk(shape: tuple[int, int], dtype: torch.dtype, folder: Path) -> Tensor:
    size = shape[0] * shape[1] * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # the mapping keeps it
            os.posix_fallocate(file.fileno(), 0, size)  # all of it now: a full disk would kill the process later
            mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(shape[0], shape[1] * dtype.itemsize))
    except OSError as error:
        raise EngineError(
            f"The states of the trunk need {size / 2**30:.1f} GiB in {folder} ({error}). Free disk space, then resume."
        ) from None
    return torch.from_numpy(mapped).view(dtype)
