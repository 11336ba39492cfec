"""Servers of one ledger in PostgreSQL, each in processes of its own: one serves, the others stand by."""

import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx

from server.killing import Killing, front_of, is_running
from server.live import bearer
from server.stepped import wait_until

STALE_SECONDS = 1
MASTER_KEY = "7a" * 32
URL = re.compile(r"http://[0-9.:]+")
ADMIN_KEY = re.compile(r"admin key +(paclm-\S+)")
STANDBY = "This server is a standby"


def copies_of(workspace, *names):
    """The workspace as other machines have it, with the same settings."""
    settings = workspace.path / "paclm.toml"
    settings.write_text(f"{settings.read_text()}\n[ledger]\nstale_seconds = {STALE_SECONDS}\n")
    return [Path(shutil.copytree(workspace.path, workspace.path.parent / name / "clinic")) for name in names]


class Server:
    """`paclm serve` of a workspace whose ledger is in a database; what it says is kept."""

    def __init__(self, path, database, *options, command=("-m", "paclm")):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACLM_LEDGER": database, "PACLM_KEY": MASTER_KEY}
        self.process = subprocess.Popen(
            [sys.executable, *command, "serve", str(path), "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
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

    def wait_until_serving(self):
        wait_until(self.is_ready, 120)
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
    """Kills as there, with a ledger in PostgreSQL: a standby waits for each of them, and takes over."""

    def __init__(self, path, database, **options):
        super().__init__(path, **options)
        self._database = database
        self._spare = None

    @contextmanager
    def _served(self):
        server = self._spare or Server(self._path, self._database)
        try:
            server.wait_until_serving()
            self._spare = Server(self._path, self._database)
            yield [server.process.pid, server.front], server.url
        except BaseException:
            self.close()
            raise
        finally:
            server.process.terminate()  # one that was killed, or lost its database, ends by itself
            server.wait_for_end()
            if not self._postgres.is_running:
                self._postgres.start()

    def _kill_under_load(self, pids, url, victim):
        self._spare.wait_until_standby()
        super()._kill_under_load(pids, url, victim)

    def run(self, kills):
        super().run(kills)
        self.close()

    def close(self):
        """End the standby."""
        if self._spare is not None:
            self._spare.process.kill()
            self._spare.wait_for_end()
            self._spare = None
