"""A proxy before a server that loses the answer to the first request: what a dropped connection or a timeout does."""

from __future__ import annotations

import socket
import threading
from typing import Self

_CHUNK = 65_536


class LosingProxy:
    """Forwards connections to a port of this machine; what comes back for the first POST is read and thrown away."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self._loses: socket.socket | None = None
        self._sockets: list[socket.socket] = [self._door]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(_CHUNK):
                if self._loses is None and piece.startswith(b"POST"):
                    self._loses = source
                if target is not self._loses:
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # either side is gone
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            one.close()
