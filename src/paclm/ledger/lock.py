"""One secret, one writer, one belief: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from paclm.errors import LedgerBusy, LedgerUnwritable


class WriterLock:
    """Held from construction to `release`. A lock file left behind by a dead process holds nothing."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnwritable(
                f"The lock {path} cannot be opened ({error.strerror}). The ledger's folder must be there and writable."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise LedgerBusy(
                f"{path.parent} is in use by process {holder}. One secret has one writer: two would each release "
                "against a belief that misses the other's tokens. Stop that process, or send requests to it."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(f"{path} cannot be locked ({error.strerror}). Keep it on a local disk.") from None
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next writer in; the file stays, because removing it would race with the next holder."""
        os.close(self._descriptor)
