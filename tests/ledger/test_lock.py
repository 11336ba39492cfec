"""The lock's memory: a ledger that lost its newest rows is noticed without a witness, and there is a way out."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from paclm.errors import LedgerBusy, LedgerRolledBack, LedgerStopped, LedgerUnwritable
from paclm.ledger import lock as locking
from paclm.ledger.lock import WriterLock
from paclm.ledger.recovery import adopt_restored, backup, replace_witness
from paclm.ledger.verify import verify

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
"""A note of a row that no database can have."""


@pytest.fixture
def killed(books):
    """A ledger whose five newest rows are in the write-ahead log alone: its process was killed."""
    books.with_steps(3).close()
    program = WORKER.format(path=str(books.path), price=books.price)
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    return books


def test_who_has_it_open_already_is_told_to_close_it_and_not_to_stop_the_process(books):
    with books.with_steps(1), pytest.raises(LedgerBusy, match=r"in this process.*close\(\)"):
        books.open()
    books.open().close()  # a refusal lets go of nothing, and a release of all


def test_a_holder_elsewhere_with_this_processs_number_is_not_taken_for_it(books):
    """In two containers over one volume, both processes can be number 1."""
    books.with_steps(1).close()
    lock = books.path.with_name("ledger.lock")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    other.stdout.readline()
    try:
        with pytest.raises(LedgerBusy, match=f"by process {os.getpid()}"):
            books.open()
    finally:
        other.communicate("\n", timeout=60)


def remove_log(books):
    for end in ("-wal", "-shm"):
        books.path.with_name(books.path.name + end).unlink()


def test_after_a_kill_nothing_is_missing(killed):
    with killed.open() as ledger:
        assert ledger.account.tokens == 17


def test_removing_the_log_after_a_kill_gives_no_budget_back(killed):
    remove_log(killed)
    for _ in range(2):  # a refusal forgets nothing
        with pytest.raises(LedgerRolledBack, match=r"row 4.*row 9.*-wal"):
            killed.open()
    with pytest.raises(LedgerRolledBack, match="row 9"):
        replace_witness(killed.path, killed.key, confirmed_by="ada", witness=None)


def test_a_ledger_that_lost_its_log_opens_once_it_is_adopted(killed):
    remove_log(killed)
    adopt_restored(killed.path, killed.key, confirmed_by="ada")
    for _ in range(2):
        with killed.open() as ledger:
            assert ledger.account.remaining_units == 0


def test_whoever_verifies_hears_of_lost_rows_before_anything_opens(killed):
    assert verify(killed.path, [killed.key]).intact
    remove_log(killed)
    for keys in (None, [killed.key]):
        report = verify(killed.path, keys)
        assert not report.intact
        assert re.search("row 4.*row 9", report.problem)
        assert report.contents.state.tokens == 12
    adopt_restored(killed.path, killed.key, confirmed_by="ada")
    assert verify(killed.path, [killed.key]).intact


def test_a_backup_beside_its_ledger_is_intact_though_it_is_older(books):
    with books.with_steps(3) as ledger:
        backup(books.path, books.folder / "monday.sqlite")
        ledger.commit(books.step(), b"sealed 4")
        report = verify(books.folder / "monday.sqlite", [books.key])
    assert report.intact
    assert report.is_copy


def test_whoever_verifies_while_rows_are_written_misses_none(books):
    with books.with_steps(1) as ledger:
        writing = threading.Thread(target=lambda: [ledger.commit(books.step(1), b"sealed %d" % n) for n in range(300)])
        writing.start()
        reports = []
        while writing.is_alive():
            reports.append(verify(books.path))
        writing.join()
    assert [report.problem for report in reports if not report.intact] == []


def test_a_stale_ledger_makes_no_witness(killed):
    remove_log(killed)
    with pytest.raises(LedgerRolledBack, match="row 9"):
        killed.open(witness=killed.witness)
    assert not killed.witness.exists()


def test_another_history_is_refused(books, tmp_path):
    books.with_steps(2).close()
    shutil.copytree(books.folder, tmp_path / "second")
    with books.open() as ledger:
        ledger.commit(books.step(), b"sealed 3")
    ours = books.path
    books.path = tmp_path / "second" / "ledger.sqlite"
    with books.open() as ledger:
        ledger.commit(books.step(2), b"other 3")
        ledger.commit(books.step(2), b"other 4")
    shutil.copy(books.path, ours)
    books.path = ours
    with pytest.raises(LedgerRolledBack, match="row 4"):
        books.open()


@pytest.mark.parametrize(
    "content", [None, b"", b"999999\n", b"999999     \nnothing that makes sense\n", bytes(100), HUGE]
)
def test_a_lock_that_knows_nothing_refuses_nothing(killed, content):
    lock = killed.folder / "ledger.lock"
    lock.unlink()
    if content is not None:
        lock.write_bytes(content)
        lock.chmod(0o600)
    with killed.open() as ledger:
        assert ledger.account.tokens == 17


def test_the_lock_may_be_behind_the_ledger(books):
    """As after a power failure: the log is synced, the lock's memory is not."""
    books.with_steps(3).close()
    lock = books.folder / "ledger.lock"
    behind = lock.read_bytes()
    with books.open() as ledger:
        ledger.commit(books.step(), b"sealed 4")
    lock.write_bytes(behind)
    books.open().close()
    assert lock.read_bytes() != behind


