"""Serve a workspace: one process, one secret, one event loop.

The socket is bound before the models are loaded, so that a port in use is reported immediately.
"""

from __future__ import annotations

import ipaddress
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paclm.config import ServerConfig, in_shell
from paclm.curator.curator import Curator
from paclm.curator.preflight import budgets_of
from paclm.curator.redacted import disable_core_dumps
from paclm.errors import ServiceError
from paclm.server import address, telemetry
from paclm.server.api_keys import Database, KeyStore, service_path
from paclm.server.app import create_app
from paclm.server.idempotency import Keep, Replies
from paclm.server.service import Service, Setup
from paclm.server.web_server import allow_files, web_server
from paclm.worlds.layout import MANIFEST_FILE
from paclm.worlds.workspace import Workspace

ADMIN = "admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What to announce when it listens."""

    url: str
    service: Service
    new_admin_key: str | None
    """Made because there was no key yet; shown this once."""


def serve(path: Path, settings: ServerConfig, announce: Callable[[Started], None], witness: Path | None = None) -> None:
    """Serve a workspace until a signal ends it; `announce` is called once it listens."""
    workspace = Workspace.open(path)
    budgets_of(workspace)  # fail fast
    allow_files(settings.max_connections)
    disable_core_dumps()
    is_loopback = is_loopback_address(settings.host)
    with (
        address.listen(settings.host, settings.port) as listening,
        Database.open(service_path(workspace.path)) as database,
    ):
        keys = KeyStore(database)
        if not is_loopback and not keys.has_keys():
            raise ServiceError(
                f"{settings.host} can be reached from other machines, but there is no API key yet. Make one first: "
                f"paclm keys add {in_shell(path)} NAME. Or listen on 127.0.0.1."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # announced instead
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
            "A step failed and the server stopped. The ledger holds what was charged: start the server again."
        )


def _run(
    service: Service,
    listening: socket.socket,
    settings: ServerConfig,
    started: Started,
    announce: Callable[[Started], None],
) -> None:
    server = web_server(create_app(service), service, settings)
    announce(started)
    telemetry.install()
    server.run(sockets=[listening])


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
