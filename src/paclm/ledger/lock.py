"""One secret, one writer: a lock that the operating system releases when its holder dies, however it dies.

The file begins with the holder's process id; behind it the store notes the newest row.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from paclm.errors import LedgerBusy, LedgerUnwritable

HOLDER_BYTES = 12
"""The holder's process id and a newline."""
_HELD_HERE: set[tuple[int, int]] = set()
"""Locks that this process holds, by device and inode: a process in another container can have the same number."""


class WriterLock:
    """Held from construction to `release`. A lock file left behind by a dead process holds nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise LedgerUnwritable(
                f"The lock {path} cannot be opened ({error.strerror}). The ledger's folder must exist and be writable."
            ) from None
        try:
            self._take()
        except BaseException:
            os.close(self.descriptor)
            raise
        _HELD_HERE.add(self._identity)

    def _take(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._identity = _identity(self.descriptor)  # kept: a release must not depend on fstat
            os.fchmod(self.descriptor, 0o600)
            os.pwrite(self.descriptor, f"{os.getpid():<{HOLDER_BYTES - 1}}\n".encode(), 0)
        except BlockingIOError:
            raise self._refusal() from None
        except OSError as error:
            raise LedgerUnwritable(
                f"{self.path} cannot be locked ({error.strerror}). Keep it on a local disk that has room."
            ) from None

    def _refusal(self) -> LedgerBusy:
        holder = os.pread(self.descriptor, HOLDER_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
        has_own_number = holder == str(os.getpid())  # a fork has the set, and another number
        where, what_to_do = f"in use by process {holder}", "Stop that process, or send requests to it."
        if has_own_number and _identity(self.descriptor) in _HELD_HERE:
            where, what_to_do = "open already in this process", "close() the other curator, or open it in a `with`."
        return LedgerBusy(
            f"{self.path.parent} is {where}. One secret has one writer: two would each release against a belief that "
            f"lacks the other's tokens. {what_to_do}"
        )

    def release(self) -> None:
        """Release the lock. The file stays, because removing it would race with the next holder."""
        _HELD_HERE.discard(self._identity)
        os.close(self.descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
