"""A server in a process of its own, as an operator starts it, that is killed under its clients."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from server.live import ledger_rows
from server.load import Received, ask_for
from server.stepped import wait_until

TOKENS = 40
"""Of an answer; a client has one under way, so that no more can be on its way to it."""
STEPS_IN_FLIGHT = 10
"""One that was committed and not handed out, and those that a busy machine handed out and has not sent yet."""


def serve_process(path, **environment):
    """`paclm serve` as an operator starts it; its address and the admin key that it prints once."""
    command = [sys.executable, "-m", "paclm", "serve", str(path), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said, key = "", None
    while key is None:
        line = process.stderr.readline()
        assert line, said
        said += line
        key = re.search(r"admin key +(paclm-\S+)", said)
    threading.Thread(target=process.communicate, daemon=True).start()  # a full pipe would stop the server
    url = re.search(r"http://[0-9.:]+", said)
    return process, url[0], key[1]


def front_of(process):
    """The process id of the front that this server has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_under_load(path, *, clients, seconds):
    """What clients received from a server that was killed, and what the ledger has."""
    process, url, key = serve_process(path)
    got = Received()

    def kill():
        wait_until(lambda: got.tokens > 0)  # a slow machine may need longer than that for its first token
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Timer(seconds, kill)
    killer.start()
    try:
        ask_for(url, key, clients=clients, seconds=seconds + 5, tokens=TOKENS, got=got)
    finally:
        killer.join()
        process.wait(60)
        while not process.stderr.closed:
            time.sleep(0.01)
    return got, ledger_rows(path)