def test_a_new_ledger_is_not_measured_by_the_one_before(books):
    books.with_steps(3).close()
    books.path.unlink()
    books.create().close()
    books.open().close()


def test_an_open_ledger_keeps_its_history_out_of_the_log(killed):
    log = killed.path.with_name("ledger.sqlite-wal")
    assert log.stat().st_size > 0
    with killed.open():
        assert log.stat().st_size == 0


def test_adopting_with_a_witness_that_was_put_back_too_is_refused(books, tmp_path):
    books.with_steps(2, witness=books.witness).close()
    shutil.copy(books.path, tmp_path / "old.sqlite")
    shutil.copy(books.witness, tmp_path / "old.witness")
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 3")
    shutil.copy(tmp_path / "old.sqlite", books.path)
    shutil.copy(tmp_path / "old.witness", books.witness)
    with pytest.raises(LedgerRolledBack, match=r"row 4.*row 5"):
        adopt_restored(books.path, books.key, confirmed_by="ada", witness=books.witness)
    adopt_restored(books.path, books.key, confirmed_by="ada")
    books.open().close()


def test_a_second_writer_after_the_lock_was_removed_is_told_apart_from_damage(books):
    first = books.with_steps(1)
    (books.folder / "ledger.lock").unlink()
    with books.open() as second:
        second.commit(books.step(), b"second 2")
    with pytest.raises(LedgerBusy, match="lock"):
        first.commit(books.step(), b"first 2")
    with pytest.raises(LedgerStopped):
        first.commit(books.step(), b"first 2")
    first.close()
    with books.open() as ledger:
        assert ledger.sealed_belief == b"second 2"


def test_a_lock_that_cannot_be_written_stops_the_ledger(books, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with books.with_steps(1) as ledger:
        monkeypatch.setattr(os, "pwrite", fail)
        with pytest.raises(LedgerUnwritable, match=r"ledger\.lock"):
            ledger.commit(books.step(), b"sealed 2")
        with pytest.raises(LedgerStopped):
            ledger.commit(books.step(), b"sealed 2")


def failing_fstat(_):
    raise OSError(5, "Input/output error")


def open_descriptors_of(path):
    """How many descriptors of this process are that file."""
    found = path.stat()
    count = 0
    for descriptor in range(3, 256):
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue
        count += (status.st_dev, status.st_ino) == (found.st_dev, found.st_ino)
    return count


def test_a_release_lets_the_next_writer_in_also_where_the_disk_no_longer_answers(tmp_path, monkeypatch):
    path = tmp_path / "ledger.lock"
    lock, held = WriterLock(path), set(locking._HELD_HERE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing_fstat)
        lock.release()
    assert len(held - locking._HELD_HERE) == 1
    assert open_descriptors_of(path) == 0
    WriterLock(path).release()


def test_a_lock_that_could_not_be_taken_in_full_is_not_held(tmp_path, monkeypatch):
    path = tmp_path / "ledger.lock"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing_fstat)
        with pytest.raises(LedgerUnwritable):
            WriterLock(path)
    assert open_descriptors_of(path) == 0
    WriterLock(path).release()


def test_a_refusal_keeps_no_descriptor_also_where_the_disk_no_longer_answers(tmp_path, monkeypatch):
    path = tmp_path / "ledger.lock"
    lock = WriterLock(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing_fstat)
        with pytest.raises(OSError, match="Input/output error"):
            WriterLock(path)
    assert open_descriptors_of(path) == 1
    lock.release()
