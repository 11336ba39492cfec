"""The ledger's files: one name each, closed to others, and noticed when they vanish under a process that writes."""

import os

import pytest

from ledger.stores import IN_A_FILE
from paclm.errors import LedgerError, LedgerRolledBack, LedgerStopped, LedgerUnwritable

pytestmark = IN_A_FILE


def other(path, end=""):
    return path.with_name(path.name + end)


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "lock"])
@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_file_that_vanishes_in_use_stops_the_ledger_at_the_next_commit(setup, end, how):
    ledger = setup.with_steps(2)
    file = setup.lock if end == "lock" else other(setup.path, end)
    if how == "removed":
        file.unlink()
    elif how == "renamed":
        file.rename(file.with_name("elsewhere"))
    else:
        copy = file.with_name("copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
    with pytest.raises(LedgerUnwritable, match=rf"{file.name} was removed, renamed or replaced.*Nothing more"):
        setup.commit(ledger, 3)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 4)
    ledger.close()


def test_rows_that_went_into_a_removed_log_are_missed_at_the_next_opening(setup):
    ledger = setup.with_steps(2)
    other(setup.path, "-wal").unlink()
    with pytest.raises(LedgerUnwritable):
        setup.commit(ledger, 3)
    killed = {file: file.read_bytes() for file in (setup.path, setup.lock)}
    ledger.close()  # SQLite writes its log back, which a killed process does not
    for file, content in killed.items():
        file.write_bytes(content)
    with pytest.raises(LedgerRolledBack, match="row"):
        setup.open()


def test_a_ledger_that_nobody_touches_goes_on(setup):
    ledger = setup.with_steps(3)
    ledger.store.settle()  # the log is emptied, and stays the same file
    setup.commit(ledger, 4)
    ledger.close()
    setup.resume(5).close()


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["path", "lock"])
def test_a_ledger_with_a_second_name_is_refused(setup, link, name):
    setup.with_steps(1).close()
    file = getattr(setup, name)
    elsewhere = setup.folder.parent / "elsewhere"
    file.rename(elsewhere)
    link(elsewhere, file)
    with pytest.raises(LedgerError, match=r"one name"):
        setup.open()
    file.unlink()
    elsewhere.rename(file)
    setup.resume(2).close()


def test_a_linked_folder_is_one_place(setup):
    setup.with_steps(1).close()
    real = setup.folder.with_name("real")
    setup.folder.rename(real)
    setup.folder.symlink_to(real)
    with setup.open():
        setup.folder = real
        setup.path = real / "ledger.sqlite"
        with pytest.raises(LedgerError, match="One secret has one writer"):
            setup.open()


@pytest.mark.parametrize("place", ["folder", "path", "lock", "-wal"])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o020, 0o002])
def test_what_others_can_read_or_write_is_refused_with_the_command_that_closes_it(setup, place, mode):
    setup.with_steps(1).close()
    log = other(setup.path, "-wal")
    log.touch(0o600)
    file = log if place == "-wal" else getattr(setup, place)
    file.chmod(file.stat().st_mode & 0o777 | mode)
    with pytest.raises(LedgerError, match=r"open to other users.*chmod -R go-rwx"):
        setup.open()
