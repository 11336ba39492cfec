"""Verification reads only, needs no key, and works while the ledger is in use and on read-only media."""

import resource
import shutil
import sqlite3
import threading
from contextlib import closing

import pytest

from ledger.stores import IN_A_FILE
from paclm.errors import LedgerBusy, LedgerDamaged, LedgerError, LedgerFull, LedgerRolledBack, LedgerUnwritable
from paclm.ledger import sqlite_file
from paclm.ledger.address import open_reader
from paclm.ledger.sqlite_store import SqliteStore
from paclm.ledger.verify import remaining_tokens, verify, witness_on_record


def test_an_intact_ledger_is_verified_with_and_without_its_key_and_changes_no_byte(setup):
    setup.with_steps(5).close()
    before = setup.content()
    for keys in (None, [setup.key]):
        report = setup.verify(keys)
        assert report.intact
        assert report.num_events == 6
        assert report.macs_checked == (keys is not None)
        assert report.contents.state.tokens == 20
    assert setup.content() == before
    with closing(open_reader(setup.address)) as store, pytest.raises(setup.database_error, match=r"read-?only"):
        store.db.execute(setup.forbidden)


@IN_A_FILE
def test_a_ledger_in_use_and_a_crash_image_are_verified_from_the_log(setup, tmp_path):
    image = tmp_path / "image"
    image.mkdir(mode=0o700)
    with setup.with_steps(5) as ledger:
        assert setup.verify().contents.head == ledger.head
        setup.commit(ledger, 6)
        assert setup.verify([setup.key]).contents.head == ledger.head
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            shutil.copy(setup.folder / name, image / name)
    report = verify(image / "ledger.sqlite", [setup.key])
    assert (report.intact, report.num_events) == (True, 7)


@IN_A_FILE
def test_a_ledger_on_read_only_media_is_verified(setup, monkeypatch):
    """SQLite cannot make its side files there; the file is then read as it is."""
    setup.with_steps(2).close()
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
    with closing(sqlite_file.open_reader(setup.path)) as reader:
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (3,)
    assert len(asked) == 2


@IN_A_FILE
@pytest.mark.parametrize("look", [verify, remaining_tokens])
def test_a_full_disk_is_an_error_and_no_verdict(setup, look):
    """A limit on file sizes: SQLite's side file cannot grow, as on a full disk. The ledger itself is whole."""
    setup.with_steps(2).close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(LedgerFull, match="SQLITE_IOERR_SHMSIZE"):
            look(setup.path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert setup.verify([setup.key]).intact


@IN_A_FILE
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("SQLITE_FULL", LedgerFull), ("SQLITE_BUSY", LedgerBusy), ("SQLITE_IOERR_READ", LedgerUnwritable)),
        *(("SQLITE_CANTOPEN", LedgerUnwritable), ("SQLITE_CORRUPT", None), ("SQLITE_NOTADB", None)),
        *(("SQLITE_IOERR_CORRUPTFS", None), ("SQLITE_ERROR", None)),
    ],
)
def test_an_error_of_the_disk_is_no_verdict_on_the_ledger(setup, monkeypatch, name, kind):
    setup.with_steps(2).close()

    def fail(store):
        error = sqlite3.OperationalError("something")
        error.sqlite_errorname = name
        with store._translated():
            raise error

    monkeypatch.setattr(SqliteStore, "check_pages", fail)
    if kind is None:
        report = setup.verify()
        assert not report.intact
        assert name in report.problem
    else:
        with pytest.raises(kind, match=name):
            setup.verify()


@IN_A_FILE
@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_a_replaced_side_file_is_named(setup, end):
    setup.with_steps(2).close()
    setup.path.with_name(setup.path.name + end).mkdir()
    with pytest.raises(LedgerError, match=f"ledger.sqlite{end} is .* no plain file"):
        setup.open()
    if end == "-wal":  # without a log, its index is not read
        with pytest.raises(LedgerUnwritable, match="-wal, -shm"):
            setup.verify()


def test_a_file_that_is_no_database_leaves_no_connection_open(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 4)
    opened, real = [], sqlite3.connect

    def connect(*arguments, **options):
        opened.append(real(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite_file.sqlite3, "connect", connect)
    with pytest.raises(LedgerDamaged):
        SqliteStore.open_reader(path)
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError):
            connection.execute("SELECT 1")
    assert opened


def test_remaining_tokens_of_a_rolled_back_ledger_are_refused(setup):
    with setup.with_steps(2, witness=setup.witness) as ledger:
        assert remaining_tokens(setup.address) == ledger.account.remaining_tokens(setup.settings.per_token)
    copy = setup.copy()
    with setup.open(witness=setup.witness) as ledger:
        setup.commit(ledger, 3)
        name = ledger.state.witness
    setup.put(copy)
    assert not setup.verify().intact
    with pytest.raises(LedgerRolledBack, match="row"):
        remaining_tokens(setup.address, setup.folder)
    assert witness_on_record(setup.address) == name


def test_figures_read_while_rows_are_written_are_those_of_one_row(setup):
    """Head, sums and belief are read one after the other."""
    with setup.with_steps(1) as ledger:
        writing = threading.Thread(target=lambda: [ledger.commit(setup.step(1), b"sealed %d" % n) for n in range(150)])
        writing.start()
        counts = []
        while writing.is_alive():
            counts.append(remaining_tokens(setup.address, setup.folder))
        writing.join()
    assert counts == sorted(counts, reverse=True)


def test_remaining_tokens_of_a_marked_copy_are_read(setup):
    with setup.with_steps(2) as ledger:
        setup.back_up()
        before = ledger.account.remaining_tokens(setup.settings.per_token)
        setup.commit(ledger, 3)
    setup.put(setup.backup)
    assert remaining_tokens(setup.address, setup.folder) == before
