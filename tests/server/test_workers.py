"""A server whose worlds are shared: workers killed or stopped under load, and what they may know and reach."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from paclm.engine.loading import open_engine
from paclm.engine.wire import FRAME, find_store, join
from server.killing import MAY_READ_PROCESSES, is_running
from server.live import bearer
from server.stepped import wait_until
from server.worker_kills import ServedWithWorkers

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@pytest.fixture
def served(make):
    """Start a server with two workers; whatever happens, none of its processes is left at the end."""
    started = []

    def served(**environment):
        workspace = make(per_token="2^-20", total="2^-3")
        settings = workspace.path / "paclm.toml"
        settings.write_text(f"{settings.read_text()}\n[workers]\ntimeout_seconds = 4\n")
        started.append(ServedWithWorkers(workspace.path, **environment))
        return started[-1]

    yield served
    for server in started:
        if not server.is_over:
            server.end(signal.SIGKILL)


def listening(pid):
    """Addresses on which a process listens."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    addresses = set()
    for family, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                addresses.add(words[1][:size])
    return addresses


def check_health(server):
    """Kill the worker with no request under way; what the server says of itself until another one is back."""
    health = partial(httpx.get, f"{server.url}/health")
    metrics = partial(httpx.get, f"{server.url}/metrics", headers=bearer(server.key))
    assert (health().status_code, health().json()) == (200, {"status": "ok"})
    assert "\npaclm_workers_lost 0.0\n" in metrics().text
    next_one = server.keep_away()
    wait_until(lambda: health().status_code == 503)
    assert health().json() == {"status": "restoring"}
    assert "\npaclm_workers_lost 1.0\n" in metrics().text
    assert "\npaclm_serving 1.0\n" in metrics().text
    figures = httpx.get(f"{server.url}/v1/admin/overview", headers=bearer(server.key))
    assert (figures.status_code, figures.json()["error"]["code"]) == (503, "waiting_for_workers")
    os.kill(next_one, signal.SIGCONT)
    wait_until(lambda: health().status_code == 200, 60)
    assert "\npaclm_workers_lost 0.0\n" in metrics().text


def abort(server):
    """A stranger takes the place of a lost worker and sends more than a frame, at which torch aborts; the status."""
    command = Path(f"/proc/{server.children['worker']}/cmdline").read_text().split("\0")
    host, _, port = command[command.index("--rendezvous") + 1].rpartition(":")
    next_one = server.keep_away()
    wire = join(find_store(host, int(port), 60), 1, host)
    wire.receive(60)
    wire._pair.send([torch.zeros(FRAME + 1, dtype=torch.uint8)], 0, 0)
    pids = [*server.children.values()]
    status = server.process.wait(60)
    os.kill(next_one, signal.SIGCONT)
    wait_until(lambda: not any(map(is_running, pids)))
    return status


def test_after_five_kills_all_is_answered_and_charged_once_and_a_stop_is_noticed(served, monkeypatch):
    monkeypatch.setenv("PACLM_KEY", "7a" * 32)
    server = served(PGPASSWORD="private")
    worker = server.children["worker"]
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    assert not re.search(rb"(^|\0)(PG|PACLM_(?!CACHE_DIR=))", environment)
    assert b"7a" * 32 not in environment
    opened = [os.readlink(link) for link in Path(f"/proc/{worker}/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if name.startswith(str(server.path / "curator"))]
    ours = listening(server.pid) if MAY_READ_PROCESSES else set()
    assert ours | listening(worker) == {"0100007F"}  # 127.0.0.1

    server.lose_under_load(times=4, seed=1)
    check_health(server)
    server.ask()
    assert server.count("worker_lost") == server.count("worker_back") >= 5
    with server.load():
        server.lose(signal.SIGSTOP)
    assert server.overview()["tokens"]["private"] == server.received
    assert abort(server) == -signal.SIGABRT  # front and worker end by themselves
    server.check_ledger()


def test_two_hosts_share_the_worlds_over_a_private_network_until_one_is_cut_off(make):
    """They listen on that network alone. A pause is no loss; a worker whose rank 0 is unreachable ends."""
    workspace = make()
    settings = workspace.path / "paclm.toml"
    settings.write_text(
        f'{settings.read_text()}\n[workers]\nprivate_networks = ["10.83.0.0/24"]\ntimeout_seconds = 2\n'
    )
    script = Path(__file__).with_name("two_hosts.py")
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(script), str(workspace.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if not done.stdout.startswith("ready"):
        pytest.skip(f"this machine allows no network namespaces: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["votes"] == [open_engine(workspace, 40).votes([1, 2, 3]).tolist()] * 2
    assert found["listening"] == [["10.83.0.1"] * 2, ["10.83.0.2"]]
    assert found["pause_status"] is None
    assert "does not answer any more" in found["said"]
