"""The front as a child of the curator process: it inherits the port and one end of a link, and no private value."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from paclm.curator.custody import WITNESS_VARIABLE
from paclm.curator.master_key import KEY_VARIABLES
from paclm.errors import ServiceError
from paclm.server.database import service_path
from paclm.server.messages import Link
from paclm.worlds.fingerprints import Base
from paclm.worlds.settings import ADDRESS_VARIABLES

_LOGIN_VARIABLES = ("PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE")
"""Where libpq finds the owner's password."""
_END_SECONDS = 20.0
"""For a front to finish its accounting after the curator has stopped; a client that does not read delays it."""


class Front(NamedTuple):
    """The front process."""

    process: subprocess.Popen[bytes]
    link: Link
    lock: int
    """A file that both have open: locked, it stays so until the last of them has ended."""


@contextmanager
def start_front(port: socket.socket, home: Path, base: Base) -> Iterator[Front]:
    """Start the front; at the end close the link, which ends it, and wait until it has finished its accounting."""
    own, its = socket.socketpair()
    lock = os.open(service_path(home).with_name("front.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    sockets = its.fileno(), port.fileno()
    command = [sys.executable, "-P", "-m", "paclm.server.front", *map(str, sockets), str(base.folder)]
    private = {*KEY_VARIABLES, WITNESS_VARIABLE, *ADDRESS_VARIABLES, *_LOGIN_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in private}
    with own:
        with its:  # in a session of its own: Ctrl-C reaches this process alone, which passes it on
            process = subprocess.Popen(
                command, pass_fds=(*sockets, lock), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            yield Front(process, Link(own), lock)
        except BaseException:
            process.terminate()
            raise
        finally:
            own.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(lock)


def wait_for_old_front(front: Front) -> None:
    """After a kill the front of that server still writes to the service database. Call it with the ledger's lock."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        try:
            fcntl.flock(front.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ServiceError(
                    "The front of an earlier server of this workspace has not ended. Stop that process (it runs "
                    "paclm.server.front), and start again."
                ) from None
            time.sleep(0.05)
