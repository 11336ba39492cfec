"""From a workspace to a listening process, and to its end: one process, one secret, one event loop.

The socket is taken before the models are loaded, so that a port in use is known at once.
"""

from __future__ import annotations

import ipaddress
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from paclm.config import ServerConfig, in_shell
from paclm.curator.curator import Curator
from paclm.curator.preflight import budgets_of
from paclm.curator.redacted import disable_core_dumps
from paclm.errors import ServiceError
from paclm.server import address, logs
from paclm.server.api_keys import KeyStore
from paclm.server.app import create_app
from paclm.server.connections import allow_files, limited
from paclm.server.database import Database, service_path
from paclm.server.idempotency import Keep, Replies
from paclm.server.listening import listen
from paclm.server.service import Service, Setup
from paclm.worlds.layout import MANIFEST_FILE
from paclm.worlds.workspace import Workspace

ADMIN = "admin"
_LAST_WORDS_SECONDS = 3
"""For sending what has been made, once every answer is complete or cut off; then uvicorn ends the connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What to say when it listens."""

    url: str
    service: Service
    new_admin_key: str | None
    """Made because there was no key at all; this is the only time it is shown."""


class _Uvicorn(uvicorn.Server):
    """Takes no new requests from the moment it is told to stop, and says so (`/health`) while answers are under way."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        service.on_failure = self._stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop."""
        self._service.drain()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Whether to end. uvicorn closes the port when it ends, so answers under way are waited for here."""
        is_told = await super().on_tick(counter)
        return is_told and (self.force_exit or self._service.is_idle)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike the original, does not raise the signal again afterwards: the process still has things to close."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        stopping = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means to outlive the terminal
            stopping.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in stopping}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self.should_exit = True


def serve(path: Path, settings: ServerConfig, announce: Callable[[Started], None], witness: Path | None = None) -> None:
    """Serve a workspace until a signal ends it; `announce` is called once it listens."""
    workspace = Workspace.open(path)
    budgets_of(workspace)  # the quick refusals come before the slow work
    allow_files(settings.max_connections)
    disable_core_dumps()
    is_loopback = is_loopback_address(settings.host)
    with listen(settings.host, settings.port) as listening, Database.open(service_path(workspace.path)) as database:
        keys = KeyStore(database)
        if not is_loopback and not keys.has_keys():
            raise ServiceError(
                f"{settings.host} can be reached from other machines, and there is no API key yet. Make one first: "
                f"paclm keys add {in_shell(path)} NAME. Or listen on 127.0.0.1."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the announcement says them as sentences
            curator = Curator.open(workspace, witness=witness)
        with curator:
            keys.recover()
            replies = Replies(database, Keep(seconds=settings.keep_replies_seconds))
            replies.recover()
            admin_key = None if keys.list() else keys.add(ADMIN, admin=True)
            service = Service(curator, _setup(workspace, settings, is_loopback), keys, replies)
            started = Started(url=_url(listening), service=service, new_admin_key=admin_key)
            with address.noted(workspace.path, started.url):
                _run(service, listening, settings, started, announce)
    if service.has_failed:
        raise ServiceError(
            "A step failed, and nothing more left after it. What was charged is in the ledger: start the server again."
        )


def _run(
    service: Service,
    listening: socket.socket,
    settings: ServerConfig,
    started: Started,
    announce: Callable[[Started], None],
) -> None:
    server = web_server(service, settings)
    announce(started)
    logs.install()
    server.run(sockets=[listening])


def web_server(service: Service, settings: ServerConfig) -> uvicorn.Server:
    """uvicorn over the service, with everything off that would log or believe what clients say."""
    config = uvicorn.Config(
        create_app(service),
        loop="asyncio",
        http=limited(settings.max_connections, settings.read_seconds),
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
    )
    return _Uvicorn(config, service)


def _setup(workspace: Workspace, settings: ServerConfig, is_loopback: bool) -> Setup:
    return Setup(
        model_id=settings.model_id or workspace.path.name,
        settings=settings,
        runtime=workspace.runtime,
        is_loopback=is_loopback,
        unit=workspace.manifest.unit,
        created=int((workspace.path / MANIFEST_FILE).stat().st_mtime),
    )


def is_loopback_address(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
