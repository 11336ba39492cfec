"""Kills around a ledger in PostgreSQL: of the process that holds it, of its backend, of the whole server.

A worker commits steps and reports each once it is committed; a driver kills something at a random instant and compares
what was reported with what the database has.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from ledger.faults import check, commit, take
from ledger.kills import TOKENS
from paclm.errors import LedgerError

VICTIMS = ("holder", "backend", "terminated backend", "server shut down", "server killed")
STOPPED = 3
"""Exit status of a worker whose ledger stopped."""


def work(url):
    """Commit for ever; a line on standard output for every commit that returned."""
    try:
        with take(url) as ledger:
            os.write(1, b"backend %d\n" % ledger.store.db.info.backend_pid)
            while True:
                commit(ledger)
                os.write(1, b"left %d\n" % (ledger.account.tokens // TOKENS))
    except LedgerError:
        os._exit(STOPPED)


def be_zygote():
    """Fork a worker for every address on standard input, so that a kill costs no import; say how it ended."""
    for line in sys.stdin:
        worker = os.fork()
        if worker == 0:
            work(line.strip())
        print("worker", worker, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), flush=True)


def run_kills(server, url, victims, seed):
    """Kill each of these under a load of commits, and restart from what the database has; returns all steps."""
    draw, steps = random.Random(seed), 0
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zygote:
        for victim in victims:
            zygote.stdin.write(f"{url}\n")
            zygote.stdin.flush()
            found = {}
            while "left" not in found:  # something has left
                read_word(zygote, found)
            time.sleep(draw.uniform(0.0, 0.03))
            kill(server, victim, found["worker"], found["backend"])
            while "ended" not in found:
                read_word(zygote, found)
            assert found["ended"] == (-signal.SIGKILL if victim == "holder" else STOPPED)
            server.wait_until_ready()
            steps = check(url, at_least=max(steps, found["left"]), at_most=found["left"] + 1)
        zygote.stdin.close()
    return steps


def read_word(zygote, found):
    line = zygote.stdout.readline()
    assert line, "the worker's parent died"
    name, number = line.split()
    found[name] = int(number)


def kill(server, victim, holder, backend):
    if victim == "holder":
        os.kill(holder, signal.SIGKILL)
    elif victim == "backend":
        server.kill_backend(backend)
    elif victim == "terminated backend":
        server.kill_backend(backend, by=signal.SIGTERM)
    else:
        if victim == "server killed":
            server.kill()
        else:
            server.stop("immediate")
        server.start()


if __name__ == "__main__":
    be_zygote()
