"""One call at a time into a decoder, also where signal handlers and finalizers call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paclm.errors import CuratorError


class CallGuard:
    """One call at a time, and none inside another. Knows nothing of what the calls do.

    A lock keeps other threads out but not the thread that holds it: a signal handler or a finalizer can call in the
    middle of a call. Such calls are refused (`exclusive`) or deferred (`when_free`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_inside = False  # read and written by the holder of the lock only
        self._deferred: deque[Callable[[], None]] = deque()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait for other threads; refuse a call from inside another call of the same thread."""
        try:
            with self._lock:
                if self._is_inside:
                    raise CuratorError(
                        "The decoder was called from inside one of its own steps, by a signal handler or a finalizer. "
                        "Call again when the step has returned."
                    )
                try:
                    self._is_inside = True
                    yield
                finally:
                    self._is_inside = False
        finally:
            self._run_deferred(may_wait=False)

    def when_free(self, work: Callable[[], None], *, may_wait: bool = True) -> None:
        """Do it now, or at the end of the call that this thread is inside of.

        may_wait=False leaves the work to another thread that is inside a call. Finalizers need this: the garbage
        collector runs them anywhere, with any other lock held.
        """
        self._deferred.append(work)
        self._run_deferred(may_wait)

    def _run_deferred(self, may_wait: bool) -> None:
        while self._deferred and self._lock.acquire(blocking=may_wait):
            try:
                if self._is_inside:
                    return
                self._run_one()
            finally:
                self._lock.release()

    def _run_one(self) -> None:
        if not self._deferred:
            return
        try:
            self._is_inside = True
            self._deferred[0]()
        finally:
            self._deferred.popleft()  # only now: a thread that finds the queue empty must find the work done
            self._is_inside = False
