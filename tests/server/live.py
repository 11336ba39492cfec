"""A real server in two threads of the test process: real HTTP, real ledger, votes by a fixed rule by default."""

import socket
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from curator.deployments import without_notes
from paclm import Curator
from paclm.config import RuntimeConfig, ServerConfig
from paclm.curator.dp_decoder import DpDecoder
from paclm.curator.plain_decoder import PlainDecoder
from paclm.curator.student_decoder import StudentDecoder
from paclm.errors import PaclmError
from paclm.server.address import bind
from paclm.server.api_keys import KeyStore
from paclm.server.app import create_app
from paclm.server.database import open_database, service_address, service_path
from paclm.server.front import service_for
from paclm.server.idempotency import Replies
from paclm.server.messages import Link, Ready, Setup
from paclm.server.scheduler import Scheduler
from paclm.server.service import Service
from paclm.server.web_server import web_server
from paclm.worlds.student_folder import make_state_folder
from server.stepped import wait_until

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('no ' + m.content) }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class CountingScheduler(Scheduler):
    num_read = 0

    def _handle(self, message):
        self.num_read += not isinstance(message, Ready)
        super()._handle(message)


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
    curator: Curator | PlainDecoder
    """Runs in a thread of its own, with the same messages as between two processes."""
    scheduler: CountingScheduler

    @property
    def num_calls(self):
        """Calls that the front has made and the curator has not read: they wait for the end of the current step."""
        return self.service.curator._next_call - self.scheduler.num_read

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

    Options: `settings`, `is_loopback`, `unit`, `quota` (of the ward's key), `has_ward` (an ordinary key), `admin_name`,
    `promise`, `mix_promises`.
    """
    promise, is_mixed = options.pop("promise", "half"), options.pop("mix_promises", False)
    decoder, notes = (DpDecoder, own_notes(workspace)) if promise == "corpus" else (Curator, without_notes())
    with notes:
        opened = decoder.open(workspace, engine=engine, tokenizer=tokenizer, mix_promises=is_mixed)
    with run_live(opened, service_address(workspace.path), asdict(workspace.runtime), tokenizer, options) as live:
        yield live


@contextmanager
def serve_student(student, base, tokenizer, **options):
    """Serve a student until the block ends; keys and replies beside its folder."""
    with own_notes(student):
        opened = StudentDecoder.open(student, base, tokenizer=tokenizer)
        home = make_state_folder(student)
    options = {"unit": student.unit, **options}
    with run_live(opened, service_path(home), asdict(RuntimeConfig()), tokenizer, options) as live:
        yield live


@contextmanager
def run_live(opened, service, runtime, tokenizer, options):
    settings = options.pop("settings", ServerConfig(forced_choice=True))
    quota = options.pop("quota", None)
    admin_name = options.pop("admin_name", "admin")
    has_ward = options.pop("has_ward", True)
    own, its = socket.socketpair()
    with (
        opened as curator,
        own,
        open_database(service) as database,
        bind("127.0.0.1", 0) as port,
    ):
        keys, replies = KeyStore(database), Replies(database)
        keys.recover()
        replies.recover()
        names = {key.name for key in keys.list()}
        admin = keys.add(admin_name, admin=True)
        ward = admin if "ward" in names or not has_ward else keys.add("ward", quota_tokens=quota)
        scheduler = CountingScheduler(curator, Link(own), settings.max_waiting)
        scheduler.hello()
        hello = next(Link(its).receive(wait=True))[1]
        setup = Setup(model_id="clinic", settings=settings, runtime=runtime, **options)
        service = service_for(hello, its, setup, tokenizer or curator.tokenizer, keys, replies)
        server = web_server(create_app(service), service, settings)
        threads = [
            threading.Thread(target=server.run, kwargs={"sockets": [port]}),
            threading.Thread(target=_step, args=(scheduler,)),
        ]
        for thread in threads:
            thread.start()
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        wait_until(lambda: server.started or not threads[0].is_alive())
        try:
            with httpx.Client(base_url=url, headers=bearer(ward), timeout=60) as http:
                yield Live(url, service, keys, admin, ward, http, server, curator, scheduler)
        finally:
            service.drain()  # as a signal does
            server.should_exit = True
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()


def own_notes(workspace):
    """The folder of notes beside the workspace: under `corpus` one is needed."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PACLM_STATE_DIR", str(workspace.path.parent / "notes"))
    return closing(SimpleNamespace(close=patch.undo))


def _step(scheduler):
    with suppress(PaclmError, RuntimeError, GeneratorExit):  # tests let steps fail
        scheduler.run()


def ledger_rows(path):
    """Private tokens that the ledger of a workspace knows of; a file must be closed."""
    from paclm.ledger.verify import verify
    from paclm.worlds.settings import ledger_address

    report = verify(ledger_address(path))
    assert report.intact, report.problem
    assert report.contents is not None
    return report.contents.state.tokens


def bytes_on_disk(path):
    """All bytes of the folder of this file: the file and what SQLite keeps beside it."""
    return b"".join(file.read_bytes() for file in path.parent.iterdir())
