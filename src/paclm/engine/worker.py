"""A worker: some of the worlds in a process of their own, here or on another host.

    join rank 0 ─► SETUP: settings ─► load base and own adapters ─► PROOF: what was loaded ─► BUILD ─► orders until END

Knows neither secret nor belief, noise or ledger. Reads only manifest, settings and adapters of the workspace; a
training (`training_worker`) reads its records instead of adapters.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paclm.config import RuntimeConfig
from paclm.engine.base_model import base_of
from paclm.engine.decode_step import DecodeStep, PromptChunk, StepOutput
from paclm.engine.distributed import identity, own_worlds, received
from paclm.engine.loading import build_step, load_base
from paclm.engine.memory import release_memory
from paclm.engine.wire import (
    PROTOCOL,
    Array,
    Order,
    Wire,
    WireBroken,
    WireMessage,
    as_text,
    break_if_unanswered,
    check_count,
    find_store,
    join,
    text_of,
)
from paclm.engine.workers import Split, as_message, digest_of
from paclm.errors import EngineError, PaclmError

if TYPE_CHECKING:
    from paclm.engine.training_worker import TrainingTask
    from paclm.worlds.workspace import Workspace

_WAIT_SECONDS = 600.0
"""For rank 0 to start."""
_STEP_ARRAYS = 6
"""Tokens, positions, table, coins, temperatures, mask; a further one changes `PROTOCOL`."""
_SILENT = 3.0
"""A host of rank 0 that has not answered for so many times `timeout_seconds` is gone."""
_TELL_SECONDS = 5.0
"""For rank 0 to take the reason why this worker ends."""


def run_worker(workspace: Workspace, rank: int, host: str, port: int, workers: int | None = None) -> None:
    """Work for the rank 0 at this address until it ends; with `workers`, only in a group of so many."""
    store = find_store(host, port, _WAIT_SECONDS)
    if workers is not None:
        check_count(store, workers)
    own, silent = own_address(host, port), _SILENT * workspace.settings.workers.timeout_seconds
    while True:
        try:
            break_if_unanswered(host, silent)
            wire = join(store, rank, own)
            break_if_unanswered(host, silent)
            Worker(workspace, rank, wire).run()
            return
        except WireBroken:  # rank 0 gave this connection up, or is gone: then joining fails
            continue


def own_address(host: str, port: int) -> str:
    """The address of this machine that rank 0 can reach."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class Worker:
    """The work of one rank between SETUP and the next."""

    def __init__(self, workspace: Workspace, rank: int, wire: Wire) -> None:
        self._workspace = workspace
        self._rank = rank
        self._wire = wire
        self._step: DecodeStep | None = None
        self._training: TrainingTask | None = None
        self._size = 0
        self._output: StepOutput | None = None

    def run(self) -> None:
        """Follow orders until the end; raises `WireBroken` if rank 0 is gone."""
        while (message := self._wire.receive()).kind != Order.END:
            try:
                self._follow(message)
            except WireBroken:
                raise
            except (PaclmError, RuntimeError) as error:
                with suppress(WireBroken):
                    self._wire.send(Order.FAILED, message.number, [as_text(str(error))], _TELL_SECONDS)
                raise

    def _follow(self, message: WireMessage) -> None:
        number, arrays = message.number, message.arrays
        if message.kind == Order.SETUP:
            setup = json.loads(text_of(arrays[0]))
            if (theirs := setup.get("protocol")) != PROTOCOL:
                raise EngineError(
                    f"Rank 0 speaks version {theirs} of the workers' protocol, and this worker version {PROTOCOL}. "
                    "Install the same paclm on all hosts."
                )
            if setup["task"] == "train":
                from paclm.engine.training_worker import TrainingTask  # slow: a worker that votes is back sooner

                self._training = TrainingTask(self._workspace, self._wire, number, setup)
            else:
                self._set_up(number, setup, arrays[1:])
            return
        if message.kind == Order.TRAIN and self._training is not None:
            self._training.train(arrays)
            return
        if message.kind == Order.FREE:
            self._free()
            return
        step = self._step
        if step is None:
            raise EngineError("Rank 0 sent an order before the settings.")
        match message.kind:
            case Order.STEP:
                if len(arrays) != _STEP_ARRAYS:
                    raise EngineError(f"Rank 0 sent a step of {len(arrays)} arrays, not {_STEP_ARRAYS}.")
                tokens, positions, table, coins, temperature, mask = arrays
                allowed = mask.view(np.uint32) if mask.size else None
                step.launch(tokens, positions, table, coins, temperature, allowed)
                self._output = step.collect()
                votes = self._output.votes[:, : self._size].astype(np.int32)
                self._wire.send(Order.ANSWER, number, [digest_of(self._output), votes])
            case Order.PREFILL:
                step.prefill(PromptChunk(*arrays))
            case Order.HIDDEN:
                self._answer(number, step.hidden_states(PromptChunk(*arrays))[: self._size])
            case Order.LOGITS if self._output is not None:
                self._answer(number, step.logits(self._output)[:, : self._size])
            case Order.PING:
                self._wire.send(Order.ANSWER, number)
            case Order.WARM_UP:
                step.warm_up(int(arrays[0][0]), lambda done, total: None)
                self._wire.send(Order.ANSWER, number)
            case _:
                raise EngineError(f"Rank 0 sent an order {message.kind.name} that cannot be followed now.")

    def _answer(self, number: int, tensor: torch.Tensor) -> None:
        self._wire.send(Order.ANSWER, number, [tensor.contiguous().cpu().view(torch.uint8).numpy()])

    def _free(self) -> None:
        self._step = self._output = self._training = None
        release_memory()

    def _set_up(self, number: int, setup: dict[str, Any], part: list[Array]) -> None:
        self._free()
        runtime, split = RuntimeConfig(**setup["runtime"]), Split(setup["worlds"], setup["workers"])
        which = split.worlds(self._rank)
        if part:
            stack = received(part)
            hashes = stack.hashes()[: which.stop - which.start]
        else:
            stack, hashes = own_worlds(self._workspace, split, self._rank)
            stack = split.padded(stack)
        proof = identity(base_of(self._workspace).fingerprint, runtime) | {"hashes": hashes}

        def agree(num_tokens: int) -> int:
            self._wire.send(Order.PROOF, number, [as_message(proof | {"num_tokens": num_tokens})])
            answer = self._wire.receive()
            if answer.kind != Order.BUILD:
                raise EngineError("Rank 0 did not accept this worker, or has ended. It says why where it was started.")
            room = int(answer.arrays[0][0])
            if room > num_tokens:
                raise EngineError(f"The cache has room for {num_tokens:,} tokens here, and must hold {room:,}.")
            return room

        model = load_base(base_of(self._workspace), runtime)
        self._size = split.size
        _, self._step, _ = build_step(model, stack, runtime, setup["support_size"], proof["base"], agree)
        self._wire.send(Order.ANSWER, number)
