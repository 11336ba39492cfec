"""Kill an exchange of keys with SIGKILL before each touch of the disk, and see what the next opening finds.

    python rotation_driver.py WORKSPACE WITNESS SCRATCH one-commit|two-commits|on-opening kept-here|kept-elsewhere

On opening: the exchange is over but for the belief, as earlier versions could leave it, and the opening is killed that
seals the belief anew.

A touch is a statement of SQLite or a call that writes, syncs, links, renames or removes. The driver forks a process for
each one, over a fresh copy of workspace and witness, until an exchange comes to its end. Prints a JSON list.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from paclm.curator import rotation
from paclm.curator.custody import open_custody
from paclm.curator.master_key import KEY_FILE, KEY_VARIABLE, NEW_KEY_FILE
from paclm.curator.redacted import Redacted
from paclm.curator.sealed import SealedFile
from paclm.curator.secret import seal_belief, unseal_belief
from paclm.errors import LedgerWrongKey
from paclm.ledger import sqlite_file
from paclm.ledger.verify import verify
from paclm.worlds.layout import LEDGER_FILE
from paclm.worlds.workspace import Workspace

NEW = b"n" * 32
NEVER = 10**9
CALLS = ("write", "pwrite", "fsync", "fdatasync", "link", "replace", "unlink")


class Fate:
    """Counts touches of the disk, notes the last one on a pipe, and kills the process before the one it is told."""

    def __init__(self, last, pipe):
        self._left = last
        self._note = os.write
        self._pipe = pipe

    def touch(self, what):
        self._left -= 1
        if self._left == 0:
            self._note(self._pipe, " ".join(what.split()[:3]).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, custody):
        self.watch(custody.ledger.store.db)
        self.watch_calls()
        return custody

    def watch(self, db):
        db.set_trace_callback(self.touch)
        return db

    def watch_calls(self):
        for name in CALLS:
            setattr(os, name, self._told(name, getattr(os, name)))

    def _told(self, name, call):
        def told(*arguments, **options):
            self.touch(name)
            return call(*arguments, **options)

        return told


def exchange(path, witness, order, master, fate):
    """The exchange, told to the driver; in the order of earlier versions if that is asked for."""
    opened = []

    def open_and_begin(*arguments):
        opened.append(fate.begin(open_custody(*arguments)))
        return opened[0]

    def sign_first(ledger, keys, _, sealed_secret):
        ledger.rotate_key(keys.mac.reveal(), None, sealed_secret)
        if order == "two-commits":
            ledger.commit((), seal_belief(opened[0].belief, keys, opened[0].digest))

    rotation.open_custody = open_and_begin
    if order in ("two-commits", "key-alone"):
        rotation._sign_with = sign_first
    rotation.rotate_key(Workspace.open(path), master, witness)


def reopen(path, witness, fate):
    """An opening, told to the driver from its first touch of the ledger on."""
    workspace, open_writer = Workspace.open(path), sqlite_file.open_writer
    sqlite_file.open_writer = lambda place: fate.watch(open_writer(place))
    fate.watch_calls()
    open_custody(workspace, witness).ledger.close()


def live_and_die(path, witness, order, master, last):
    """What the process was about to do when it was killed; None if it came to its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            if order == "on-opening":
                reopen(path, witness, Fate(last, writing))
            else:
                exchange(path, witness, order, master, Fate(last, writing))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return None
    assert os.WTERMSIG(status) == signal.SIGKILL
    return said


def openings(old, is_kept_elsewhere):
    return [old, NEW.hex()] if is_kept_elsewhere else [None]


def look(path, witness, variables):
    """What the next opening finds, how many rows it had to add, and which slots of the witness its key opens then."""
    rows = verify(path / "curator" / LEDGER_FILE).num_events
    opened = []
    for value in variables:
        os.environ.pop(KEY_VARIABLE, None)
        if value is not None:
            os.environ[KEY_VARIABLE] = value
        try:
            custody = open_custody(Workspace.open(path), witness)
        except LedgerWrongKey:
            continue
        world = custody.secret._Secret__world.reveal()
        belief = hashlib.sha256(custody.belief.reveal().tobytes()).hexdigest()
        sealings = SealedFile(path / "curator").read()
        opened.append(
            {
                "key": custody.keys.id,
                "state": [world, belief, custody.ledger.account.spent_units, custody.ledger.account.tokens],
                "rows_added": custody.ledger.head.seq - rows,
                "sealed_for": list(sealings),
                "slots": [
                    unseal_belief(
                        bytes.fromhex(sealed.decode()), custody.keys, custody.digest, custody.ledger.num_worlds
                    )
                    is not None
                    for sealed in re.findall(rb'"belief":"([0-9a-f]+)"', witness.read_bytes())
                ],
            }
        )
        retired = sealings[custody.keys.id].retired_keys(custody.keys)
        custody.ledger.close()
        keys = [key.mac.reveal() for key in (custody.keys, *reversed(retired))]
        assert verify(path / "curator" / LEDGER_FILE, keys).intact
    os.environ.pop(KEY_VARIABLE, None)
    (found,) = opened  # one key opens it, and no other
    return {**found, "new_keys_in_clear": len(list((path / "curator").glob(f"*{NEW_KEY_FILE}*")))}


def main():
    template, template_witness, scratch = map(Path, sys.argv[1:4])
    order, is_kept_elsewhere = sys.argv[4], sys.argv[5] == "kept-elsewhere"
    old = (template / "curator" / KEY_FILE).read_text().strip()
    if is_kept_elsewhere:
        (template / "curator" / KEY_FILE).unlink()
    variables = openings(old, is_kept_elsewhere)
    if order == "on-opening":
        assert live_and_die(template, template_witness, "key-alone", None, NEVER) is None
    found, touch, last = [], "", 0
    while touch is not None:
        path, witness = scratch / str(last) / "clinic", scratch / str(last) / "witness"
        shutil.copytree(template, path)
        shutil.copy(template_witness, witness)
        if last:
            if is_kept_elsewhere:
                os.environ[KEY_VARIABLE] = old
            touch = live_and_die(path, witness, order, Redacted(NEW) if is_kept_elsewhere else None, last)
        found.append({"touch": touch, **look(path, witness, variables)})
        shutil.rmtree(path.parent)
        last += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
