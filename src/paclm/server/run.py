"""Serve a workspace, or a student, with two processes: this one, the curator, and the front that it starts.

    paclm serve ── bind the port ── start the front ── open ledger and models, warm up ── hello ── step until the end
                                        └ imports, tokenizer ── waits for hello ── listens, speaks HTTP

While another server holds a ledger in a database, this one waits before it opens anything, and the port stays closed.

The port is bound before the models are loaded, so that one in use is reported immediately, and opened when the first
request can be answered. The front is started by exec: it inherits the port and one end of a socket pair, and no memory
and no master key. Either process ends when the other has; then the ledger holds what was charged.
"""

from __future__ import annotations

import dataclasses
import gc
import ipaddress
import logging
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paclm.config import PromiseName, RuntimeConfig, ServerConfig, in_shell
from paclm.curator.curator import Curator
from paclm.curator.custody import check_fit, holding_of, named_witness
from paclm.curator.dp_decoder import DpDecoder, check_dp_adapter, load_dp_models
from paclm.curator.preflight import budgets_of, load_engine
from paclm.curator.redacted import hide_memory
from paclm.curator.student_decoder import StudentDecoder
from paclm.curator.vote_source import VoteSource
from paclm.engine.base_model import base_of
from paclm.errors import EngineError, LedgerError, ServiceError
from paclm.ledger.address import exists, refuse_if_fenced, take_hold
from paclm.ledger.dp_log import DpLog
from paclm.server import address, telemetry
from paclm.server.api_keys import KeyStore
from paclm.server.database import open_database, service_address, service_path
from paclm.server.front_process import Front, start_front, wait_for_old_front
from paclm.server.idempotency import Replies
from paclm.server.messages import BrokenLink, Link, Setup
from paclm.server.scheduler import Scheduler
from paclm.server.standby import check_take_over, open_when_free
from paclm.worlds.fingerprints import Base
from paclm.worlds.layout import MANIFEST_FILE, dp_log_path
from paclm.worlds.storage import only_one
from paclm.worlds.student_folder import StudentFolder, make_state_folder
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:
    from paclm.engine.workers import WorkerGroup, WorkerNews
    from paclm.server.postgres_front import Login

ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Started:
    """What to announce when it listens."""

    url: str
    curator: Curator | DpDecoder | StudentDecoder
    setup: Setup
    new_admin_key: str | None
    """Made because there was no key yet; shown this once."""
    front: int
    """Its process."""


def serve(
    path: Path,
    settings: ServerConfig,
    announce: Callable[[Started], None],
    progress: Callable[[int, int], None],
    witness: Path | str | None = None,
    *,
    promise: PromiseName = "half",
    mix_promises: bool = False,
    take_over: bool = False,
    announce_wait: Callable[[str], None] = lambda reason: None,
    workers: AbstractContextManager[WorkerGroup | None] | None = None,
) -> None:
    """Serve a workspace until a signal ends it; `announce` is called once it listens, `progress` while it warms up.

    Where another server holds a ledger in a database, it waits until that one is dead, and calls `announce_wait` once;
    or it takes over at once. Workers start once the ledger is held, or before it is taken over.
    """
    workspace = Workspace.open(path)
    if take_over:
        check_take_over(workspace)
    check_promise(workspace, promise)  # fail fast
    if settings.otel:
        from paclm.server.otel import check_environment

        check_environment()
    address.allow_files(settings.max_connections)
    hide_memory()
    setup = _setup(workspace, settings, promise)
    with address.bind(settings.host, settings.port) as port:
        _check_keys(service_address(workspace.path), path, setup)
        with (
            start_front(port, workspace.path, base_of(workspace)) as front,
            _ended_by_sigterm(),
            workers or nullcontext() as group,
        ):
            _check_front(workspace)
            check, engine = partial(_check_standby, workspace, promise, witness), None
            if take_over:  # a host that could not serve must not stop one that does
                check()
                engine = load_dp_models(workspace)[0] if promise == "corpus" else load_engine(workspace, group)
            opening = partial(_open, workspace, promise, witness, mix_promises, take_over, engine, group)
            curator = open_when_free(workspace, opening, announce_wait, check, take_over=take_over)
            state = ServerState(
                workspace.path, workspace.path, service_address(workspace.path), workspace.settings.ledger.front_url
            )
            _serve(curator, front, port, state, setup, announce, progress, group)


