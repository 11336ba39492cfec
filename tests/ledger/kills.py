"""Real kills: a worker commits steps and reports what it released; a driver kills it at random instants and compares.

Start a worker by hand: python tests/ledger/kills.py LEDGER commit-first|release-first [WITNESS]
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paclm.config import MechanismConfig
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger

KEY = bytes(range(32))
SETTINGS = MechanismConfig(per_token=2.0**-40, total=2.0**-4)
PRICE = 2**20
TOKENS = 3
"""Private tokens in one step."""


def belief_after(tokens):
    """A stand-in for the sealed belief after so many tokens, which the driver can recompute."""
    return hashlib.sha512(b"%d" % tokens).digest() * 16


def create(path, witness=None):
    """A fresh ledger for the kills."""
    Ledger.create(
        path, KEY, workspace="kills", num_worlds=128, settings=SETTINGS, sealed_belief=belief_after(0), witness=witness
    ).close()


def work(path, order, witness):
    """Step for ever; `left N` on standard output reports that the tokens up to N were released."""
    with Ledger.open(path, KEY, witness=witness) as ledger:
        while True:
            after = ledger.account.tokens + TOKENS
            if order == "release-first":
                os.write(1, b"left %d\n" % after)
            ledger.commit([Usage("kills", TOKENS, 1, TOKENS, TOKENS * PRICE)], belief_after(after))
            if order == "commit-first":
                os.write(1, b"left %d\n" % after)


@dataclass
class Tally:
    """What a series of kills showed."""

    kills: int = 0
    undercounts: int = 0
    """Restarts that found fewer tokens charged than were released."""
    overcharged: int = 0
    """Restarts that found tokens charged which were not released."""
    most_overcharged_tokens: int = 0
    lost_beliefs: int = 0
    """Restarts whose belief was not that of the last committed step."""


class Zygote:
    """A process that has imported everything and forks a worker on demand, so that a kill costs no import."""

    def __init__(self):
        command = [sys.executable, __file__, "zygote"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, path, order, witness):
        """A worker's process id and the pipe on which it reports what it released."""
        pipe = path.parent / "left.pipe"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        self._process.stdin.write(f"{path}\t{order}\t{witness or ''}\t{pipe}\n")
        self._process.stdin.flush()
        reader = os.open(pipe, os.O_RDONLY)
        return int(self._process.stdout.readline()), reader

    def reap(self):
        """Let the zygote collect the worker that was just killed."""
        self._process.stdin.write("wait\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def be_zygote():
    """Fork a worker for every line on standard input; `wait` collects the last one."""
    for line in sys.stdin:
        if line == "wait\n":
            os.wait()
            print("gone", flush=True)
            continue
        path, order, witness, pipe = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            os.dup2(os.open(pipe, os.O_WRONLY), 1)
            work(Path(path), order, Path(witness) if witness else None)
        print(child, flush=True)


def read_until_end(reader):
    content = b""
    while part := os.read(reader, 65536):
        content += part
    return content


def run_kills(folder, kills, order, *, seed, with_witness=False):
    """Kill a worker so many times, each after at least one step left, and restart from what is on the disk."""
    path, witness = folder / "ledger.sqlite", folder.parent / "kills.witness" if with_witness else None
    create(path, witness)
    tally, draw, zygote = Tally(), random.Random(seed), Zygote()
    try:
        while tally.kills < kills:
            worker, reader = zygote.start(path, order, witness)
            output = os.read(reader, 64)  # blocks until something has left
            time.sleep(draw.uniform(0.0, 0.03))
            os.kill(worker, signal.SIGKILL)
            output += read_until_end(reader)
            os.close(reader)
            zygote.reap()
            left = int(output.split()[-1])
            with Ledger.open(path, KEY, witness=witness) as ledger:
                charged, belief = ledger.account.tokens, ledger.sealed_belief
            tally.kills += 1
            tally.undercounts += charged < left
            tally.overcharged += charged > left
            tally.most_overcharged_tokens = max(tally.most_overcharged_tokens, charged - left)
            tally.lost_beliefs += belief != belief_after(charged)
    finally:
        zygote.close()
    return tally


if __name__ == "__main__":
    if sys.argv[1] == "zygote":
        be_zygote()
    else:
        work(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
