"""Workers in threads of the test process: quick, and a test can make one lie, die or send garbage."""

import threading
from contextlib import contextmanager, suppress
from functools import partial

from paclm.engine.launch import start_workers
from paclm.engine.rendezvous import Rendezvous
from paclm.engine.wire import find_store, join
from paclm.engine.worker import Worker, run_worker
from paclm.errors import PaclmError
from paclm.worlds.workspace import Workspace

LOOPBACK = Rendezvous("127.0.0.1", 0)


@contextmanager
def joined(workspace, *run, **options):
    """A group whose ranks 1, 2 … are these functions of workspace, rank, host and port; one `run_worker` by default."""
    workers = run or (run_worker,)
    group = start_workers(workspace.path, 1 + len(workers), rendezvous=LOOPBACK, **options)
    group.start()
    address = group.address.rpartition(":")
    threads = [
        threading.Thread(target=partial(_quietly, work, workspace, rank, address[0], int(address[2])), daemon=True)
        for rank, work in enumerate(workers, 1)
    ]
    with group:
        for thread in threads:
            thread.start()
        yield group
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def _quietly(work, workspace, *where):
    with suppress(PaclmError):
        work(Workspace.open(workspace.path), *where)


def stranger(then, send):
    """What comes to the rendezvous first does `send` with its wire and leaves; `then` comes next."""

    def run(workspace, rank, host, port):
        wire = join(find_store(host, port, 60), rank, host)
        wire.receive(60)  # the settings
        send(wire)
        del wire
        then(workspace, rank, host, port)

    return run


def leaving(then, is_gone):
    """A worker that leaves at its next order once this event is set; `then` comes next."""

    def run(workspace, rank, host, port):
        wire = join(find_store(host, port, 60), rank, host)
        worker = Worker(workspace, rank, wire)
        while (message := wire.receive(60)) and not is_gone.is_set():
            worker._follow(message)
        del worker, wire
        then(workspace, rank, host, port)

    return run
