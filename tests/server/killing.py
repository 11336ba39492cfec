"""A server in processes of its own, as an operator starts it, of which one is killed under its clients."""

import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from paclm.server.api_keys import KeyStore
from paclm.server.database import service_database
from paclm.worlds.settings import ledger_address
from server.forked import ForkedProcess
from server.live import bearer, ledger_rows
from server.stepped import wait_until

assert Path("/proc/self/stat").exists(), "These tests find and kill processes by /proc: run them on Linux."

_CAP_SYS_PTRACE = 19
_CAPABILITIES = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
MAY_READ_PROCESSES = _CAPABILITIES is not None and bool(int(_CAPABILITIES[1], 16) >> _CAP_SYS_PTRACE & 1)
"""Memory, environment and open files of paclm's processes, which are not dumpable: only with CAP_SYS_PTRACE."""
READS_PROCESSES = pytest.mark.skipif(
    not MAY_READ_PROCESSES, reason="paclm's processes are not dumpable: to read them run as root (CAP_SYS_PTRACE)"
)

TOKENS = 40
"""Of an answer; a client has one under way, so that no more can be on its way to it."""
STEPS_IN_FLIGHT = 10
"""One that was committed and not handed out, and those that a busy machine handed out and has not sent yet."""


def serve_process(path, key=None, options=(), is_forked=False, prepare=None, **environment):
    """`paclm serve` as an operator starts it; its address and the admin key, which it prints once if there is none."""
    arguments = ["serve", str(path), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    if is_forked:
        process = ForkedProcess(arguments, environment, prepare)
    else:
        command = [sys.executable, "-m", "paclm", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said, url, new = "", None, None
    while url is None or (key is None and new is None):
        line = process.stderr.readline()
        assert line, said
        said += line
        url = re.search(r"http://[0-9.:]+", said)
        new = re.search(r"admin key +(paclm-\S+)", said)
    threading.Thread(target=process.communicate, daemon=True).start()  # a full pipe would stop the server
    return process, url[0], key or new[1]


def front_of(process):
    """The process id of the front that this server has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def is_running(pid):
    """Not ended; one that has ended may wait for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@dataclass
class Asked:
    """One request with an Idempotency-Key, and what its client has received."""

    owner: str
    """The name of its API key."""
    key: str
    body: dict
    content: bytes = b""
    completed: float = math.inf
    """When its last byte had arrived, by the monotonic clock."""

    @property
    def is_complete(self):
        return self.completed < math.inf

    @property
    def tokens(self):
        """Private tokens that have arrived, by the marks that an admin sees."""
        if not self.body["stream"]:
            return json.loads(self.content)["privacy"]["private_tokens"] if self.is_complete else 0
        lines = self.content.split(b"\n")[:-1]  # the last one may be cut off
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return sum(len(event.get("privacy", {}).get("marks", [])) for event in events)

    def send(self, url, api_key):
        """Send it; the response, whose content is kept as far as it comes."""
        headers = {**bearer(api_key), "idempotency-key": self.key}
        with httpx.stream("POST", f"{url}/v1/completions", json=self.body, headers=headers, timeout=120) as response:
            if response.status_code == 200:
                for piece in response.iter_raw():
                    self.content += piece
                if not self.body["stream"] or self.content.endswith(b"data: [DONE]\n\n"):
                    self.completed = time.monotonic()
            else:
                response.read()
        return response


class Killing:
    """Clients under whom a server is killed again and again; each request has its own key.

    Killed are its front or its curator; with a ledger in PostgreSQL also a process of the database, or all of it. The
    first client has a quota, if one is given.
    """

    def __init__(
        self, path, seed, clients=6, may_be_killed=("front", "curator"), postgres=None, quota=None, prepare=None
    ):
        self._path = path
        self._chance = random.Random(seed)
        self._may_be_killed = may_be_killed
        self._postgres = postgres
        self._quota = quota
        self._prepare = prepare
        with KeyStore(service_database(path)) as keys:
            self._keys = {
                f"client-{n}": keys.add(f"client-{n}", admin=True, quota_tokens=None if n else quota)
                for n in range(clients)
            }
        self._numbers = itertools.count()
        self._last = []
        self.received = dict.fromkeys(self._keys, 0)
        """Private tokens by the name of the API key."""
        self.kinds = {"repeated": 0, "lost": 0, "fresh": 0}
        """What came back for the requests of a killed server."""
        self.victims = []
        self.problems = []

    def run(self, kills):
        """So many kills, each followed by a start at which every request of the killed server is sent again."""
        victims = [victim for victim, _ in zip(itertools.cycle(self._may_be_killed), range(kills), strict=False)]
        self._chance.shuffle(victims)
        for victim in victims:
            with self._served() as (pids, url):
                self._ask_again(url)
                self._kill_under_load(pids, url, victim)
            self._check(ledger_rows(self._path) >= sum(self.received.values()), "undercount: total")
        with self._served() as (_, url):
            self._ask_again(url)
        most = sum(self.received.values()) + kills * len(self._keys) * TOKENS
        self._check(ledger_rows(self._path) <= most, "more was charged than could be under way")

    @contextmanager
    def _served(self):
        key = next(iter(self._keys.values()))
        process, url, _ = serve_process(self._path, key, is_forked=True, prepare=self._prepare)
        pids = [process.pid, front_of(process)]
        try:
            yield pids, url
        finally:
            process.terminate()  # one that was killed, or whose front was, ends by itself
            process.wait(120)
            wait_until(lambda: not any(map(is_running, pids)), 120)

    def _kill_under_load(self, pids, url, victim):
        curator, front = pids
        is_over = threading.Event()
        threads = [threading.Thread(target=self._client, args=(url, name, is_over)) for name in self._keys]
        for thread in threads:
            thread.start()
        wait_until(lambda: any(asked.content for asked in self._last))
        time.sleep(self._chance.uniform(0.0, 0.5))
        self.victims.append(victim)
        self._killed = time.monotonic()
        match victim:
            case "front":
                os.kill(front, signal.SIGKILL)
            case "curator":
                os.kill(curator, signal.SIGKILL)
            case "backend":  # PostgreSQL ends all others, and recovers
                self._postgres.kill_backend(self._chance.choice(self._backends()))
            case "database":
                self._postgres.stop("immediate")
        is_over.set()
        for thread in threads:
            thread.join(120)
        for asked in self._last:
            self.received[asked.owner] += asked.tokens
        if self._quota is not None:
            self._check(self.received["client-0"] <= self._quota, "a key over its quota")

    def _backends(self):
        """Process ids of the connections that the server has to its database."""
        name = urlsplit(ledger_address(self._path)).path[1:]
        with self._postgres.connect() as admin:
            rows = admin.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s ORDER BY pid", [name]).fetchall()
        return [pid for (pid,) in rows]

    def _client(self, url, name, is_over):
        chance = random.Random(name)
        while not is_over.is_set():
            asked = Asked(
                name,
                f"{name} {next(self._numbers)}".replace(" ", "-"),
                {
                    "model": self._path.name,
                    "prompt": f"the patient number {chance.randrange(100)} has",
                    "max_tokens": chance.randint(1, TOKENS),
                    "stream": chance.random() < 0.8,
                    "response_format": {"type": chance.choice(["text", "json_object"])},
                },
            )
            self._last.append(asked)
            try:
                response = asked.send(url, self._keys[name])
            except httpx.TransportError:
                return
            if response.status_code == 429:  # its quota is spent
                self._last.remove(asked)
                return

    def _ask_again(self, url):
        """What was complete comes again, byte by byte; what was under way is lost, or was stored and not yet sent.

        A reply whose tokens are charged is also sent when the database could not take it any more: one that was
        completed after the database was killed may be lost, and one that was complete before may not.
        """
        before, fresh = self._figures(url), 0
        for key in before["keys"]:
            for count in ("private_tokens", "used_tokens"):  # of the ledger, and of the key's quota
                self._check(key[count] >= self.received[key["name"]], f"undercount: {count}")
        is_database_gone = self.victims and self.victims[-1] in ("backend", "database")
        for asked in self._last:
            again = Asked(asked.owner, asked.key, asked.body)
            response = again.send(url, self._keys[asked.owner])
            if response.status_code == 429 and self._quota is not None and asked.owner == "client-0":
                self._check(not asked.tokens, "something that had left was asked for again")
                continue
            if response.status_code == 409:
                kind = "lost"
                self._check(json.loads(response.content)["error"]["code"] == "idempotency_reply_lost", response.text)
            else:
                kind = "repeated" if "idempotent-replayed" in response.headers else "fresh"
                self._check(response.status_code == 200, "neither repeated nor lost")
            may_be_lost = not asked.is_complete or (is_database_gone and asked.completed > self._killed)
            self._check(kind != "lost" or may_be_lost, "a reply that arrived is lost")
            self._check(kind != "repeated" or again.content.startswith(asked.content), "another reply than the first")
            self._check(kind != "fresh" or not asked.tokens, "something that had left was charged again")
            is_whole = not asked.is_complete or again.content == asked.content
            self._check(kind == "lost" or is_whole, "not the whole reply")
            self.kinds[kind] += 1
            if kind == "fresh":
                self.received[asked.owner] += again.tokens
                fresh += again.tokens
        charged = self._figures(url)["tokens"]["private"] - before["tokens"]["private"]
        self._check(charged == fresh, "a repeated request was charged")
        self._last = []

    def _figures(self, url):
        key = next(iter(self._keys.values()))
        return httpx.get(f"{url}/v1/admin/overview", headers=bearer(key)).json()

    def _check(self, is_so, problem):
        if not is_so:
            self.problems.append(problem)
