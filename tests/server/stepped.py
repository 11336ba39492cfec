"""An engine that steps only when a test lets it, and clients that ask while it stands still."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from curator.deployments import ScriptedEngine

LONG = {"model": "clinic", "prompt": "the", "max_tokens": 40, "temperature": 0}


class SteppedEngine(ScriptedEngine):
    """Steps only when the test lets it.

    A step that begins has its batch: who comes while the engine stands in it waits for its end, for certain.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.orders = []
        self.fails = False
        self._gate = threading.Condition()
        self._is_free = False
        self._num_begun = self._num_allowed = 0

    def collect(self):
        if not any(handle in self.sequences for handle, *_ in self.launched):
            return super().collect()  # nobody waits for this step any more
        with self._gate:
            self._num_begun += 1
            self._gate.notify_all()
            self._gate.wait_for(lambda: self._is_free or self._num_begun <= self._num_allowed)
        if self.fails:
            raise RuntimeError("ZEBRA in an error")
        self.orders.append([handle for handle, *_ in self.launched])
        return super().collect()

    def let(self, steps):
        with self._gate:
            self._num_allowed += steps
            self._gate.notify_all()

    @property
    def stands(self):
        """Whether a step has begun and waits to be let."""
        return self._num_begun > self._num_allowed

    def wait_until_it_stands(self):
        """All that it was let do is done, and the next step has begun; there must be somebody to step for."""
        with self._gate:
            assert self._gate.wait_for(lambda: self.stands, 60), "waited in vain"

    def run_free(self):
        with self._gate:
            self._is_free = True
            self._gate.notify_all()

    def stand_still(self):
        """Stop before the next step; nothing may be under way."""
        with self._gate:
            self._is_free = False
            self._num_allowed = self._num_begun


def wait_until(is_so, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@contextmanager
def asking(engine):
    """Clients that ask at the same time; whatever happens, none is left waiting for an engine that stands still."""
    with ThreadPoolExecutor(16) as pool:
        try:
            yield pool
        finally:
            engine.run_free()


def num_known(live):
    """Answers that run or wait, and calls of others that have just reached the stepping thread.

    Another thread may come between the two looks: what moves from the calls to the seats is missed, not counted twice.
    """
    return len(live.scheduler._streams) + live.num_calls


@contextmanager
def sent(live, **more):
    """A request for `LONG` whose client leaves at the end of the block; `more` are headers."""
    request = live.http.build_request("POST", "/v1/completions", json=LONG, headers=more)
    head = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items()), "", ""]
    with socket.create_connection((request.url.host, request.url.port or 0)) as client:
        client.sendall("\r\n".join(head).encode() + request.content)
        yield
