"""Rank 0's side of several processes that share the worlds: it sends each step to all and gathers their votes.

    engine ─► DistributedStep ─► numbered orders (step, prefill) ─► each worker: its worlds, the public row, the trunk
           ◄─ one ballot      ◄─ (number, digest of the support, votes) ◄─┘

Each of N ranks holds as many worlds (the last ones padded with adapters of zeros), so that all compute equal shapes and
the same public row, bit for bit: a digest that differs is a fault. A worker that dies or is silent voids the step in
flight: nothing was drawn for it, so nothing is released or charged. Once the worker is back, all sequences are read
again from their tokens and the step is repeated; it never goes on with the worlds that are left, since which those are
may depend on the secret's world. Workers get tokens and coins; they never hold secret, belief, noise or ledger.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from paclm.engine.adapters import AdapterStack
from paclm.engine.decode_step import DecodeStep, MaskArray, PromptChunk, StepOutput, TableArray
from paclm.engine.determinism import FloatArray, IntArray
from paclm.engine.rendezvous import Rendezvous, check_workers
from paclm.engine.wire import (
    Array,
    Order,
    Store,
    Wire,
    WireBroken,
    WireMessage,
    accept,
    as_text,
    has_come,
    packed,
    serve_store,
    text_of,
)
from paclm.errors import EngineError, WorkerLost

START_SECONDS = 600.0
"""For a worker to start, load its models and allocate its cache."""
_LOOK_SECONDS = 0.02
_LOCAL = Rendezvous("127.0.0.1", 0)
_RESTARTS = 5
"""In a row, after which a worker that is lost again and again is given up."""
_END_SECONDS = 5.0
NO_MASK = np.zeros((0, 0), dtype=np.int32)
"""In the place of a step's mask: every token is allowed."""
_MOST_REASON = 2000
"""Bytes of a worker's reason that are shown."""


@dataclass(frozen=True, slots=True)
class Split:
    """Which worlds are on which rank."""

    num_worlds: int
    workers: int

    def __post_init__(self) -> None:
        check_workers(self.workers, self.num_worlds)

    @property
    def size(self) -> int:
        """Rows for worlds on each rank."""
        return -(-self.num_worlds // self.workers)

    def worlds(self, rank: int) -> slice:
        """The worlds of a rank; fewer than `size`, or none, on the last ones."""
        return slice(min(rank * self.size, self.num_worlds), min((rank + 1) * self.size, self.num_worlds))

    def padded(self, own: AdapterStack) -> AdapterStack:
        """The adapters of a rank with zeros up to `size`."""
        missing = self.size - own.num_worlds
        return own.map(lambda tensor: torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]))


