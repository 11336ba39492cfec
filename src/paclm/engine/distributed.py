"""An engine whose worlds are on several ranks: what workers are told and must prove before the first order."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paclm.config import RuntimeConfig
from paclm.engine.adapters import AdapterSpec, AdapterStack
from paclm.engine.base_model import base_of
from paclm.engine.engine import Engine
from paclm.engine.loading import build_step, load_base, model_context, resolve_runtime
from paclm.engine.wire import PROTOCOL, Array, Order, WireBroken, text_of
from paclm.engine.workers import START_SECONDS, DistributedStep, Split, WorkerGroup, as_message
from paclm.errors import EngineError, WorkerLost
from paclm.worlds.layout import WORLDS_FILE
from paclm.worlds.manifest import installed_versions

if TYPE_CHECKING:
    from paclm.worlds.workspace import Workspace


def open_distributed_engine(
    workspace: Workspace, support_size: int, runtime: RuntimeConfig, stack: AdapterStack | None, workers: WorkerGroup
) -> Engine:
    """An engine over all worlds, of which this process, rank 0, holds the first ones.

    Adapters of the workspace are loaded by each worker for itself, which proves what it has; a stack that is given is
    sent to them, in parts.
    """
    workers.start()  # they load while this process does
    model = load_base(base_of(workspace), runtime)
    threads = max(1, torch.get_num_threads() // workers.num_local)
    runtime = dataclasses.replace(resolve_runtime(runtime, model_context(model)), threads=threads)
    split = Split(workspace.num_worlds if stack is None else stack.num_worlds, workers.count)
    hashes = world_hashes(workspace, split) if stack is None else stack.hashes()
    own = own_worlds(workspace, split, 0)[0] if stack is None else stack.worlds(split.worlds(0))
    own = split.padded(own)
    task = VotesTask(workers, split, runtime, support_size, base_of(workspace).fingerprint, hashes, stack)
    worlds, step, plan = build_step(model, own, runtime, support_size, task.fingerprint, task.agree)
    distributed = DistributedStep(step, workers, split)
    return Engine(
        worlds, support_size, runtime.prefill_chunk, distributed, runtime.max_sequences, plan, split.num_worlds
    )


def world_hashes(workspace: Workspace, split: Split) -> list[str]:
    """What each world's adapter must hash to: as the manifest has it, or, of an older workspace, as the file has it."""
    noted = workspace.manifest.worlds_sha256
    parts = (own_worlds(workspace, split, rank)[1] for rank in range(split.workers))  # one part in memory at a time
    return noted or [digest for part in parts for digest in part]


def own_worlds(workspace: Workspace, split: Split, rank: int) -> tuple[AdapterStack, list[str]]:
    """The adapters of one rank, read alone, and their hashes: refuses others than the manifest names."""
    which, path = split.worlds(rank), workspace.adapters_path / WORLDS_FILE
    held = workspace.manifest.held or slice(0, workspace.num_worlds)
    if which.start < held.start or which.stop > held.stop:
        raise EngineError(
            f"{path} holds the worlds {held.start} to {held.stop - 1}, and rank {rank} of {split.workers} needs "
            f"{which.start} to {which.stop - 1}. Export them: paclm export WORKSPACE --worker FOLDER --rank {rank} "
            f"--workers {split.workers}"
        )
    stack = AdapterStack.load(path, slice(which.start - held.start, which.stop - held.start))
    hashes, noted = stack.hashes(), workspace.manifest.worlds_sha256
    if len(hashes) != which.stop - which.start or (noted and hashes != noted[which]):
        raise EngineError(
            f"The adapters in {path} have changed since they were trained: their hashes are not those of the manifest. "
            "Restore the file from a backup, or export the folder again."
        )
    return stack, hashes


