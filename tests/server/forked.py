"""`paclm` in forks of a process that has imported everything: a start takes a tenth of the time, and is otherwise real.

With `record_steps` it writes down votes and noise of every step before the commit: a test can follow the belief.
"""

import base64
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["paclm.cli.main", "paclm.server.run", "paclm.engine.loading", "psycopg", "transformers.models.gpt2.modeling_gpt2"]
)


class ForkedProcess:
    """As much of a `subprocess.Popen` as its users need."""

    def __init__(self, arguments, environment, prepare=None):
        """`prepare` is called in the fork before all else."""
        reading, writing = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(arguments, environment, writing, prepare), daemon=True)
        self._process.start()
        writing.close()
        self.stderr = os.fdopen(os.dup(reading.fileno()))
        reading.close()
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("paclm", timeout)
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self):
        with self.stderr:
            return None, self.stderr.read()


def _run(arguments, environment, said, prepare):
    from paclm.cli.main import main
    from paclm.server import standby

    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    said.close()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    standby._POLL_SECONDS = 0.1
    if prepare is not None:
        prepare()
    sys.argv = ["paclm", *map(str, arguments)]
    main()


def record_steps(path):
    """A line for every step: the row it is about to be, disputed votes, and the noise that was drawn for them."""
    from paclm.curator.curator import Releaser
    from paclm.curator.custody import Custody

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    release, commit, urandom = Releaser.release, Custody.commit, os.urandom
    step = {}

    def recorded_release(self, votes, public, charges, belief):
        def recorded_urandom(size):
            step["noise"].append(base64.b64encode(drawn := urandom(size)).decode())
            return drawn

        step.update(votes=votes[[charge.mark == "disputed" for charge in charges]].tolist(), noise=[])
        os.urandom = recorded_urandom
        try:
            return release(self, votes, public, charges, belief)
        finally:
            os.urandom = urandom

    def recorded_commit(self, entries, belief):
        os.write(file, json.dumps({"row": self.ledger.head.seq + 1, **step}).encode() + b"\n")
        commit(self, entries, belief)

    Releaser.release, Custody.commit = recorded_release, recorded_commit


def hold_back_commits(folder):
    """Once a stream has a token and is to have more, commits wait for the file `go`; `held` is there while one does."""
    from paclm.curator.curator import Curator
    from paclm.curator.custody import Custody

    step, commit = Curator.step, Custody.commit

    def holding_step(self):
        pieces = step(self)
        if any(stream.finish_reason is None for stream, _ in pieces):
            Custody.commit = held_commit
        return pieces

    def held_commit(self, entries, belief):
        (folder / "held").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        commit(self, entries, belief)

    Curator.step = holding_step
