"""A server with workers, as an operator starts it, whose workers are killed or stopped under its clients."""

import base64
import itertools
import json
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from curator.deployments import WORLDS
from curator.sequential import Reference, world_in
from paclm.curator.custody import open_custody
from paclm.worlds.workspace import Workspace
from server.forked import ForkedProcess, record_steps
from server.killing import Asked, is_running
from server.live import bearer, ledger_rows
from server.standing import ADMIN_KEY, URL
from server.stepped import wait_until

TOKENS = 30


class ServedWithWorkers:
    """`paclm serve --workers 2`; `pid` is rank 0's."""

    def __init__(self, path, **environment):
        self.path = path
        self._steps = path.parent / "steps"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        arguments = ["serve", str(path), "--port", "0", "--workers", "2"]
        self.process = ForkedProcess(arguments, environment, partial(record_steps, self._steps))
        self.pid = self.process.pid
        self.said = ""
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.is_over or (ADMIN_KEY.search(self.said) and '"started"' in self.said), 120)
        assert not self.is_over, self.said
        self.url, self.key = URL.search(self.said)[0], ADMIN_KEY.search(self.said)[1]
        self.received = 0
        """Private tokens that clients have."""
        self.problems = []
        self._numbers = itertools.count()

    def _read(self):
        with self.process.stderr as lines:
            for line in lines:
                self.said += line

    @property
    def is_over(self):
        return self.process.poll() is not None

    @property
    def children(self):
        return children_of(self.pid)

    def count(self, event):
        """Lines of the log with this event."""
        return self.said.count(f'"event": "{event}"')

    def ask(self, **more):
        """One answer, as `Asked`."""
        body = {"model": self.path.name, "prompt": "the patient has", "max_tokens": TOKENS, "stream": False}
        asked = Asked("admin", f"ask-{next(self._numbers)}", {**body, **more})
        response = asked.send(self.url, self.key)
        if response.status_code != 200 or not asked.is_complete:
            self.problems.append(f"status {response.status_code}, complete {asked.is_complete}")
        self.received += asked.tokens
        return asked

    @contextmanager
    def load(self, clients=3):
        """Clients that ask one question after another; each of them gets every answer whole."""
        is_over = threading.Event()

        def client(number):
            chance = random.Random(number)
            while not is_over.is_set():
                more = {"prompt": f"the nurse {chance.randrange(50)}", "max_tokens": chance.randint(1, TOKENS)}
                answers.append(self.ask(**more, stream=chance.random() < 0.8))

        answers = []
        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: answers)
            yield answers
        finally:
            is_over.set()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()

    def lose(self, number, seconds=0.0):
        """Send the worker a signal after so long, and wait until another one is in its place and has answered."""
        time.sleep(seconds)
        before, lost = self.children["worker"], self.count("worker_back")
        os.kill(before, number)
        wait_until(lambda: self.count("worker_back") > lost or self.is_over, 60)
        assert not self.is_over, self.said
        assert self.children["worker"] != before
        assert not is_running(before)

    def keep_away(self):
        """Kill the worker and stop the one that is started in its place, until SIGCONT; its process id."""
        before = self.children["worker"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.children.get("worker", before) != before)
        os.kill(started := self.children["worker"], signal.SIGSTOP)
        return started

    def lose_under_load(self, times, seed):
        """SIGKILL at random instants; returns when as many answers came after the last as before."""
        chance = random.Random(seed)
        with self.load() as answers:
            for _ in range(times):
                self.lose(signal.SIGKILL, chance.uniform(0.0, 0.6))
                after = len(answers) + 3
                wait_until(lambda: len(answers) >= after or self.problems)  # noqa: B023

    def end(self, number=signal.SIGTERM):
        """End it; the exit status, when none of its processes is left."""
        pids = [*self.children.values()]
        os.kill(self.pid, number)
        status = self.process.wait(60)
        wait_until(lambda: not any(map(is_running, pids)))
        return status

    def overview(self):
        return httpx.get(f"{self.url}/v1/admin/overview", headers=bearer(self.key)).json()

    def check_ledger(self):
        """After the end: charged is exactly what was received, and the belief is that of the recorded steps."""
        assert self.problems == []
        assert ledger_rows(self.path) == self.received > 0
        custody = open_custody(Workspace.open(self.path))
        with custody.ledger as ledger, sqlite3.connect(f"file:{ledger_file(self.path)}?mode=ro", uri=True) as rows:
            committed = [row for (row,) in rows.execute("SELECT seq FROM events WHERE kind = 'stepped' ORDER BY seq")]
            by_row = {step["row"]: step for step in map(json.loads, self._steps.read_text().splitlines())}
            steps = [by_row[row] for row in committed]
            noise = [base64.b64decode(drawn) for step in steps for drawn in step["noise"]]
            followed = Reference(WORLDS, world_in(custody), noise)
            for votes in itertools.chain.from_iterable(step["votes"] for step in steps):
                followed.release(np.array(votes), ledger.settings.release, ledger.settings.per_token)
            assert np.array_equal(followed.belief, custody.belief.reveal())


def children_of(pid):
    """The front and the worker that a server has started, by name."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if is_running(pid)}
    return {"worker" if b"\0worker\0" in command else "front": pid for pid, command in commands.items()}


def ledger_file(path):
    return Workspace.open(path).ledger_path
