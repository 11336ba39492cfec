"""Servers of one ledger in PostgreSQL, each in processes of its own: one serves, the others stand by."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from curator.deployments import WORLDS
from curator.sequential import Reference, world_in
from paclm.curator.custody import open_custody
from paclm.worlds.workspace import Workspace
from server.forked import ForkedProcess, record_steps
from server.killing import Killing, front_of, is_running
from server.live import bearer
from server.stepped import wait_until

STALE_SECONDS = 3
MASTER_KEY = "7a" * 32
URL = re.compile(r"http://[0-9.:]+")
ADMIN_KEY = re.compile(r"admin key +(paclm-\S+)")
STANDBY = "This server is a standby"


def copies_of(workspace, *names, stale_seconds=STALE_SECONDS):
    """The workspace as other machines have it, with the same settings."""
    settings = workspace.path / "paclm.toml"
    settings.write_text(f"{settings.read_text()}\n[ledger]\nstale_seconds = {stale_seconds}\n")
    return [Path(shutil.copytree(workspace.path, workspace.path.parent / name / "clinic")) for name in names]


class Server:
    """`paclm serve` of a workspace whose ledger is in a database, forked unless told not to; what it says is kept."""

    def __init__(self, path, database, *options, is_forked=True, prepare=None):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACLM_LEDGER": database, "PACLM_KEY": MASTER_KEY}
        arguments = ["serve", str(path), "--port", "0", *options]
        if is_forked:
            self.process = ForkedProcess(arguments, environment, prepare)
        else:
            command = [sys.executable, "-m", "paclm", *arguments]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.said = ""
        self.front = None
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self):
        with self.process.stderr as lines:
            for line in lines:
                self.said += line

    @property
    def words(self):
        """What it said, as one line: messages are wrapped."""
        return " ".join(self.said.split())

    @property
    def is_standby(self):
        return STANDBY in self.words

    @property
    def url(self):
        return found[0] if (found := URL.search(self.said)) else None

    @property
    def admin_key(self):
        """What the first server of a ledger prints, after all else."""
        wait_until(lambda: ADMIN_KEY.search(self.said), 60)
        return ADMIN_KEY.search(self.said)[1]

    def is_ready(self):
        assert self.process.poll() is None, self.said
        return '"started"' in self.said and self.url is not None

    def wait_until_ready(self):
        wait_until(self.is_ready, 120)
        return self

    def wait_until_serving(self):
        self.wait_until_ready()
        self.front = front_of(self.process)
        return self

    def wait_until_standby(self):
        wait_until(lambda: self.is_standby or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.said
        return self

    def wait_for_end(self):
        """Its exit status, once both processes have ended."""
        status = self.process.wait(120)
        self._reading.join(60)
        if self.front is not None:
            wait_until(lambda: not is_running(self.front), 60)
        return status

    def http(self, key):
        return httpx.Client(base_url=self.url, headers=bearer(key), timeout=60)


@contextmanager
def servers():
    """A function that starts servers; none outlives the block."""
    started = []

    def start(*arguments, **options):
        started.append(Server(*arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.kill()
            server.wait_for_end()


class KillingUnderStandby(Killing):
    """Kills as there, with a ledger in PostgreSQL: a standby waits for each of them, and takes over.

    Only a dead server's last heartbeat is made to look old: no standby takes over from one that is merely slow.
    """

    def __init__(self, workspace, database, **options):
        (path,) = copies_of(workspace, "here", stale_seconds=3600)
        super().__init__(path, **options)
        self._database = database
        self._record = path.parent / "steps"
        self._spare = None

    @contextmanager
    def _served(self):
        server = self._spare or self._start()
        try:
            server.wait_until_serving()
            self._spare = self._start()
            yield [server.process.pid, server.front], server.url
        except BaseException:
            self.close()
            raise
        finally:
            server.process.terminate()  # one that was killed, or lost its database, ends by itself
            server.wait_for_end()
            if not self._postgres.is_running:
                self._postgres.start()
            self._postgres.wait_until_ready()
            with self._postgres.connect(self._database) as db:
                db.execute("UPDATE paclm.holder SET seen = seen - interval '2 hours'")

    def _kill_under_load(self, pids, url, victim):
        self._spare.wait_until_standby()
        super()._kill_under_load(pids, url, victim)

    def _start(self):
        return Server(self._path, self._database, prepare=partial(record_steps, self._record))

    def run(self, kills):
        super().run(kills)
        self.close()
        self._check_belief()

    def _check_belief(self):
        """Follow all committed steps, by whichever server, from the prior: the ledger has that belief, bit by bit."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PACLM_LEDGER", self._database)
            environment.setenv("PACLM_KEY", MASTER_KEY)
            custody = open_custody(Workspace.open(self._path), take_over=True)
        with custody.ledger as ledger, self._postgres.connect(self._database) as db:
            found = db.execute("SELECT seq FROM paclm.events WHERE kind = 'stepped' ORDER BY seq").fetchall()
            recorded = map(json.loads, self._record.read_text().splitlines())
            by_row = {step["row"]: step for step in recorded}  # of two for one row the last: the first died before it
            steps = [by_row[row] for (row,) in found]
            followed = Reference(
                WORLDS, world_in(custody), [base64.b64decode(d) for step in steps for d in step["noise"]]
            )
            for votes in itertools.chain.from_iterable(step["votes"] for step in steps):
                followed.release(np.array(votes), ledger.settings.release, ledger.settings.per_token)
            self._check(np.array_equal(followed.belief, custody.belief.reveal()), "another belief")

    def close(self):
        """End the standby."""
        if self._spare is not None:
            self._spare.process.kill()
            self._spare.wait_for_end()
            self._spare = None
