"""The two processes of a server: what each of them holds, and what happens to one when the other ends."""

import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from paclm.curator.master_key import MasterKeys
from paclm.curator.preflight import worlds_digest
from paclm.curator.redacted import Redacted
from paclm.curator.secret import unseal_belief
from paclm.ledger.dp_log import DpLog
from paclm.server.api_keys import KeyStore
from paclm.server.database import service_path
from paclm.worlds.layout import dp_log_path
from server.killing import READS_PROCESSES, front_of, is_running, serve_process
from server.live import bearer, ledger_rows
from server.stepped import wait_until

FORBIDDEN = (
    "torch",
    "paclm.curator.curator",
    "paclm.curator.custody",
    "paclm.curator.master_key",
    "paclm.ledger.store",
    "paclm.ledger.postgres_hold",
)
ASK = {"model": "clinic", "prompt": "the patient", "max_tokens": 40}

pytestmark = pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")


def holds(pid, *values):
    """Which of these values the writable memory of a process holds, in any of its pages."""
    found, longest = set(), max(map(len, values))
    regions = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in ((int(a, 16), int(b, 16)) for a, b in regions):
            for at in range(start, end, 2**24):
                try:
                    memory.seek(at)
                    page = memory.read(min(end - at, 2**24 + longest))
                except OSError:  # a device's, or gone meanwhile
                    continue
                found |= {value for value in values if value in page}
    return found


def belief_of(workspace, master):
    """The belief after the last commit, as the ledger has it sealed."""
    with sqlite3.connect(f"file:{workspace.ledger_path}?mode=ro", uri=True) as ledger:
        ((sealed,),) = ledger.execute("SELECT sealed FROM belief").fetchall()
    keys = MasterKeys.derived(Redacted(master))
    return unseal_belief(sealed, keys, worlds_digest(workspace), workspace.num_worlds).reveal()


@pytest.fixture
def serving(make):
    """Start `paclm serve`; whatever happens, both processes are gone at the end."""
    started = []

    def serving(**options):
        workspace = make(per_token="2^-16", total="2^-2")
        process, url, key = serve_process(workspace.path, **options)
        http = httpx.Client(base_url=url, headers=bearer(key), timeout=60)
        started.append((process, front_of(process), http))
        return workspace, *started[-1]

    yield serving
    for process, front, http in started:
        http.close()
        process.kill()
        process.wait(60)
        wait_until(lambda front=front: not is_running(front))


@READS_PROCESSES
def test_master_key_and_belief_are_in_the_memory_of_the_curator_alone(serving):
    master, planted = secrets.token_bytes(32), secrets.token_hex(32)
    workspace, process, front, http = serving(PACLM_KEY=master.hex(), PLANTED=planted)
    for _ in range(3):
        assert http.post("/v1/completions", json=ASK).status_code == 200
    belief = belief_of(workspace, master)
    assert len(set(belief)) > 1  # some tokens had dissent: it is no longer the prior
    packed = MasterKeys.derived(Redacted(master)).packed().reveal()
    private = {master.hex().encode(), packed[-64:-32], packed[-32:], belief.tobytes()}  # the curator derives two keys
    in_curator, in_front = (holds(pid, *private, master, planted.encode()) for pid in (process.pid, front))
    assert in_curator - {master} == {*private, planted.encode()}
    assert in_front == {planted.encode()}
    assert "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{front}/maps").read_text()
    opened = {os.readlink(link) for link in Path(f"/proc/{front}/fd").iterdir() if link.is_symlink()}
    names = {Path(name).name for name in opened}
    assert "service.sqlite" in names
    assert not names & {"ledger.sqlite", "ledger.sqlite-wal", "secret", "key"}


@READS_PROCESSES
def test_the_front_does_not_learn_how_the_master_key_is_read(serving, tmp_path):
    (tmp_path / "master").write_text(secrets.token_hex(32))
    command = f"sh -c 'echo run >>{tmp_path}/runs; cat {tmp_path}/master'"
    _, process, front, _ = serving(PACLM_KEY_COMMAND=command)
    in_curator, in_front = (Path(f"/proc/{pid}/environ").read_text() for pid in (process.pid, front))
    assert command in in_curator
    assert "PACLM_KEY" not in in_front
    assert (tmp_path / "runs").read_text() == "run\n"


