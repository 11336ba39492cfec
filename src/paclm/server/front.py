"""The front process: HTTP, API keys, JSON and events. Started by `paclm serve`; never holds secret, belief or keys.

    python -m paclm.server.front LINK LISTENING BASE_FOLDER

LINK and LISTENING are inherited sockets. It prepares itself while the curator loads its models, waits for `hello`, and
serves until it is told to stop or the curator is gone.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm.config import ServerConfig
from paclm.curator.redacted import hide_memory
from paclm.curator.streams import Tokenizer
from paclm.engine.base_model import load_tokenizer
from paclm.server import telemetry
from paclm.server.api_keys import KeyStore
from paclm.server.app import create_app
from paclm.server.corpus import CorpusClient, CorpusService
from paclm.server.curator_client import CuratorClient
from paclm.server.database import Database, open_database, service_path
from paclm.server.idempotency import Keep, Replies
from paclm.server.messages import BrokenLink, Link, Setup
from paclm.server.plain import PlainClient
from paclm.server.service import HalfService, Service
from paclm.server.student import StudentService
from paclm.server.web_server import web_server
from paclm.worlds.fingerprints import Base

if TYPE_CHECKING:
    from paclm.server.otel import Otel


def main(link: int, listening: int, base_folder: str) -> None:
    """Serve until the end; errors are logged as everything is."""
    hide_memory()  # prompts and API keys
    telemetry.install()
    end, port = socket.socket(fileno=link), socket.socket(fileno=listening)
    sys.modules["torch"] = None  # type: ignore[assignment]  # not needed here: importing it fails
    tokenizer = load_tokenizer(Base(base_folder, Path(base_folder), fingerprint=""))
    try:
        hello: dict[str, Any] = next(Link(end).receive(wait=True))[1]
    except BrokenLink:  # the curator did not come up, and says why
        return
    gc.freeze()  # collections need not walk over the modules
    setup = Setup(**{**hello["setup"], "settings": ServerConfig(**hello["setup"]["settings"])})
    with _service_database(hello) as database, _otel(setup) as otel:
        replies = Replies(database, Keep(seconds=setup.settings.keep_replies_seconds))
        service = service_for(hello, end, setup, tokenizer, KeyStore(database), replies)
        service.otel = otel
        web_server(create_app(service), service, setup.settings).run(sockets=[port])


def _service_database(hello: Mapping[str, Any]) -> Database:
    """The workspace's file, or the tables in PostgreSQL with the login and the permit that the curator handed over."""
    if hello.get("front_url") is None:
        return open_database(service_path(Path(hello["workspace"])))
    return open_database(hello["front_url"], hello["permit"], is_front=True)


@contextmanager
def _otel(setup: Setup) -> Iterator[Otel | None]:
    if not setup.settings.otel:
        yield None
        return
    from paclm.server.otel import open_otel

    otel = open_otel(setup.model_id, setup.settings.host)
    try:
        yield otel
    finally:
        otel.close()


def service_for(
    hello: Mapping[str, Any], end: socket.socket, setup: Setup, tokenizer: Tokenizer, keys: KeyStore, replies: Replies
) -> Service:
    """The service of the promise, or of the student, that the curator serves."""
    if hello["promise"] == "corpus":
        return CorpusService(end, CorpusClient(hello), setup, tokenizer, keys, replies)
    if hello["promise"] == "student":
        return StudentService(end, PlainClient(hello), setup, tokenizer, keys, replies)
    return HalfService(end, CuratorClient(hello), setup, tokenizer, keys, replies)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
