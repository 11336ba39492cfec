"""The lock and its note: one writer at a time, and missing rows are noticed without a witness."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from ledger.stores import IN_A_FILE
from paclm.errors import LedgerBusy, LedgerRolledBack, LedgerStopped, LedgerUnwritable
from paclm.ledger import lock as locking
from paclm.ledger.lock import WriterLock
from paclm.ledger.verify import verify

pytestmark = IN_A_FILE

WORKER = """
import os, sys
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
ledger = Ledger.open({path!r}, bytes(range(32)))
for n in range(5):
    ledger.commit([Usage("a", 1, 1, 1, {price})], b"sealed %d" % n)
os.kill(os.getpid(), 9)
"""

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""

HUGE = b"999999     \n" + b"9" * 20 + b" " + b"a" * 64 + b"\n"
"""A note of a row number that no database can have."""


@pytest.fixture
def killed(setup):
    """A ledger whose five newest rows are in the write-ahead log alone: its process was killed."""
    setup.with_steps(3).close()
    program = WORKER.format(path=str(setup.path), price=setup.price)
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    return setup


@pytest.fixture
def without_log(killed):
    """The same after somebody removed the log: row 9 was the newest, and row 4 is now."""
    for end in ("-wal", "-shm"):
        killed.path.with_name(killed.path.name + end).unlink()
    return killed


def test_a_second_writer_is_refused_with_the_pid_of_the_first(setup):
    with setup.create():
        with pytest.raises(LedgerBusy, match=r"in this process.*close\(\)"):
            setup.open()
        program = f"from paclm.ledger.ledger import Ledger; Ledger.open({str(setup.path)!r}, bytes(range(32)))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert re.search(f"LedgerBusy.*process {os.getpid()}", done.stderr)
    setup.open().close()


def test_a_holder_in_another_container_with_the_same_pid_is_not_taken_for_this_process(setup):
    """Over one volume, the processes of two containers can both be number 1."""
    setup.with_steps(1).close()
    command = [sys.executable, "-c", HOLDER, setup.lock]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    other.stdout.readline()
    try:
        with pytest.raises(LedgerBusy, match=f"by process {os.getpid()}"):
            setup.open()
    finally:
        other.communicate("\n", timeout=60)


def test_after_a_kill_nothing_is_missing(killed):
    log = killed.path.with_name("ledger.sqlite-wal")
    assert log.stat().st_size > 0
    with killed.open() as ledger:
        assert ledger.account.tokens == 17
        assert log.stat().st_size == 0  # no row is in the log alone


def test_removing_the_log_after_a_kill_restores_no_budget(without_log):
    setup = without_log
    for keys in (None, [setup.key]):
        report = setup.verify(keys)
        assert not report.intact
        assert re.search("row 4.*row 9", report.problem)
        assert report.contents.state.tokens == 12
    for _ in range(2):  # a refusal keeps the note
        with pytest.raises(LedgerRolledBack, match=r"row 4.*row 9.*-wal"):
            setup.open()
    with pytest.raises(LedgerRolledBack, match="row 9"):
        setup.replace_witness(None)
    with pytest.raises(LedgerRolledBack, match="row 9"):
        setup.open(witness=setup.witness)
    assert not setup.witness.exists()
    setup.adopt()
    assert setup.verify([setup.key]).intact
    for _ in range(2):
        assert setup.resume().account.remaining_units == 0


def test_a_backup_beside_its_ledger_is_intact_though_it_is_older(setup):
    with setup.with_steps(3) as ledger:
        setup.back_up(setup.folder / "monday.sqlite")
        setup.commit(ledger, 4)
        report = verify(setup.folder / "monday.sqlite", [setup.key])
    assert report.intact
    assert report.is_copy


def test_verifying_while_rows_are_written_misses_none(setup):
    with setup.with_steps(1) as ledger:
        writing = threading.Thread(target=lambda: [ledger.commit(setup.step(1), b"sealed %d" % n) for n in range(300)])
        writing.start()
        reports = []
        while writing.is_alive():
            reports.append(setup.verify())
        writing.join()
    assert [report.problem for report in reports if not report.intact] == []


def test_another_history_is_refused(setup, tmp_path):
    setup.with_steps(2).close()
    shutil.copytree(setup.folder, tmp_path / "second")
    setup.resume(3)
    ours, setup.path = setup.path, tmp_path / "second" / "ledger.sqlite"
    with setup.open() as ledger:
        ledger.commit(setup.step(2), b"other 3")
        ledger.commit(setup.step(2), b"other 4")
    shutil.copy(setup.path, ours)
    setup.path = ours
    with pytest.raises(LedgerRolledBack, match="row 4"):
        setup.open()


@pytest.mark.parametrize("content", [None, b"", b"999999\n", b"999999     \nno note at all\n", bytes(100), HUGE])
def test_a_lock_without_a_note_refuses_nothing(killed, content):
    killed.lock.unlink()
    if content is not None:
        killed.lock.write_bytes(content)
        killed.lock.chmod(0o600)
    assert killed.resume().account.tokens == 17


def test_the_note_may_be_behind_the_ledger(setup):
    """As after a power failure: the log is synced, and the note is not."""
    setup.with_steps(3).close()
    behind = setup.lock.read_bytes()
    setup.resume(4)
    setup.lock.write_bytes(behind)
    setup.open().close()
    assert setup.lock.read_bytes() != behind


def test_a_new_ledger_is_not_compared_with_the_note_of_the_one_before(setup):
    setup.with_steps(3).close()
    setup.path.unlink()
    setup.create().close()
    setup.open().close()


def test_a_witness_that_was_rolled_back_with_its_ledger_is_refused(setup, tmp_path):
    setup.with_steps(2, witness=setup.witness).close()
    ledger_copy, witness_copy = setup.copy(), shutil.copy(setup.witness, tmp_path / "old.witness")
    setup.resume(3, witness=setup.witness)
    setup.put(ledger_copy)
    shutil.copy(witness_copy, setup.witness)
    for attempt in (setup.open, setup.adopt):
        with pytest.raises(LedgerRolledBack, match=r"row 4.*row 5"):
            attempt(witness=setup.witness)
    setup.adopt()
    setup.open().close()


def test_a_second_writer_after_the_lock_was_removed_is_not_taken_for_damage(setup):
    first = setup.with_steps(1)
    setup.lock.unlink()
    with setup.open() as second:
        second.commit(setup.step(), b"second 2")
    with pytest.raises(LedgerBusy, match="lock"):
        setup.commit(first, 2)
    with pytest.raises(LedgerStopped):
        setup.commit(first, 2)
    first.close()
    assert setup.resume().sealed_belief == b"second 2"


def failing(*_):
    raise OSError(5, "Input/output error")


def test_a_note_that_cannot_be_written_stops_the_ledger(setup, monkeypatch):
    with setup.with_steps(1) as ledger:
        monkeypatch.setattr(os, "pwrite", failing)
        with pytest.raises(LedgerUnwritable, match=r"ledger\.lock"):
            setup.commit(ledger, 2)
        with pytest.raises(LedgerStopped):
            setup.commit(ledger, 2)


def open_descriptors_of(path):
    """How many descriptors of this process are that file."""
    descriptors = [f"/dev/fd/{number}" for number in range(3, 256)]
    return sum(os.path.exists(name) and os.path.samefile(name, path) for name in descriptors)


def test_a_failing_disk_keeps_no_lock_and_no_descriptor(tmp_path, monkeypatch):
    """Where a lock is half taken, where it is refused, and where it is released."""
    path = tmp_path / "ledger.lock"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        with pytest.raises(LedgerUnwritable):
            WriterLock(path)
    assert open_descriptors_of(path) == 0
    lock, held = WriterLock(path), set(locking._HELD_HERE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        with pytest.raises(OSError, match="Input/output error"):
            WriterLock(path)
        assert open_descriptors_of(path) == 1
        lock.release()
    assert len(held - locking._HELD_HERE) == 1
    assert open_descriptors_of(path) == 0
    WriterLock(path).release()
