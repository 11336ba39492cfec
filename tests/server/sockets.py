"""Connections without an HTTP client, for requests that no client sends and for readers that no client is."""

import contextlib
import socket
import threading

from server.stepped import wait_until

_FITS = 30_000
"""Bytes that a connection takes though nobody reads them yet."""


def connect(live, **options):
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    return connection


def read_to_end(connection):
    """What comes until the other side ends the connection; waiting in vain is an error."""
    said = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            said += piece
    return bytes(said)


@contextlib.contextmanager
def standing_still(live):
    """The server looks at nothing during the block, and then finds all that was sent in it.

    Its patience begins when it looks: a test that is slow to send is not taken for a client that does not.
    """
    stands, may_go = threading.Event(), threading.Event()

    def stand():
        stands.set()
        may_go.wait(60)

    wait_until(lambda: live.server.started)
    live.service._housekeeping.get_loop().call_soon_threadsafe(stand)
    assert stands.wait(60)
    try:
        yield
    finally:
        may_go.set()


def ask(live, request):
    with standing_still(live):
        connection = connect(live)
        connection.sendall(request[:_FITS])
    with connection:
        with contextlib.suppress(ConnectionError):  # it need not read to the end
            connection.sendall(request[_FITS:])
        return read_to_end(connection)


def post_with_key(live):
    """The head of a good request for an answer, but for what says how long its body is."""
    lines = ["POST /v1/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    return "\r\n".join([*lines, f"authorization: Bearer {live.ward}", ""]).encode()
