"""Messages between rank 0 and one worker: a kind, a number and arrays, over a torch.distributed (Gloo) pair.

    frame: up to 1 MiB, every step     number, kind, size of the body │ dtypes and shapes │ the arrays' bytes …
    rest:  what a frame does not hold, sent after it

Both sides always have a receive posted, so that a message leaves when it is sent: Gloo asks the other side otherwise.

Arrays only: nothing is unpickled, and what does not parse ends the connection. The wire is neither encrypted nor
authenticated. Rank 0 keeps the store through which workers find it; a worker that comes (again) takes the next session
of its rank, so a pair that is broken is never used again.
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
import stat
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as torch_distributed
from torch import Tensor

from paclm.errors import EngineError, InvalidInput

PROTOCOL = 2
"""Changes with the meaning of messages: rank 0 and a worker of another one refuse each other."""
FRAME = 2**20
_MOST_BYTES = 2**34
_MOST_ARRAYS = 4096
_HEADER = 4  # int64: number, kind, bytes of the body, arrays
_AHEAD = 2
"""Messages that may be on their way when the next one is sent."""
_DTYPES = tuple(map(np.dtype, ("uint8", "int32", "int64", "float32", "float64", "bool", "uint16")))
_FOREVER = timedelta(days=365)
_CONNECT_SECONDS = 20.0
_WORKERS = "workers"

dist: Any = torch_distributed  # its types leave these names out
Store = Any
Array = np.ndarray[Any, Any]


class Order(IntEnum):
    """What a message asks for, or answers."""

    SETUP = 0
    PROOF = 1
    BUILD = 2
    STEP = 3
    PREFILL = 4
    HIDDEN = 5
    LOGITS = 6
    WARM_UP = 7
    ANSWER = 8
    END = 9
    FAILED = 10
    ADAPTERS = 11
    PROGRESS = 12
    PING = 13
    TRAIN = 14
    POSITION = 15
    FREE = 16


class WireMessage(NamedTuple):
    """One message."""

    kind: Order
    number: int
    arrays: list[Array]


class WireBroken(EngineError):
    """The other side is gone, or silent for too long, or sent what is no message."""


class Wire:
    """One connection. Not for two threads at once."""

    def __init__(self, store: Store, prefix: str, is_worker: bool, host: str) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._threads = 1
        self._peer = 0 if is_worker else 1
        try:
            self._pair: Any = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), int(is_worker), 2, options)
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from None
        self._frame = torch.zeros(FRAME, dtype=torch.uint8)
        self._sending: deque[Any] = deque()
        self._post_receive()

    def send(self, kind: Order, number: int, arrays: Sequence[Array] = (), seconds: float | None = None) -> None:
        """Send a message; waits until it is on its way."""
        self.post(packed(kind, number, arrays), seconds)
        self._wait_for_sends(0, seconds)

    def post(self, message: Tensor, seconds: float | None = None) -> None:
        """Send what `packed` returned, without waiting; unless the other side is so many messages behind."""
        try:
            for tag, part in enumerate([message[:FRAME], message[FRAME:]] if len(message) > FRAME else [message]):
                self._sending.append(self._pair.send([part], self._peer, tag))
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from None
        self._wait_for_sends(_AHEAD, seconds)

    def receive(self, seconds: float | None = None) -> WireMessage:
        """Wait for the next message; without a limit for as long as the other side lives."""
        try:
            self._receiving.wait(_limit(seconds))
            frame = self._frame.numpy()
            number, kind, size, count = (int(value) for value in frame[: 8 * _HEADER].view(np.int64))
            if not (0 <= size <= _MOST_BYTES and 0 <= count <= _MOST_ARRAYS and kind in list(Order)):
                raise WireBroken("It sent what is no message of paclm.")
            body = frame[8 * _HEADER : 8 * _HEADER + size].copy()
            if size > len(body):
                rest = torch.empty(size - len(body), dtype=torch.uint8)
                self._pair.recv([rest], self._peer, 1).wait(_limit(seconds))
                body = np.concatenate([body, rest.numpy()])
            self._post_receive()
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from None
        return WireMessage(Order(kind), number, _unpacked(body, count))

    def _post_receive(self) -> None:
        self._receiving = self._pair.recv([self._frame], self._peer, 0)

    def _wait_for_sends(self, left: int, seconds: float | None) -> None:
        try:
            while len(self._sending) > left:
                self._sending.popleft().wait(_limit(seconds))
        except RuntimeError as error:
            raise WireBroken(_first_line(error)) from None


def serve_store(host: str, port: int = 0, workers: int = 1) -> tuple[Store, int]:
    """The store of rank 0, reachable under this address only, and its port; it says how many ranks there are."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise InvalidInput(
                f"Workers cannot meet at {host}:{port} ({error.strerror}). Pass an address of this machine and a free "
                "port to --rendezvous."
            ) from None
        listening.listen(128)
        port = listening.getsockname()[1]
        descriptor = listening.detach()  # torch closes it
    store = dist.TCPStore(
        host, port, None, True, timedelta(seconds=_CONNECT_SECONDS), False, master_listen_fd=descriptor
    )
    store.set(_WORKERS, str(workers))
    return store, port


