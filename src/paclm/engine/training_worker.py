"""The worker's side of a training: it trains groups of worlds for a rank 0 that keeps what comes of them.

Reads the workspace's records and settings. Keeps nothing on disk, but the trunk's states where they do not fit into
memory, in a file without a name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

from paclm.config import RuntimeConfig
from paclm.engine.checkpoint import Position
from paclm.engine.distributed import identity
from paclm.engine.training import GroupTrainer
from paclm.engine.training_job import fitting_memory, prepare_training, smaller_steps
from paclm.engine.training_queue import GroupStep
from paclm.engine.training_workers import arrays_of_position, position_of
from paclm.engine.wire import Array, Order, Wire, WireBroken, as_text
from paclm.engine.workers import as_message
from paclm.errors import EngineError
from paclm.worlds.workspace import Workspace

_BEAT_SECONDS = 1.0


class TrainingTask:
    """One training that this worker takes part in. A thread tells rank 0 every second that the worker lives."""

    def __init__(self, workspace: Workspace, wire: Wire, number: int, setup: dict[str, Any]) -> None:
        self._wire = wire
        self._number = number
        self._sending = threading.Lock()
        self._latest: GroupStep | None = None
        self._begin: Position | None = None
        self._broken: WireBroken | None = None
        self._seconds = float(setup["checkpoint_seconds"])
        runtime = RuntimeConfig(**setup["runtime"])
        opened = Workspace.open(workspace.path)  # checks the records, which other workers do not need
        own = replace(opened, settings=replace(opened.settings, runtime=runtime))
        with self._beating():
            job = prepare_training(own, setup["what"], dtype=setup["dtype"])
            together = int(setup["worlds_per_step"])
            self._fitting = f"Training {together} worlds at a time", smaller_steps(job.settings)
            self._trainer = GroupTrainer(job.model, job.schedule, job.settings, own.base.fingerprint)
            proof = identity(own.base.fingerprint, runtime) | {"run": self._trainer.run_id}
            self._send(Order.PROOF, [as_message(proof)])
            place = self._trainer.choose_place(own.path) if setup["has_states"] else None
            if setup["has_states"] and place is None:
                raise EngineError("There is no room for the states of the trunk. Free memory or disk space and resume.")
            with fitting_memory(*self._fitting):
                self._trainer.prepare(together, place, own.path)
        self._send(Order.ANSWER, [])

    def train(self, arrays: list[Array]) -> None:
        """Train one group and send it; from a position inside it, if one came."""
        group = int(arrays[0][0])
        self._begin = position_of(arrays) if len(arrays) > 1 else None
        with self._beating(), fitting_memory(*self._fitting):
            done = self._trainer.train(group, self, self._seconds)
        self._send(Order.ADAPTERS, [done["rows"].numpy(), done["figures"].numpy()])

    # --- the journal of the trainer -----------------------------------------------------------------------------------

    def position(self, number: int) -> Position | None:
        """Where the group begins."""
        return self._begin

    def save(self, position: Position) -> None:
        """Send a position to rank 0."""
        self._send(Order.POSITION, arrays_of_position(position))

    def note(self, number: int, taken: GroupStep) -> None:
        """Remember the step for the next beat; raises if rank 0 is gone."""
        if self._broken is not None:
            raise self._broken
        self._latest = taken

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, kind: Order, arrays: list[Array]) -> None:
        with self._sending:
            self._wire.send(kind, self._number, arrays)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Meanwhile, tell rank 0 how far this worker is."""
        ended = threading.Event()

        def beat() -> None:
            try:
                while not ended.wait(_BEAT_SECONDS):
                    latest = self._latest
                    self._send(Order.PROGRESS, [as_text(json.dumps(astuple(latest)))] if latest else [])
            except WireBroken as broken:
                self._broken = broken

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._latest = None
