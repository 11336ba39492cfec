"""Kill a serving process with SIGKILL at random instants, restart it, and compare what left with the ledger.

    python kill_driver.py WORKSPACE KILLS right|release-first|belief-forgotten SEED

The driver loads the engine once and forks a worker per life. A worker serves four streams through the whole curator
and tells the driver over a pipe, in this order: what it is about to commit (row, hash of the belief), and each token
after it has left. After every kill the driver opens the workspace itself and notes what the ledger says. Prints JSON.
"""

import hashlib
import json
import os
import random
import select
import signal
import sys
import time

STREAMS = 4
TOKENS = 30


def serve(curator, pipe, order):
    custody = curator._custody
    original = custody.ledger.commit

    def say(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())  # short lines: one write, whole or not at all

    def commit(entries, sealed):
        entries = list(entries)
        if order == "release-first":  # what must never be: tokens are out before they are paid for
            for entry in entries:
                for _ in range(entry.tokens):
                    say("token", entry.units // entry.tokens)
            time.sleep(60)  # the kill falls in here for certain, and not where all is paid again
        original(entries, None if order == "belief-forgotten" else sealed)

    original_commit = type(custody).commit

    def announced(self, entries, belief):
        say("commit", custody.ledger.head.seq + 1, hashlib.sha256(belief.reveal().tobytes()).hexdigest())
        original_commit(self, entries, belief)

    custody.ledger.commit = commit
    type(custody).commit = announced
    while True:
        while curator.num_active < STREAMS:
            curator.submit(curator.request("the patient", TOKENS))
        for stream, _ in curator.step():
            if order != "release-first":
                say("token", stream.charged_units // len(stream.tokens))


def live_and_die(path, engine, tokenizer, order, chance):
    """One life of a worker: what it said until it was killed."""
    from paclm import Curator

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        serve(Curator.open(path, engine=engine, tokenizer=tokenizer), writing, order)
    os.close(writing)
    said = b""
    while b"token" not in said:  # every kill comes after at least one token has left
        if not select.select([reading], [], [], 60.0)[0]:
            raise SystemExit("a worker said nothing for a minute")
        chunk = os.read(reading, 65536)
        if not chunk:
            raise SystemExit(f"a worker died by itself: {os.waitpid(child, 0)}")
        said += chunk
    time.sleep(chance.choice([0.0, chance.random() * 0.01, chance.random() * 0.08]))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while chunk := os.read(reading, 65536):
        said += chunk
    os.close(reading)
    lines = [line.split() for line in said.decode().splitlines()]
    return {
        "was_killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
        "left_units": [int(line[1]) for line in lines if line[0] == "token"],
        "beliefs": {int(line[1]): line[2] for line in lines if line[0] == "commit"},
    }


def look(workspace):
    """What a restart finds: units spent, the newest row, and the hash of the belief."""
    from paclm.curator.custody import open_custody

    custody = open_custody(workspace)
    spent, row = custody.ledger.account.spent_units, custody.ledger.head.seq
    found = hashlib.sha256(custody.belief.reveal().tobytes()).hexdigest()
    custody.ledger.close()
    return spent, row, found


def main():
    path, kills, order, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    import torch
    from transformers.utils import logging

    from paclm.engine.base_model import base_of, load_tokenizer
    from paclm.engine.loading import open_engine
    from paclm.worlds.workspace import Workspace

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # no thread pools before a fork
    workspace = Workspace.open(path)
    engine = open_engine(workspace, workspace.mechanism().support_size)
    tokenizer = load_tokenizer(base_of(workspace))
    chance = random.Random(seed)
    report = {"kills": 0, "undercounts": 0, "worst_overcharge": 0, "wrong_beliefs": 0, "left_tokens": 0}
    left_units = lost_units = 0
    _, row, found = look(workspace)  # makes ledger and secret
    beliefs = {row: found}
    for _ in range(kills):
        life = live_and_die(path, engine, tokenizer, order, chance)
        beliefs.update(life["beliefs"])
        left_units += sum(life["left_units"])
        spent, row, found = look(workspace)
        unpaid = left_units - spent
        report["kills"] += life["was_killed"]
        report["left_tokens"] += len(life["left_units"])
        report["undercounts"] += unpaid > 0
        price = life["left_units"][0]
        report["worst_overcharge"] = max(report["worst_overcharge"], (-unpaid - lost_units) / price)
        report["wrong_beliefs"] += beliefs.get(row) != found
        lost_units = -unpaid
    report["price_units"] = price
    report["spent_tokens"] = spent / price
    print(json.dumps(report))


if __name__ == "__main__":
    main()
