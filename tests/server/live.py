"""A real server in a thread of the test process: real HTTP, real ledger, votes by a fixed rule by default."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from curator.deployments import without_notes
from paclm import Curator
from paclm.config import ServerConfig
from paclm.server.address import listen
from paclm.server.api_keys import Database, KeyStore, service_path
from paclm.server.app import create_app
from paclm.server.idempotency import Replies
from paclm.server.service import Service, Setup
from paclm.server.web_server import web_server

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('no ' + m.content) }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Live:
    """A running server, from outside and from inside."""

    url: str
    service: Service
    keys: KeyStore
    admin: str
    ward: str
    http: httpx.Client
    """Sends the ward's key unless told otherwise."""
    server: uvicorn.Server

    @property
    def curator(self):
        return self.service.curator

    @property
    def spent_tokens(self):
        return self.curator.account.tokens

    def complete(self, prompt="the patient", max_tokens=4, **more):
        headers = more.pop("headers", {})
        body = {"model": "clinic", "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def as_admin(self, path):
        return self.http.get(path, headers=bearer(self.admin)).json()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@contextmanager
def serve(workspace, engine, tokenizer, **options):
    """Serve until the block ends.

    Options: `settings`, `is_loopback`, `unit`, `quota` (of the ward's key), `has_ward` (an ordinary key), `admin_name`.
    """
    settings = options.pop("settings", ServerConfig())
    quota = options.pop("quota", None)
    admin_name = options.pop("admin_name", "admin")
    has_ward = options.pop("has_ward", True)
    with without_notes():
        opened = Curator.open(workspace, engine=engine, tokenizer=tokenizer)
    with (
        opened as curator,
        Database.open(service_path(workspace.path)) as database,
        listen("127.0.0.1", 0) as listening,
    ):
        keys, replies = KeyStore(database), Replies(database)
        keys.recover()
        replies.recover()
        names = {key.name for key in keys.list()}
        admin = keys.add(admin_name, admin=True)
        ward = admin if "ward" in names or not has_ward else keys.add("ward", quota_tokens=quota)
        setup = Setup(model_id="clinic", settings=settings, runtime=workspace.runtime, **options)
        service = Service(curator, setup, keys, replies)
        server = web_server(create_app(service), service, settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, headers=bearer(ward), timeout=60) as http:
                yield Live(url, service, keys, admin, ward, http, server)
        finally:
            service.drain()  # as a signal does
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive()


def ledger_rows(path):
    """Private tokens that a closed ledger knows of."""
    from paclm.ledger.verify import verify

    report = verify(path / "curator" / "ledger.sqlite")
    assert report.intact, report.problem
    assert report.contents is not None
    return report.contents.state.tokens


def bytes_on_disk(path):
    """All bytes of the folder of this file: the file and what SQLite keeps beside it."""
    return b"".join(file.read_bytes() for file in path.parent.iterdir())
