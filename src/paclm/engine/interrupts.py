"""Ctrl-C that waits for the end of a step, so that what is done can be kept whole.

Python raises KeyboardInterrupt between any two instructions: in the middle of a step half of the numbers are moved, and
nobody can tell which. This file knows neither steps nor what is kept.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class HeldInterrupt:
    """While it is entered, the first Ctrl-C is noted and waits for `release`; the second ends the program at once.

    Only in the main thread, which alone gets signals, and only where Ctrl-C would raise KeyboardInterrupt: a program
    with a handler of its own keeps it.
    """

    def __init__(self) -> None:
        self.came = False
        self._holds = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._holds = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._holds:
            self._holds = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.release()

    def release(self) -> None:
        """Raise the Ctrl-C that came meanwhile, if one did."""
        if self.came:
            self.came = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
