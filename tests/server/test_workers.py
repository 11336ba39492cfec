"""A server whose worlds are shared: workers killed or stopped under load, and what they may know and reach."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paclm.engine.loading import open_engine
from server.killing import MAY_READ_PROCESSES
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
    server.lose(signal.SIGKILL)  # with no request under way
    server.ask()
    assert server.count("worker_lost") == server.count("worker_back") >= 5
    with server.load():
        server.lose(signal.SIGSTOP)
    assert server.overview()["tokens"]["private"] == server.received
    server.end(signal.SIGKILL)  # of rank 0: front and worker end by themselves
    server.check_ledger()


def test_two_hosts_share_the_worlds_over_a_private_network_and_listen_on_it_alone(make):
    workspace = make()
    settings = workspace.path / "paclm.toml"
    settings.write_text(f'{settings.read_text()}\n[workers]\nprivate_networks = ["10.83.0.0/24"]\n')
    script = Path(__file__).with_name("two_hosts.py")
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(script), str(workspace.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if not done.stdout.startswith("ready"):
        pytest.skip(f"this machine allows no network namespaces: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["votes"] == open_engine(workspace, 40).votes([1, 2, 3]).tolist()
    assert found["listening"] == [["10.83.0.1"] * 2, ["10.83.0.2"]]
    assert found["status"] == 0