def test_the_front_loads_no_module_that_opens_ledger_or_secret():
    modules = "paclm.server.front, paclm.server.postgres_database"
    program = f"import sys, {modules}; sys.exit(' '.join(set({FORBIDDEN!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@READS_PROCESSES
def test_the_front_has_a_login_of_its_own_and_never_sees_the_owners(serving, postgres):
    url = postgres.create_database(may_create_roles=True)
    password, name = urlsplit(url).password, urlsplit(url).path[1:]
    workspace, process, front, http = serving(PACLM_LEDGER=url, PGPASSWORD=password, PACLM_LEDGER_FRONT="")
    once = {"idempotency-key": "once"}
    first = http.post("/v1/completions", json=ASK, headers=once)
    again = http.post("/v1/completions", json=ASK, headers=once)
    assert (first.status_code, again.content) == (200, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert not service_path(workspace.path).exists()
    environment, command = (Path(f"/proc/{front}/{what}").read_bytes() for what in ("environ", "cmdline"))
    assert b"PACLM_LEDGER" not in environment
    assert password.encode() not in environment + command
    with postgres.connect() as admin:
        logins = admin.execute("SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = %s", [name]).fetchall()
        front_role = next(role for (role,) in logins if role != name)
        assert front_role.startswith("paclm_front_")
        assert front_role.encode() not in environment + command
        # Without keys and quotas it must not go on: the next start counts what was reserved.
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [front_role])
    http.post("/v1/completions", json=ASK)
    assert process.wait(60) == 2
    wait_until(lambda: not is_running(front))


def test_when_the_front_dies_the_curator_closes_the_ledger_and_says_so(serving):
    workspace, process, front, http = serving(is_forked=True)
    used = http.post("/v1/completions", json=ASK).json()["privacy"]["private_tokens"]
    os.kill(front, signal.SIGKILL)
    assert process.wait(60) == 2
    assert ledger_rows(workspace.path) == used


def test_when_the_curator_dies_running_answers_are_cut_off_and_all_is_accounted_for(serving):
    workspace, process, front, http = serving(is_forked=True)
    with KeyStore.open(service_path(workspace.path)) as keys:
        ward = keys.add("ward", quota_tokens=10_000)
    body, once = {**ASK, "stream": True, "temperature": 0}, {**bearer(ward), "idempotency-key": "once"}
    os.kill(process.pid, signal.SIGSTOP)  # no step ends before its death
    said = []
    client = threading.Thread(
        target=lambda: said.append(http.post("/v1/completions", json=body, headers=once).text), daemon=True
    )
    client.start()
    with KeyStore.open(service_path(workspace.path)) as keys:
        reserved = lambda: next(key for key in keys.list() if key.name == "ward").reserved_tokens  # noqa: E731
        wait_until(lambda: reserved() == ASK["max_tokens"])
        process.kill()
        client.join(60)
        wait_until(lambda: not is_running(front))
        assert reserved() == 0
    assert json.loads(said[0])["error"]["code"] == "server_stopping"
    assert ledger_rows(workspace.path) == 0


def test_under_corpus_there_are_two_processes_no_secret_and_no_second_server(dp_template, tmp_path):
    path, options = shutil.copytree(dp_template, tmp_path / "clinic"), ("--promise", "corpus")
    process, url, key = serve_process(path, options=options, is_forked=True)
    front = front_of(process)
    try:
        with httpx.Client(base_url=url, headers=bearer(key), timeout=60) as http:
            answer = http.post("/v1/completions", json={**ASK, "logprobs": 1}).json()
            assert answer["privacy"]["promise"] == "corpus"
            assert answer["choices"][0]["logprobs"]["tokens"]
            created = http.get("/v1/models").json()["data"][0]["created"]
            (training,) = DpLog(dp_log_path(path)).trainings().values()
            assert created == datetime.fromisoformat(training["at"]).timestamp()
        command = [sys.executable, "-m", "paclm", "serve", str(path), "--port", "0", *options]
        second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 2
        assert f"already running in process {process.pid}" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        wait_until(lambda: not is_running(front))
    assert not {file.name for file in (path / "curator").iterdir()} & {"ledger.sqlite", "secret", "key"}


def test_the_curators_process_imports_nothing_that_speaks_http():
    names = ["fastapi", "starlette", "uvicorn", "pydantic", "opentelemetry"]
    program = f"import sys, paclm.server.run; print([name for name in {names} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