class WorkerNews(NamedTuple):
    """What became of a worker."""

    kind: Literal["missing", "lost", "back"]
    rank: int
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class WorkerGroup:
    """The other ranks, 1 to `count` - 1. Use it as a context manager: at the end they are told to stop."""

    def __init__(
        self,
        count: int,
        *,
        rendezvous: Rendezvous = _LOCAL,
        start: Callable[[int, str], subprocess.Popen[bytes]] | None = None,
        command: Callable[[int, str], str] = lambda rank, address: "paclm worker",
        timeout: float = 10.0,
        announce: Callable[[WorkerNews], None] = lambda news: None,
    ) -> None:
        """`start(rank, address)` starts a worker on this machine; without it, `command` is for those elsewhere."""
        self.count = count
        self.timeout = timeout
        """Seconds that a worker may be later than rank 0."""
        self.announce = announce
        self.while_waiting: Callable[[], None] = lambda: None
        """Called again and again while a worker is waited for; may raise to give up."""
        self._rendezvous = rendezvous
        self._store: Store | None = None
        self._start = start
        self._command = command
        self._wires: dict[int, Wire] = {}
        self._sessions = dict.fromkeys(range(1, count), 0)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: dict[int, str] = {}
        self._number = 0
        self._restarts = 0  # since all workers last answered
        self.task = 0
        """Changes when the workers are given another task: an engine over an earlier one must not go on."""
        self.prepare: Callable[[Iterable[int]], None] = lambda ranks: None
        """What makes these ranks ready for orders; done again for those that come back."""

    @property
    def ranks(self) -> range:
        """All but rank 0."""
        return range(1, self.count)

    @property
    def num_local(self) -> int:
        """Processes that share this machine, with this one."""
        return 1 if self._start is None else self.count

    @property
    def address(self) -> str:
        """Where workers find rank 0, once it has started."""
        return str(self._rendezvous)

    def start(self) -> None:
        """Listen for workers, and start those of this machine; once."""
        if self._store is None:
            self._store, port = serve_store(*self._rendezvous, self.count)
            self._rendezvous = self._rendezvous._replace(port=port)
            for rank in self.ranks:
                self._start_process(rank)

    def connect(self, ranks: Iterable[int] | None = None) -> None:
        """Wait for these workers, or all, that are not connected; those lost or ended are started again."""
        self.start()
        wanted = self.ranks if ranks is None else list(ranks)
        for rank in wanted:
            process = self._processes.get(rank)
            if rank in self._lost or (rank in self._wires and process is not None and process.poll() is not None):
                self._lost.pop(rank, None)
                self._wires.pop(rank, None)
                self._start_process(rank)
        self._connect(wanted)

    def drop(self, rank: int) -> None:
        """Go on without this worker."""
        self._wires.pop(rank, None)
        if process := self._processes.get(rank):
            _end(process, 0.0)

    def free(self) -> None:
        """Let all workers free their models' memory, until they are prepared for another task."""
        self.task += 1
        self.prepare = lambda ranks: None
        self.order(Order.FREE)

    def restore(self) -> None:
        """Wait until those that were lost are back and prepared. The caches of all must be filled again."""
        while self._restarts < _RESTARTS:
            self._restarts += 1
            reasons, self._lost = self._lost, {}
            for rank, reason in reasons.items():
                said = f"Worker {rank} was lost ({reason}). Nothing was released; waiting until it is back."
                self.announce(WorkerNews("lost", rank, said))
                self._wires.pop(rank, None)
                self._start_process(rank)
            try:
                self._connect(reasons)
                self.prepare(reasons)
            except (WireBroken, WorkerLost) as again:
                self._lost = dict.fromkeys(reasons, str(again))
                continue
            for rank in reasons:
                self.announce(WorkerNews("back", rank, f"Worker {rank} is back."))
            return
        named = ", ".join(map(str, self._lost))
        raise EngineError(f"Worker {named} was lost {_RESTARTS} times in a row. Nothing was released meanwhile.")

    # --- messages -----------------------------------------------------------------------------------------------------

    def order(self, kind: Order, arrays: Sequence[Array] = ()) -> int:
        """Send one order to all; its number. Never fails: that one is lost is found where answers are awaited."""
        self._number += 1
        message = packed(kind, self._number, arrays)
        for rank, wire in self._wires.items():
            if rank not in self._lost:
                try:
                    wire.post(message, self.timeout)
                except WireBroken as broken:
                    self._lost[rank] = str(broken)
        return self._number

    def answers(self, number: int, seconds: float | None = None) -> list[list[Array]]:
        """The answers of all to this order, by rank; raises `WorkerLost` if one is missing."""
        found = []
        for rank in self.ranks:
            if rank not in self._lost:
                try:
                    if seconds is None:
                        found.append(self._answer(rank, number, self.timeout))
                    else:
                        found.append(self._patiently(rank, number, seconds))
                except WireBroken as broken:
                    self._lost[rank] = str(broken)
        self.check()
        self._restarts = 0
        return found

    def check(self) -> None:
        """Raise if a worker is lost."""
        if self._lost:
            named = ", ".join(f"{rank} ({reason})" for rank, reason in sorted(self._lost.items()))
            raise WorkerLost(f"Worker {named} was lost. Nothing was released for this step. Start it again.")

    def begin(self) -> None:
        """Before a task is given to workers: what they answer to earlier orders does not count any more."""
        self._number += 1

    def send(self, rank: int, kind: Order, arrays: Sequence[Array] = (), seconds: float | None = None) -> None:
        """One message to one worker; raises `WireBroken`."""
        try:
            self._wires[rank].send(kind, self._number, arrays, seconds or self.timeout)
        except WireBroken as broken:
            self._lost[rank] = str(broken)
            raise

    def receive(self, rank: int, seconds: float = START_SECONDS) -> list[Array]:
        """The answer of one worker to the last `send`."""
        try:
            return self._patiently(rank, self._number, seconds)
        except WireBroken as broken:
            self._lost[rank] = str(broken)
            raise WorkerLost(f"Worker {rank} was lost ({broken}).") from None

    def _patiently(self, rank: int, number: int, seconds: float) -> list[Array]:
        """Wait for an answer in another thread: signals and `while_waiting` are heard meanwhile."""
        result: Future[list[Array]] = Future()

        def run() -> None:
            try:
                result.set_result(self._answer(rank, number, seconds))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not wait([result], 5 * _LOOK_SECONDS).done:
            self.while_waiting()
        return result.result()

    def hear(self, rank: int) -> WireMessage:
        """The next message of one worker, within the time that it may be late."""
        message = self._wires[rank].receive(self.timeout)
        if message.kind == Order.FAILED:
            raise EngineError(f"Worker {rank} cannot work here: {_reason(message)}")
        return message

    def _answer(self, rank: int, number: int, seconds: float) -> list[Array]:
        while True:
            message = self._wires[rank].receive(seconds)
            if message.kind == Order.FAILED:
                self._lost[rank] = "it failed"
                raise EngineError(f"Worker {rank} cannot work here: {_reason(message)}")
            if message.number == number:
                return message.arrays
            if message.number > number:
                raise EngineError(f"Worker {rank} answered an order that was not sent. Stop everything, start again.")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_process(self, rank: int) -> None:
        if self._start is None:
            return
        if process := self._processes.get(rank):
            _end(process, 0.0)
        self._processes[rank] = self._start(rank, self.address)

    def _connect(self, ranks: Iterable[int]) -> None:
        deadline = time.monotonic() + START_SECONDS
        if self._start is None:
            self._announce_missing([rank for rank in ranks if rank not in self._wires])
        for rank in ranks:
            while rank not in self._wires:
                self._sessions[rank] += 1
                self._await(rank, deadline)
                with suppress(WireBroken):  # it died since: the next one of this rank
                    self._wires[rank] = accept(self._store, rank, self._sessions[rank], self._rendezvous.host)

    def _announce_missing(self, ranks: list[int]) -> None:
        for rank in ranks:
            if not has_come(self._store, rank, self._sessions[rank] + 1):
                said = f"Worker {rank} is missing. On its host: {self._command(rank, self.address)}"
                self.announce(WorkerNews("missing", rank, said))

    def _await(self, rank: int, deadline: float) -> None:
        while not has_come(self._store, rank, self._sessions[rank]):
            process = self._processes.get(rank)
            if process is not None and process.poll() is not None:
                raise WorkerLost(f"Worker {rank} ended with status {process.returncode}; it said why above.")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"Worker {rank} did not come to {self.address} within {START_SECONDS:.0f} s. On its host: "
                    f"{self._command(rank, self.address)}"
                )
            self.while_waiting()
            time.sleep(_LOOK_SECONDS)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Tell all workers to stop; those of this machine have so long until they are killed."""
        for rank, wire in self._wires.items():
            with suppress(WireBroken):
                if rank not in self._lost:
                    wire.send(Order.END, self._number + 1, (), 1.0)
        for rank, process in self._processes.items():
            _end(process, seconds if rank in self._wires and rank not in self._lost else 0.0)
        self._wires.clear()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self.close(_END_SECONDS if failure is None else 0.0)


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait so long, then kill."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _reason(message: WireMessage) -> str:
    text = text_of(message.arrays[0][:_MOST_REASON]) if message.arrays else "no reason given"
    return "".join(letter if letter.isprintable() else " " for letter in text)


class DistributedStep:
    """A decode step whose worlds are on several ranks; this process is rank 0 and computes its own part."""

    def __init__(self, step: DecodeStep, workers: WorkerGroup, split: Split) -> None:
        self._step = step
        self._workers = workers
        self._split = split
        self._task = workers.task
        self._number = 0  # of the step in flight

    def launch(
        self,
        tokens: IntArray,
        positions: IntArray,
        table: TableArray,
        coins: FloatArray,
        temperature: FloatArray,
        allowed: MaskArray | None,
    ) -> None:
        mask = NO_MASK if allowed is None else allowed.view(np.int32)
        self._number = self._order(Order.STEP, [tokens, positions, table, coins, temperature, mask])
        self._step.launch(tokens, positions, table, coins, temperature, allowed)

    def collect(self) -> StepOutput:
        """The ballot of all worlds. `logits` are of this rank only: see `logits`."""
        own = self._step.collect()
        expected, votes = digest_of(own), [own.votes[:, : self._split.size]]
        for rank, answer in enumerate(self._workers.answers(self._number), 1):
            digest, theirs = answer if len(answer) == 2 else (expected[:0], expected)
            if not np.array_equal(digest, expected) or theirs.shape != votes[0].shape or theirs.dtype != np.int32:
                raise EngineError(
                    f"Worker {rank} found another support than rank 0 for the same step. Nothing was released. Run "
                    "equal devices and versions of all libraries everywhere, then start again."
                )
            votes.append(theirs)
        worlds = np.concatenate(votes, axis=1, dtype=np.int64)[:, : self._split.num_worlds]
        if not are_inside(worlds, own.support):
            raise EngineError(
                "A worker voted for a token outside of the support. Nothing was released. Check the workers' hosts and "
                "who can reach the rendezvous, then start again."
            )
        return StepOutput(own.support, np.concatenate([worlds, own.votes[:, -1:]], axis=1), own.logits, own.logprobs)

    def prefill(self, chunk: PromptChunk) -> Tensor:
        """Hidden states of this rank's worlds only; for those of all see `hidden_states`."""
        self._order(Order.PREFILL, arrays_of(chunk))
        return self._step.prefill(chunk)

    def hidden_states(self, chunk: PromptChunk) -> Tensor:
        number = self._order(Order.HIDDEN, arrays_of(chunk))
        return self._joined(number, self._step.hidden_states(chunk), 0)

    def logits(self, output: StepOutput) -> Tensor:
        number = self._order(Order.LOGITS)
        return self._joined(number, self._step.logits(output), 1)

    def warm_up(self, max_sequences: int, progress: Callable[[int, int], None]) -> None:
        number = self._order(Order.WARM_UP, [np.array([max_sequences])])
        self._step.warm_up(max_sequences, progress)
        self._workers.answers(number, START_SECONDS)

    def public_logits(self, hidden: Tensor) -> Tensor:
        return self._step.public_logits(hidden)

    def check(self) -> None:
        self._workers.answers(self._order(Order.PING))

    def restore(self) -> None:
        """After `WorkerLost`: wait until it is back. Caches are empty then."""
        self._workers.restore()

    def _order(self, kind: Order, arrays: Sequence[Array] = ()) -> int:
        if self._workers.task != self._task:
            raise EngineError("The workers have been given another engine since. Open this one again.")
        return self._workers.order(kind, arrays)

    def _joined(self, number: int, own: Tensor, dim: int) -> Tensor:
        """Rows of all worlds along this dimension, and the public model's last."""
        size = self._split.size
        parts = [own.narrow(dim, 0, size)]
        for (raw,) in self._workers.answers(number):
            shape = list(own.shape)
            shape[dim] = size
            parts.append(torch.from_numpy(raw).view(own.dtype).reshape(shape).to(own.device))
        worlds = torch.cat(parts, dim).narrow(dim, 0, self._split.num_worlds)
        return torch.cat([worlds, own.narrow(dim, size, 1)], dim)


def are_inside(votes: IntArray, support: IntArray) -> bool:
    """Whether each row of votes (n, m) is of that row's support (n, k)."""
    size = int(support.max(initial=-1)) + 1
    if votes.size and not 0 <= votes.min() <= votes.max() < size:
        return False
    is_allowed = np.zeros((len(support), size + 1), dtype=bool)
    np.put_along_axis(is_allowed, support, True, 1)  # -1, which is no token, marks the last column, which is no vote
    return bool(np.take_along_axis(is_allowed, votes, 1).all())


def digest_of(output: StepOutput) -> Array:
    """Of what every rank computes alike: the support and the public model's vote."""
    digest = hashlib.sha256(output.support.astype(np.int32).tobytes())
    digest.update(output.votes[:, -1].astype(np.int32).tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def arrays_of(chunk: PromptChunk) -> list[Array]:
    """A chunk as the arrays of a message."""
    return [chunk.tokens, chunk.starts, chunk.lengths, chunk.table]


def as_message(settings: dict[str, Any]) -> Array:
    """Settings as an array: JSON, never pickled."""
    return as_text(json.dumps(settings, sort_keys=True))