def serve_student(
    student: StudentFolder,
    base: Base,
    settings: ServerConfig,
    announce: Callable[[Started], None],
    progress: Callable[[int, int], None],
) -> None:
    """Serve a student until a signal ends it. Keys and replies are kept with the user, not in its folder."""
    address.allow_files(settings.max_connections)
    hide_memory()
    home = make_state_folder(student)
    setup = Setup(
        model_id=settings.model_id or student.path.name,
        settings=settings,
        runtime=dataclasses.asdict(RuntimeConfig()),
        is_loopback=is_loopback_address(settings.host),
        unit=student.unit,
        created=int(datetime.fromisoformat(student.created).timestamp()),
    )
    with address.bind(settings.host, settings.port) as port:
        _check_keys(service_path(home), student.path, setup)
        with start_front(port, home, base) as front, _ended_by_sigterm():
            decoder = StudentDecoder.open(student, base)
            _serve(
                decoder,
                front,
                port,
                ServerState(student.path, home, service_path(home)),
                setup,
                announce,
                progress,
                None,
            )


class ServerState(NamedTuple):
    """Where keys, quotas and replies are kept."""

    named: Path
    """The folder that is served, for messages."""
    home: Path
    """The folder of locks and of the note of where the server listens: the workspace, or a folder of the user."""
    address: Path | str
    front_url: str = ""
    """In a database: the login of the front, if it has one of its own."""


def _serve(
    curator: Curator | DpDecoder | StudentDecoder,
    front: Front,
    port: socket.socket,
    state: ServerState,
    setup: Setup,
    announce: Callable[[Started], None],
    progress: Callable[[int, int], None],
    workers: WorkerGroup | None,
) -> None:
    with curator, ExitStack() as local:
        is_local = isinstance(state.address, Path)  # else the epoch decides who serves
        if is_local:
            local.enter_context(only_one(_lock_path(state.home), f"A server of {state.named}"))
        curator.warm_up(progress)
        if is_local:
            wait_for_old_front(front)
        admin_key, login = _take_state(state, curator.epoch)
        address.listen(port)
        url = _url(port)
        port.close()
        started = Started(url, curator, setup, admin_key, front.process.pid)
        local.enter_context(address.noted(state.home, url, state.address))
        _run(front, started, announce, state, login, workers)


def check_promise(workspace: Workspace, promise: PromiseName) -> None:
    """Raise before anything slow if there is no budget, or no adapter, to serve under this promise."""
    if promise == "corpus":
        check_dp_adapter(workspace)
    else:
        budgets_of(workspace)


def _open(
    workspace: Workspace,
    promise: PromiseName,
    witness: Path | str | None,
    mix_promises: bool,
    take_over: bool,
    engine: VoteSource | None,
    workers: WorkerGroup | None,
) -> Curator | DpDecoder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # announced instead
        if promise == "corpus":
            return _open_corpus(workspace, mix_promises, take_over, engine)
        curator = Curator.open(
            workspace,
            engine=engine,
            witness=witness,
            mix_promises=mix_promises,
            take_over=take_over,
            workers=workers,
        )
    curator.usage()  # the first call reads the ledger's whole table: do it before any step waits for it
    return curator


def _check_standby(workspace: Workspace, promise: PromiseName, witness: Path | str | None) -> None:
    if promise == "half" and exists(workspace.ledger_address):
        check_fit(workspace, named_witness(witness))


def _check_front(workspace: Workspace) -> None:
    """Refuse a login of the front that will not do, before anything slow and before a server that works is stopped."""
    address = workspace.ledger_address
    if not isinstance(address, Path):
        from paclm.server.postgres_front import check_front

        check_front(address, workspace.settings.ledger.front_url)


def _open_corpus(workspace: Workspace, mix_promises: bool, take_over: bool, engine: VoteSource | None) -> DpDecoder:
    hold = take_hold(workspace.ledger_address, holding_of(workspace, take_over=take_over))
    try:
        return DpDecoder.open(workspace, mix_promises=mix_promises, engine=engine, hold=hold)
    except BaseException:
        if hold is not None:
            hold.release()
        raise


