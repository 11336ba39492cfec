"""One call at a time, and none inside another. Knows nothing of what the calls do.

A lock keeps other threads out. It does not keep out the thread that holds it: a signal handler, or a finalizer that the
garbage collector runs, can call in the middle of a call. What must not happen there is refused or put off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paclm.errors import CuratorError


class Turns:
    """Whose turn it is, and what was put off until the turn is over."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_taken = False  # read and written by the holder of the lock only
        self._later: deque[Callable[[], None]] = deque()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for other threads; refuse the thread that is inside already."""
        try:
            with self._lock:
                if self._is_taken:
                    raise CuratorError(
                        "The curator is in the middle of a step and was called from inside it, by a signal handler or "
                        "a finalizer. Call again when the step has returned."
                    )
                try:
                    self._is_taken = True
                    yield
                finally:
                    self._is_taken = False
        finally:
            self._catch_up(may_wait=False)

    def when_free(self, work: Callable[[], None], *, may_wait: bool = True) -> None:
        """Do it now, or at the end of the call in whose middle this thread is.

        may_wait=False: while another thread has its turn, leave the work to that thread. Finalizers need this: they
        run wherever the garbage collector does, with any other lock held.
        """
        self._later.append(work)
        self._catch_up(may_wait)

    def _catch_up(self, may_wait: bool) -> None:
        while self._later and self._lock.acquire(blocking=may_wait):
            try:
                if self._is_taken:
                    return
                self._do_next()
            finally:
                self._lock.release()

    def _do_next(self) -> None:
        if not self._later:
            return
        try:
            self._is_taken = True
            self._later[0]()
        finally:
            self._later.popleft()  # afterwards: nobody who waits for it may find the queue empty before it is done
            self._is_taken = False