@dataclasses.dataclass(frozen=True, slots=True)
class VotesTask:
    """Votes, as rank 0 gives them to its workers: what they need, and what they must prove before the first order."""

    workers: WorkerGroup
    split: Split
    runtime: RuntimeConfig
    support_size: int
    fingerprint: str
    hashes: list[str]
    stack: AdapterStack | None
    """To be sent; None where each worker has its own."""

    def agree(self, num_tokens: int) -> int:
        """Tokens that the cache of every rank has room for; prepares all workers."""
        self.workers.connect()
        self.workers.task += 1
        room = min(num_tokens, self._prove(self.workers.ranks))
        self._build(self.workers.ranks, room)

        def prepare(ranks: Iterable[int]) -> None:
            self._prove(ranks)
            self._build(ranks, room)

        self.workers.prepare = prepare
        return room

    def _prove(self, ranks: Iterable[int]) -> int:
        """Raise unless each holds what it must; the least room of all."""
        self.workers.begin()
        setup = {"task": "votes", "protocol": PROTOCOL, "workers": self.split.workers, "worlds": self.split.num_worlds}
        setup |= {"support_size": self.support_size, "runtime": dataclasses.asdict(self.runtime)}
        for rank in ranks:
            part = None if self.stack is None else self.split.padded(self.stack.worlds(self.split.worlds(rank)))
            arrays = [as_message(setup), *(() if part is None else sent(part))]
            try:
                self.workers.send(rank, Order.SETUP, arrays, START_SECONDS)  # adapters may be large
            except WireBroken as broken:
                raise WorkerLost(f"Worker {rank} was lost ({broken}).") from None
        rooms: list[int] = []
        for rank in ranks:
            found = self._proof(rank)
            self._check(rank, found)
            rooms.append(found["num_tokens"])
        return min(rooms)

    def _proof(self, rank: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(text_of(self.workers.receive(rank)[0]))
            return {**found, "num_tokens": int(found["num_tokens"])}
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            raise WorkerLost(f"Worker {rank} sent what is no proof of what it holds.") from None

    def _check(self, rank: int, found: dict[str, Any]) -> None:
        expected = identity(self.fingerprint, self.runtime) | {"hashes": self.hashes[self.split.worlds(rank)]}
        check_proof(rank, found, expected)

    def _build(self, ranks: Iterable[int], room: int) -> None:
        for rank in ranks:
            self.workers.send(rank, Order.BUILD, [np.array([room])])
        for rank in ranks:
            self.workers.receive(rank)


_NAMES = {
    "protocol": "versions of the workers' protocol",
    "base": "base model",
    "hashes": "adapters",
    "run": "records, worlds, settings or seed",
    "device": "hardware",
    "versions": "versions of libraries",
}


def check_proof(rank: int, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise unless a worker holds what it must."""
    for name, value in expected.items():
        if found.get(name) != value:
            shown = "" if name in ("hashes", "run") else f": {found.get(name)!r}, not {value!r}"
            raise EngineError(
                f"Worker {rank} holds other {_NAMES[name]} than this workspace{shown}. Nothing was served or trained "
                "there. Copy the workspace to its host again, and install the same versions there."
            )


def identity(fingerprint: str, runtime: RuntimeConfig) -> dict[str, Any]:
    """What must be equal everywhere for equal shapes to give equal results."""
    is_gpu = runtime.device == "cuda"
    device = (
        torch.cuda.get_device_name() if is_gpu else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    return {"protocol": PROTOCOL, "base": fingerprint, "device": device, "versions": installed_versions()}


def sent(stack: AdapterStack) -> list[Array]:
    """Adapters as arrays of a message."""
    names = {"layers": list(stack.layers), "spec": dataclasses.asdict(stack.spec), "base": stack.base}
    pairs = [tensor.float().numpy() for layer in stack.layers for tensor in (stack.A[layer], stack.B[layer])]
    return [as_message(names), *pairs]


def received(arrays: list[Array]) -> AdapterStack:
    """The adapters of a message."""
    names, pairs = json.loads(text_of(arrays[0])), [torch.from_numpy(array) for array in arrays[1:]]
    layers: list[str] = names["layers"]
    spec = AdapterSpec(**names["spec"])
    return AdapterStack(
        spec, names["base"], dict(zip(layers, pairs[::2], strict=True)), dict(zip(layers, pairs[1::2], strict=True))
    )
