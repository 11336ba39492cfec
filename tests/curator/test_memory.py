"""What holds the master key cannot be read by another process of the same user, who is not root."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from curator.memory import dumpable
from paclm.curator.master_key import keys_at_hand, new_key, read_key, write_key
from paclm.curator.redacted import hide_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_DUMPABLE")

ATTACH, DETACH = 16, 17
SAYS = """
import json, os, sys
sys.path.insert(0, {folder!r})
from curator.test_memory import become_ordinary, can_read, holder
holding, go, ready = holder()
for stage in ("dumpable", "hidden"):
    os.read(ready, 1)
    if (reader := os.fork()) == 0:
        become_ordinary()
        print(json.dumps({{stage: can_read(holding)}}), flush=True)
        os._exit(0)
    os.waitpid(reader, 0)
    os.write(go, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(holding, 0)[1]))
"""


def become_ordinary():
    """A process that is not root; setuid itself takes the flag away."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    dumpable(1)


def holder():
    """Fork a process that hides its memory when told; its id, where to write to it, and where it answers."""
    (go, tell), (hear, ready) = os.pipe(), os.pipe()
    if (pid := os.fork()) > 0:
        return pid, tell, hear
    become_ordinary()
    os.write(ready, b"1")
    os.read(go, 1)
    hide_memory()
    for name in ("maps", "status", "stat"):  # what it may need itself
        assert Path(f"/proc/self/{name}").read_bytes()
    assert os.listdir("/proc/self/fd")
    os.write(ready, b"1")
    os.read(go, 1)
    os._exit(0)


def can_read(pid):
    """What another process can have of this one, by /proc or by a debugger."""
    libc = ctypes.CDLL(None)
    found = {"trace": libc.ptrace(ATTACH, pid, 0, 0) == 0}
    if found["trace"]:
        os.waitpid(pid, 0x40000000)  # __WALL: no child of this process
        libc.ptrace(DETACH, pid, 0, 0)
    for name in ("mem", "environ", "maps"):
        try:
            with Path(f"/proc/{pid}/{name}").open("rb") as file:
                found[name] = file.read(0) == b""
        except OSError:
            found[name] = False
    return found


def test_another_process_of_the_same_user_reads_neither_memory_nor_environment():
    folder = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", SAYS.format(folder=folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    said = {name: value for line in done.stdout.splitlines() for name, value in json.loads(line).items()}
    assert said["dumpable"]["environ"]  # else nothing would be shown below
    assert said["hidden"] == {"trace": False, "mem": False, "environ": False, "maps": False}


@pytest.mark.parametrize("source", ["workspace", "variable", "file", "command"])
def test_the_memory_is_hidden_before_a_master_key_is_read(tmp_path, monkeypatch, source):
    (tmp_path / "master").write_text("7a" * 32)
    (tmp_path / "master").chmod(0o600)
    values = {"variable": ("PACLM_KEY", "7a" * 32), "file": ("PACLM_KEY_FILE", str(tmp_path / "master"))}
    values["command"] = ("PACLM_KEY_COMMAND", f"cat {tmp_path / 'master'}")
    if source in values:
        monkeypatch.setenv(*values[source])
    dumpable(1)
    keys_at_hand(tmp_path, may_create=True)
    assert dumpable() == 0


def test_the_memory_is_hidden_before_a_key_is_made_or_read_to_rotate_to_it(tmp_path):
    dumpable(1)
    fresh = new_key()
    assert dumpable() == 0
    write_key(tmp_path / "next", fresh)
    dumpable(1)
    read_key(tmp_path / "next")
    assert dumpable() == 0


def test_a_program_that_opens_a_curator_is_hidden(make, open_curator):
    dumpable(1)
    with open_curator(make()):
        assert dumpable() == 0
