"""Does a commit reach the disk before its tokens leave? Traced at the system calls, because no kill can show it.

The portable half (SQLite's settings, read back) is in `test_ledger.py`; this half needs strace and runs in
`make stress`.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from ledger.stores import IN_A_FILE

pytestmark = IN_A_FILE
WORKER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from paclm.ledger import head_notes, sqlite_file
if {broken!r} == "ledger":
    real = sqlite_file._make_durable
    def forgetful(db, path):
        real(db, path)
        db.execute("PRAGMA synchronous=OFF")
    sqlite_file._make_durable = forgetful
if {broken!r} == "witness":
    head_notes._sync = lambda descriptor: None
import kills
path, second = Path({path!r}), Path({second!r})
kills.create(path, second)
import os
count, real_write = 0, os.write
def write(descriptor, content):
    global count
    count += 1
    real_write(descriptor, content)
    if count == 40:
        os._exit(0)
os.write = write
kills.work(path, {order!r}, second)
"""
CALL = re.compile(r"(?:\[pid\s+\d+\] )?(?:\d+ +)?(\w+)\((\d+)<([^>]*)>(.*)")


def unsynced_releases(trace):
    """Releases with bytes of the ledger's log or of its witness that were written and not yet synced."""
    dirty, bad = set(), 0
    for line in trace.splitlines():
        call = CALL.match(line)
        if call is None:
            continue
        name, descriptor, path, rest = call.groups()
        if name in ("fsync", "fdatasync"):
            dirty.discard(path)
        elif path.endswith(("-wal", ".witness", ".sqlite")):
            dirty.add(path)
        elif descriptor == "1" and '"left ' in rest:
            bad += bool(dirty)
    return bad


def trace(setup, order="commit-first", broken=""):
    if shutil.which("strace") is None:
        pytest.fail("This test traces system calls. Install strace, for example: apt-get install strace")
    program = WORKER.format(
        tests=os.path.dirname(__file__), path=str(setup.path), second=str(setup.witness), order=order, broken=broken
    )
    log = setup.folder / "trace"
    calls = "trace=fsync,fdatasync,write,pwrite64"
    command = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", calls, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("left") == 40
    return log.read_text()


def test_the_reader_of_traces_tells_synced_from_unsynced():
    synced = '7 pwrite64(5</x/ledger.sqlite-wal>, ""..., 24, 0) = 24\n7 fdatasync(5</x/ledger.sqlite-wal>) = 0\n'
    release = '7 write(1<pipe:[9]>, "left 3\\n", 7) = 7\n'
    assert unsynced_releases(synced + release) == 0
    assert unsynced_releases(synced.splitlines()[0] + "\n" + release) == 1


@pytest.mark.stress
def test_every_commit_is_synced_before_its_tokens_leave(setup):
    found = trace(setup)
    assert "-wal>" in found
    assert ".witness>" in found
    assert unsynced_releases(found) == 0


@pytest.mark.stress
@pytest.mark.parametrize("broken", ["ledger", "witness"])
def test_a_missing_sync_is_caught(setup, broken):
    assert unsynced_releases(trace(setup, broken=broken)) > 30
