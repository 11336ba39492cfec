"""One secret, one writer, one belief: a lock that the operating system drops when its holder dies, however it dies.

The lock's file also remembers the newest row, so that a ledger whose side files were removed after a kill is noticed.
It is not signed: it helps against accidents, a witness against people.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from paclm.errors import LedgerBusy, LedgerUnwritable
from paclm.ledger.chain import Head

_HOLDER_BYTES = 12
"""The holder's process id and a newline; the newest row stands behind it."""
_HEAD = re.compile(rb" *([0-9]+) ([0-9a-f]{64})\n")


class WriterLock:
    """Held from construction to `release`. A lock file left behind by a dead process holds nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerUnwritable(
                f"The lock {path} cannot be opened ({error.strerror}). The ledger's folder must be there and writable."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, _HOLDER_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise LedgerBusy(
                f"{path.parent} is in use by process {holder}. One secret has one writer: two would each release "
                "against a belief that misses the other's tokens. Stop that process, or send requests to it."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(f"{path} cannot be locked ({error.strerror}). Keep it on a local disk.") from None
        try:
            self.remembered = _parse_head(os.pread(self._descriptor, 256, _HOLDER_BYTES))
            """The newest row when the ledger was last in use here; None where nobody noted it."""
            os.fchmod(self._descriptor, 0o600)
            self._write(f"{os.getpid():<{_HOLDER_BYTES - 1}}\n", 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def remember(self, head: Head) -> None:
        """Note the newest row, which is on the disk. Not synced: this is about what a kill leaves."""
        self._write(f"{head.seq:>20} {head.digest.hex()}\n", _HOLDER_BYTES)
        self.remembered = head

    def forget(self) -> None:
        """The ledger that the file remembers is gone, and another one begins."""
        os.ftruncate(self._descriptor, _HOLDER_BYTES)
        self.remembered = None

    def _write(self, text: str, at: int) -> None:
        try:
            written = os.pwrite(self._descriptor, text.encode(), at)
        except OSError as error:
            raise LedgerUnwritable(f"{self._path} cannot be written ({error.strerror}). Mend the disk.") from None
        if written != len(text):
            raise LedgerUnwritable(f"{self._path} took {written} of {len(text)} bytes. Make room on the disk.")

    def release(self) -> None:
        """Let the next writer in; the file stays, because removing it would race with the next holder."""
        os.close(self._descriptor)


def read_remembered(path: Path) -> Head | None:
    """The newest row that a lock's file remembers, for readers: takes no lock, and works while another holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        seen: bytes | None = None
        while (noted := os.pread(descriptor, 256, _HOLDER_BYTES)) != seen:  # a writer may be noting the next row
            seen = noted
        return _parse_head(noted)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse_head(noted: bytes) -> Head | None:
    found = _HEAD.fullmatch(noted)
    return None if found is None else Head(int(found[1]), bytes.fromhex(found[2].decode()))
