"""Where a server listens: known while it runs, and not a moment longer, however it ended."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from paclm.errors import ServiceError
from paclm.server.address import bind, identity, listen, note_path, noted, running_server
from paclm.server.database import service_path

URL = "http://127.0.0.1:8117"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "curator").mkdir(mode=0o700)
    service_path(tmp_path).touch()
    return tmp_path


def test_a_port_that_is_bound_is_taken_and_refuses_connections_until_it_is_opened():
    with bind("127.0.0.1", 0) as bound:
        where = bound.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
        listen(bound)
        socket.create_connection(where).close()
        with pytest.raises(ServiceError, match="--port"):
            bind(*where)


def test_a_server_is_known_while_it_runs(folder):
    assert running_server(folder) is None
    with noted(folder, URL):
        for _ in range(2):  # looking takes nothing away
            running = running_server(folder)
            assert running is not None
            assert (running.url, running.process) == (URL, os.getpid())
            assert running.service == identity(service_path(folder))
        assert note_path(folder).stat().st_mode & 0o777 == 0o600
    assert running_server(folder) is None
    assert not note_path(folder).exists()


def test_a_server_that_was_killed_is_not_taken_for_a_running_one(folder):
    program = (
        "import os, sys, pathlib; from paclm.server.address import noted\n"
        f"with noted(pathlib.Path(sys.argv[1]), {URL!r}): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert note_path(folder).exists()
    assert running_server(folder) is None
    with noted(folder, URL):
        assert running_server(folder) is not None


def test_a_copied_workspace_has_no_running_server(folder, tmp_path):
    with noted(folder, URL):
        copy = shutil.copytree(folder / "curator", tmp_path / "second" / "curator").parent
        assert note_path(copy).exists()
        assert running_server(copy) is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"{}", b'{"url": 3}', b"\xff\xfe", b'{"url": "http://a:1\\nexport X=1"}', b"x" * 5000),
        b'{"url": "http://h:1", "process": 1e999, "service": [1, 2]}',
        b"[" * 4000,
        *({"process": process} for process in (0, -1, 2**70, "a dead one")),
        *({"url": f"http://{rest}"} for rest in ("x:1 rm", "u@h:1", "h:1/v1")),
        *({"url": url} for url in ("https://evil.example/", "file:///etc")),
    ],
)
def test_a_note_that_was_changed_or_outlives_its_server_is_no_running_server(folder, content):
    if content == {"process": "a dead one"}:
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            content = {"process": ended.pid}
    if isinstance(content, dict):
        right = {"url": URL, "process": os.getpid(), "service": identity(service_path(folder))}
        content = json.dumps({**right, **content}).encode()
    with noted(folder, URL):
        note_path(folder).write_bytes(content)
        assert running_server(folder) is None


def test_a_folder_without_room_is_named(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ServiceError, match=r"server\.address"), noted(folder, URL):
        pass


def test_a_server_that_was_taken_over_leaves_the_note_of_the_one_that_serves(folder):
    with ExitStack() as new:
        with noted(folder, URL):
            new.enter_context(noted(folder, "http://127.0.0.1:9"))
        assert running_server(folder).url == "http://127.0.0.1:9"
    assert running_server(folder) is None
    assert not note_path(folder).exists()