def _run(
    front: Front,
    started: Started,
    announce: Callable[[Started], None],
    state: ServerState,
    login: Login | None,
    workers: WorkerGroup | None,
) -> None:
    settings = started.setup.settings

    def on_ready() -> None:
        announce(started)
        telemetry.install()
        signalled = _relay_signals(front.process)
        if workers is not None:
            workers.announce = partial(_tell_worker, front.link, set())
            workers.while_waiting = partial(_check_wanted, front.process, signalled, settings.shutdown_seconds)

    look = None if workers is None else workers.timeout / 2
    scheduler = Scheduler(started.curator, front.link, settings.max_waiting, on_ready, look)
    gc.collect()
    gc.freeze()  # collections need not walk over models and modules while streams wait
    try:
        url, permit = login or (None, None)
        setup = dataclasses.asdict(started.setup)
        scheduler.hello(workspace=str(state.home), setup=setup, front_url=url, permit=permit)
        scheduler.run()
    except LedgerError:  # says itself what to do next
        raise
    except EngineError as error:
        raise ServiceError(
            f"{error} The server stopped; the ledger holds what was charged: start the server again."
        ) from error
    except BrokenLink as broken:
        refuse_if_fenced(state.address, started.curator.epoch)  # that is why the front was ended
        raise ServiceError(
            f"{broken} The server stopped; the ledger holds what was charged: start the server again."
        ) from None
    except Exception as error:
        raise ServiceError(
            "A step failed and the server stopped. The ledger holds what was charged: start the server again."
        ) from error


def _tell_worker(link: Link, lost: set[int], news: WorkerNews) -> None:
    """Log what became of a worker, and tell the front how many are waited for."""
    events: dict[str, telemetry.EventName] = {"missing": "worker_missing", "lost": "worker_lost", "back": "worker_back"}
    level = logging.INFO if news.kind == "back" else logging.WARNING
    telemetry.write(telemetry.Entry(event=events[news.kind], worker=news.rank), level)
    (lost.discard if news.kind == "back" else lost.add)(news.rank)
    link.send("workers", len(lost))


def _check_wanted(front: subprocess.Popen[bytes], signalled: list[float], shutdown_seconds: float) -> None:
    """Give up waiting for a worker when the front has ended, or a signal's grace is over."""
    if front.poll() is not None:
        raise BrokenLink("The front has ended.")
    if signalled and time.monotonic() > signalled[0] + shutdown_seconds:
        raise EngineError("It was asked to stop while it waited for a worker; running answers were cut off.")


def _relay_signals(front: subprocess.Popen[bytes]) -> list[float]:
    """A signal to stop is the front's to handle: it lets answers finish, and then stops this process.

    Returns a list of when signals came.
    """
    signalled: list[float] = []

    def relay(number: int, _: object) -> None:
        signalled.append(time.monotonic())
        front.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)  # a second SIGINT hurries it

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: outlive the terminal
            signal.signal(number, relay)
    return signalled


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Until the front handles signals: a server that waits, or loads models, lets go of all it holds."""

    def end(*_: object) -> None:
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _lock_path(home: Path) -> Path:
    """Keys, quotas and replies have one server at a time, whatever it promises."""
    return service_path(home).with_name("server.lock")


def _check_keys(service: Path | str, named: Path, setup: Setup) -> None:
    with KeyStore(open_database(service)) as keys:
        if not setup.is_loopback and not keys.has_keys():
            raise ServiceError(
                f"{setup.settings.host} can be reached from other machines, but there is no API key yet. Make one "
                f"first: paclm keys add {in_shell(named)} NAME. Or listen on 127.0.0.1."
            )


def _take_state(state: ServerState, epoch: int | None) -> tuple[str | None, Login | None]:
    """Recover keys and replies; returns a first key, and in a database the front's own login."""
    address = state.address
    if isinstance(address, Path) or epoch is None:
        return _recover(address, None), None
    from paclm.server.postgres_front import let_in, shut_out

    login = shut_out(address, state.front_url, epoch)
    admin_key = _recover(address, login.permit)
    let_in(address, login)
    return admin_key, login


def _recover(service: Path | str, permit: str | None) -> str | None:
    """Settle what a killed server left behind, and make a first key; returns it. Call it with the ledger's lock."""
    with open_database(service, permit) as database:
        keys = KeyStore(database)
        keys.recover()
        Replies(database).recover()
        return None if keys.list() else keys.add(ADMIN, admin=True)


def _setup(workspace: Workspace, settings: ServerConfig, promise: PromiseName) -> Setup:
    return Setup(
        model_id=settings.model_id or workspace.path.name,
        settings=settings,
        runtime=dataclasses.asdict(workspace.runtime),
        is_loopback=is_loopback_address(settings.host),
        unit=workspace.manifest.unit,
        created=_created(workspace, promise),
    )


def _created(workspace: Workspace, promise: PromiseName) -> int:
    """When the model was made. Under `corpus` when its training began: how long that took may depend on the records."""
    if promise == "half":
        return int((workspace.path / MANIFEST_FILE).stat().st_mtime)
    began = [training["at"] for training in DpLog(dp_log_path(workspace.path)).trainings().values()]
    return int(datetime.fromisoformat(max(began)).timestamp())


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
