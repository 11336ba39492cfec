"""Verification reads only, needs no key, and works while the ledger is in use and on read-only media."""

from __future__ import annotations

import hashlib
import resource
import shutil
import sqlite3
from contextlib import closing

import pytest

from paclm.errors import (
    LedgerBusy,
    LedgerDamaged,
    LedgerFull,
    LedgerMissing,
    LedgerRolledBack,
    LedgerUnwritable,
)
from paclm.ledger import sqlite_file
from paclm.ledger.recovery import backup
from paclm.ledger.store import Store
from paclm.ledger.verify import remaining_tokens, verify, witness_on_record


def test_an_intact_ledger_is_verified_with_and_without_its_key(books):
    books.with_steps(5).close()
    for keys in (None, [books.key]):
        report = verify(books.path, keys)
        assert report.intact
        assert report.num_events == 6
        assert report.macs_checked == (keys is not None)
        assert report.contents.state.tokens == 20


def test_verification_works_while_the_ledger_is_in_use(books):
    with books.with_steps(5) as ledger:
        assert verify(books.path).contents.head == ledger.head
        ledger.commit(books.step(), b"sealed 6")
        assert verify(books.path, [books.key]).contents.head == ledger.head


def test_verification_changes_no_byte(books):
    books.with_steps(5).close()
    before = hashlib.sha256(books.path.read_bytes()).digest()
    verify(books.path, [books.key])
    assert hashlib.sha256(books.path.read_bytes()).digest() == before
    reader = sqlite_file.open_reader(books.path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("UPDATE belief SET seq = 0")
    reader.close()


def test_a_crash_image_is_verified_from_its_log(books, tmp_path):
    image = tmp_path / "image"
    image.mkdir(mode=0o700)
    with books.with_steps(5):
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            shutil.copy(books.folder / name, image / name)
    report = verify(image / "ledger.sqlite", [books.key])
    assert report.intact
    assert report.num_events == 6


def test_a_ledger_on_read_only_media_is_verified(books, monkeypatch):
    """SQLite cannot make its side files there; the file is then read as it stands."""
    books.with_steps(2).close()
    real, asked = sqlite3.connect, []

    class NoSideFiles(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if "immutable" not in asked[-1]:
                raise sqlite3.OperationalError("unable to open database file")
            return super().execute(sql, *arguments)

    def connect(name, **options):
        if not str(name).startswith("file:"):
            return real(name, **options)
        asked.append(name)
        return real(name, **options, factory=NoSideFiles)

    monkeypatch.setattr(sqlite_file.sqlite3, "connect", connect)
    with closing(sqlite_file.open_reader(books.path)) as reader:
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (3,)
    assert len(asked) == 2


@pytest.mark.parametrize("look", [verify, remaining_tokens])
def test_a_full_disk_is_an_error_and_no_verdict(books, look):
    """A limit on file sizes: SQLite's side file cannot grow, as on a full disk. The ledger itself is whole."""
    books.with_steps(2).close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(LedgerFull, match="SQLITE_IOERR_SHMSIZE"):
            look(books.path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert verify(books.path, [books.key]).intact


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("SQLITE_FULL", LedgerFull), ("SQLITE_BUSY", LedgerBusy), ("SQLITE_IOERR_READ", LedgerUnwritable)),
        *(("SQLITE_CANTOPEN", LedgerUnwritable), ("SQLITE_CORRUPT", None), ("SQLITE_NOTADB", None)),
        *(("SQLITE_IOERR_CORRUPTFS", None), ("SQLITE_ERROR", None)),
    ],
)
def test_only_what_speaks_against_the_ledger_itself_is_a_verdict(books, monkeypatch, name, kind):
    books.with_steps(2).close()

    def fail(store):
        error = sqlite3.OperationalError("something")
        error.sqlite_errorname = name
        with store._translated():
            raise error

    monkeypatch.setattr(Store, "check_pages", fail)
    if kind is None:
        report = verify(books.path)
        assert not report.intact
        assert name in report.problem
    else:
        with pytest.raises(kind, match=name):
            verify(books.path)


@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_a_side_file_that_was_replaced_is_thought_of(books, end):
    books.with_steps(2).close()
    books.path.with_name(books.path.name + end).mkdir()
    with pytest.raises(LedgerUnwritable, match="-wal, -shm"):
        books.open()
    if end == "-wal":  # without a log, nobody needs its index for reading
        with pytest.raises(LedgerUnwritable, match="-wal, -shm"):
            verify(books.path)


def test_a_missing_ledger_is_an_error_and_no_report(tmp_path):
    with pytest.raises(LedgerMissing):
        verify(tmp_path / "ledger.sqlite")


def test_a_file_that_is_no_database_leaves_no_connection_open(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 4)
    opened, real = [], sqlite3.connect

    def connect(*arguments, **options):
        opened.append(real(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite_file.sqlite3, "connect", connect)
    with pytest.raises(LedgerDamaged):
        Store.open_reader(path)
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    assert opened


def test_what_remains_is_not_told_from_a_file_that_was_put_back(books, tmp_path):
    with books.with_steps(2, witness=books.witness) as ledger:
        assert remaining_tokens(books.path) == ledger.account.remaining_tokens(books.settings.per_token)
    copy = shutil.copy(books.path, tmp_path / "by_hand.sqlite")
    with books.open(witness=books.witness) as ledger:
        ledger.commit(books.step(), b"sealed 3")
        name = ledger.state.witness
    shutil.copy(copy, books.path)
    assert not verify(books.path).intact
    with pytest.raises(LedgerRolledBack, match="row"):
        remaining_tokens(books.path)
    assert witness_on_record(books.path) == name


def test_what_remains_is_told_from_a_copy_that_says_it_is_one(books, tmp_path):
    with books.with_steps(2) as ledger:
        backup(books.path, tmp_path / "copy.sqlite")
        before = ledger.account.remaining_tokens(books.settings.per_token)
        ledger.commit(books.step(), b"sealed 3")
    shutil.copy(tmp_path / "copy.sqlite", books.path)
    assert remaining_tokens(books.path) == before
