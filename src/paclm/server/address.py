"""Where the server of a workspace listens: its socket, and a note in the curator's folder for other commands.

The note counts only while its writer holds a lock on it, which the operating system drops when the writer dies: a stale
or copied note is ignored. Only messages depend on it. Imports nothing slow: a port in use is reported immediately.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paclm.errors import ServiceError
from paclm.server.database import name_of, service_address, service_path

_URL = re.compile(r"http://(\[[0-9a-fA-F:.%]+\]|[0-9A-Za-z.-]+):[0-9]{1,5}")
_MAX_BYTES = 4096
_BACKLOG = 512
_OTHER_FILES = 128
"""Ledger, witness, service database, models, and a margin."""
_WAYS_TO_LISTEN = {
    errno.EADDRINUSE: "Stop the program that listens there, or choose another port with --port.",
    errno.EADDRNOTAVAIL: "This machine does not have that address: use 127.0.0.1, or 0.0.0.0 for all interfaces.",
    errno.EACCES: "Ports below 1024 need root: choose another with --port.",
}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server."""

    url: str
    process: int
    service: str
    """Which keys and replies it has open (`identity`)."""


def note_path(workspace: Path) -> Path:
    """Path of the note."""
    return service_path(workspace).with_name("server.address")


def identity(service: Path | str) -> str:
    """Device and inode of a file, the same under any name; of a database, host and name. Empty: there is no file."""
    if isinstance(service, str):
        return name_of(service)
    try:
        found = service.stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


@contextmanager
def noted(workspace: Path, url: str, service: Path | str | None = None) -> Iterator[None]:
    """Keep the note while the block runs. For the server that holds the curator's lock.

    `service`: where it keeps keys and replies, if not where a workspace does.
    """
    path = note_path(workspace)
    note = RunningServer(url, os.getpid(), identity(service or service_address(workspace)))
    try:
        descriptor = _write(path, json.dumps(asdict(note)).encode())
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be written ({error.strerror}). The folder must be writable, on a disk with room."
        ) from None
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):  # else of a server that took over
                path.unlink()
        os.close(descriptor)


def _write(path: Path, content: bytes) -> int:
    """Write a file that is complete and locked when it appears; returns the descriptor that holds the lock."""
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
    """The running server, or None."""
    try:
        descriptor = os.open(note_path(workspace), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _parse(os.read(descriptor, _MAX_BYTES))
            return found if found is not None and _is_alive(found.process) else None
        return None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _parse(content: bytes) -> RunningServer | None:
    try:
        note = json.loads(content)
        url, process, service = str(note["url"]), int(note["process"]), str(note["service"])
        return RunningServer(url, process, service) if _URL.fullmatch(url) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _is_alive(process: int) -> bool:
    """A child that outlives a killed server keeps its lock but does not serve."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's, and alive
        return True
    return process > 0


def listen(bound: socket.socket) -> None:
    """Open the port: connections wait from now on until they are accepted."""
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _refusal(host, port, error) from None


def check_free(host: str, port: int) -> None:
    """Raise what `bind` would; another process may still take the port before `bind` does."""
    bind(host, port).close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the port and does not listen yet: connections are refused until it does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServiceError(
            f"Cannot resolve the host {host} ({error.strerror}). Use --host 127.0.0.1 for this machine only, or "
            "0.0.0.0 for all interfaces."
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(host, port, error) from None
    return bound


def _refusal(host: str, port: int, error: OSError) -> ServiceError:
    way_out = _WAYS_TO_LISTEN.get(error.errno or 0, "Choose others with --host and --port.")
    return ServiceError(f"Cannot bind {host}:{port}: {error.strerror}. {way_out}")


def allow_files(connections: int) -> None:
    """Raise the limit on open files so that these connections leave enough for the ledger, or refuse to start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ServiceError(
            f"This process may open {hard:,} files, and max_connections = {connections:,} in [server] needs "
            f"{needed:,}. Raise the limit (ulimit -n), or lower max_connections."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
