"""Where the server of a workspace listens: a note in the curator's folder, for commands that name its address.

The note counts only while its writer holds a lock on it, which the operating system drops when the writer dies, however
it dies: a note that was left behind or copied says nothing. Nothing depends on it but what people are told.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from paclm.errors import ServiceError
from paclm.server.database import service_path

_URL = re.compile(r"http://(\[[0-9a-fA-F:.%]+\]|[0-9A-Za-z.-]+):[0-9]{1,5}")
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that runs now."""

    url: str
    process: int
    service_file: tuple[int, int]
    """Device and inode of the file of keys and replies that it has open."""


def note_path(workspace: Path) -> Path:
    """Where the note is, if there is one."""
    return service_path(workspace).with_name("server.address")


def identity(path: Path) -> tuple[int, int]:
    """Which file this is, whatever its name is later."""
    found = path.stat()
    return found.st_dev, found.st_ino


@contextmanager
def noted(workspace: Path, url: str) -> Iterator[None]:
    """Note the address while the block runs. For the one server that holds the curator's lock."""
    path = note_path(workspace)
    note = RunningServer(url, os.getpid(), identity(service_path(workspace)))
    try:
        descriptor = _write(path, json.dumps(asdict(note)).encode())
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be written ({error.strerror}). The folder must be writable, on a disk with room."
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _write(path: Path, content: bytes) -> int:
    """A file that is complete and locked from the moment it has its name; returns what holds the lock."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, content)
        os.replace(part, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def running_server(workspace: Path) -> RunningServer | None:
    """The server that runs now; None where none does, or none has said so."""
    try:
        descriptor = os.open(note_path(workspace), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _parse(os.read(descriptor, _MOST_BYTES))
            return found if found is not None and _is_alive(found.process) else None
        return None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse(content: bytes) -> RunningServer | None:
    try:
        note = json.loads(content)
        url, process, (device, inode) = str(note["url"]), int(note["process"]), note["service_file"]
        return RunningServer(url, process, (int(device), int(inode))) if _URL.fullmatch(url) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _is_alive(process: int) -> bool:
    """A child that outlives a killed server keeps its lock, and serves nobody."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's, and alive
        return True
    return process > 0
