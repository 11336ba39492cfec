"""A socket on an address, or a sentence that says why not. Imports nothing slow: a taken port is refused at once."""

from __future__ import annotations

import errno
import socket

from paclm.errors import ServiceError

_BACKLOG = 512
_WAYS_TO_LISTEN = {
    errno.EADDRINUSE: "Stop what listens there, or choose another with --port.",
    errno.EADDRNOTAVAIL: "This machine does not have that address: use --host 127.0.0.1, or 0.0.0.0 for all it has.",
    errno.EACCES: "Ports below 1024 are for the system: choose another with --port.",
}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    listening = _bind(host, port)
    try:
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _refusal(host, port, error) from None
    return listening


def check_free(host: str, port: int) -> None:
    """Refuse as `listen` would, without listening; somebody else may still be quicker before it does."""
    _bind(host, port).close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServiceError(
            f"The host {host} has no address here ({error.strerror}). Use --host 127.0.0.1 for this machine alone, "
            "0.0.0.0 for all who can reach it."
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
    return ServiceError(f"Port {port} of {host} cannot be had: {error.strerror}. {way_out}")