def find_store(host: str, port: int, seconds: float) -> Store:
    """The store of rank 0, for a worker; waits for it."""
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=seconds), False)
    except RuntimeError as error:
        raise EngineError(
            f"No paclm answers at {host}:{port} ({_first_line(error)}). Start rank 0 first, or check the address."
        ) from None


def check_count(store: Store, workers: int) -> None:
    """Refuse to join a group of another size: the worlds would be cut otherwise."""
    found = int(store.get(_WORKERS))
    if found != workers:
        raise InvalidInput(f"Rank 0 was started with --workers {found}, and this worker with --workers {workers}.")


def break_if_unanswered(host: str, seconds: float) -> None:
    """Let connections of this process to a host break once the host has not answered for so long: it is gone.

    The other kernel answers, however busy, stopped or idle the process there is. torch has no setting for it.
    """
    probe = max(1, int(seconds / 3))
    options = {"TCP_KEEPIDLE": probe, "TCP_KEEPINTVL": probe, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": int(1000 * seconds)}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed since, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if _is_to(host, connection):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                        for option, value in options.items():
                            if hasattr(socket, option):
                                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _is_to(host: str, connection: socket.socket) -> bool:
    is_tcp = connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_tcp and _plain(connection.getpeername()[0]) == _plain(host)


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def join(store: Store, rank: int, host: str) -> Wire:
    """As a worker: take the next session of this rank and wait until rank 0 wants it."""
    try:
        session = store.add(f"sessions-{rank}", 1)
        store.wait([f"wanted-{rank}-{session}"], _FOREVER)
    except RuntimeError:
        raise EngineError(
            "Rank 0 has ended, or its host does not answer any more. Start it again, then its workers."
        ) from None
    return Wire(store, f"{rank}-{session}", True, host)


def accept(store: Store, rank: int, session: int, host: str) -> Wire:
    """As rank 0: connect to the worker of this rank that came as so manieth."""
    store.set(f"wanted-{rank}-{session}", "1")
    return Wire(store, f"{rank}-{session}", False, host)


def has_come(store: Store, rank: int, session: int) -> bool:
    """Whether so many workers of this rank have come."""
    return int(store.add(f"sessions-{rank}", 0)) >= session


def as_text(text: str) -> Array:
    """Text as an array."""
    return np.frombuffer(text.encode(), dtype=np.uint8)


def text_of(array: Array) -> str:
    """The text of an array."""
    return array.tobytes().decode(errors="replace")


def _limit(seconds: float | None) -> timedelta:
    return _FOREVER if seconds is None else timedelta(seconds=seconds)


def packed(kind: Order, number: int, arrays: Sequence[Array]) -> Tensor:
    """A message as bytes; every array begins at a multiple of 8."""
    shapes: list[int] = []
    for array in arrays:
        shapes += [_DTYPES.index(array.dtype), array.ndim, *array.shape]
    size = 8 * (1 + len(shapes)) + sum(map(_padded_bytes, arrays))
    head = np.array([number, kind, size, len(arrays), len(shapes), *shapes], dtype=np.int64).view(np.uint8)
    data, at = np.empty(8 * _HEADER + size, dtype=np.uint8), len(head)
    data[:at] = head
    for array in arrays:
        data[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += _padded_bytes(array)
    return torch.from_numpy(data)


def _padded_bytes(array: Array) -> int:
    return array.nbytes + -array.nbytes % 8


def _unpacked(body: np.ndarray[Any, np.dtype[np.uint8]], count: int) -> list[Array]:
    """The arrays of a message, which share its memory; every size is checked before it is used."""
    try:
        length = int(body[:8].view(np.int64)[0])
        shapes = body[8 : 8 + 8 * length].view(np.int64).tolist()
        arrays: list[Array] = []
        at, start = 0, 8 + 8 * length
        for _ in range(count):
            dtype, ndim = _DTYPES[shapes[at]], shapes[at + 1]
            shape = shapes[at + 2 : at + 2 + ndim]
            at += 2 + ndim
            if ndim < 0 or len(shape) != ndim or min(shape, default=0) < 0:
                raise ValueError
            end = start + dtype.itemsize * math.prod(shape)
            arrays.append(body[start:end].view(dtype).reshape(shape))
            start += _padded_bytes(arrays[-1])
        if start != len(body) or at != len(shapes):
            raise ValueError
    except (ValueError, IndexError, TypeError):
        raise WireBroken("It sent what is no message of paclm.") from None
    return arrays


def _first_line(error: Exception) -> str:
    """Of an error of torch, without the address of its source."""
    line = str(error).partition("\n")[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0].strip() or type(error).__name__
