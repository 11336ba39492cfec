"""A primary dies and its standby is promoted: of a synchronous one nothing is lost, of another one it is noticed."""

import threading
from urllib.parse import urlsplit

import pytest

from ledger.faults import TAKE_OVER, check, commit, create, take
from ledger.kills import TOKENS
from paclm.errors import LedgerError, LedgerRolledBack, LedgerStopped, LedgerUnwritable
from paclm.ledger.postgres import LimitedConnection
from postgres import PostgresServer, wait_for


@pytest.fixture
def primary():
    with PostgresServer() as server:
        yield server


@pytest.fixture
def url(primary):
    """The address of a ledger that the standby, once made, has too."""
    url = primary.create_database()
    create(url)
    return url


def on_both(url, *servers):
    """One address for two servers: whichever takes writes."""
    parts = urlsplit(url)
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    netloc = f"{parts.netloc.rpartition('@')[0]}@{hosts}"
    return parts._replace(netloc=netloc, query="target_session_attrs=read-write").geturl()


def test_a_promoted_synchronous_standby_has_every_commit_that_was_reported(primary, url, monkeypatch):
    with primary.standby() as standby:
        both = on_both(url, primary, standby)
        with pytest.raises(LedgerUnwritable, match="standby"):
            take(standby.url(url, port=standby.port))
        ledger = take(both)
        reported = threading.Event()
        failures = []

        def work():
            try:
                while True:
                    commit(ledger)
                    if ledger.account.tokens > 20 * TOKENS:
                        reported.set()
            except LedgerError as failure:
                failures.append(failure)

        worker = threading.Thread(target=work)
        worker.start()
        assert reported.wait(60)
        primary.kill()
        worker.join(60)
        assert [type(failure) for failure in failures] == [LedgerUnwritable]
        steps = ledger.account.tokens // TOKENS
        with pytest.raises(LedgerStopped):
            commit(ledger)
        standby.promote()
        ledger.close()
        found = check(both, at_least=steps, at_most=steps + 1)
        with take(both) as ledger:
            commit(ledger)
            primary.start()  # it comes back, with its old standby's name: what it commits waits for that
            commit(ledger)
            assert ledger.store.db.info.port == standby.port
        check(on_both(url, standby, primary), at_least=found + 2, at_most=found + 2)
        monkeypatch.setattr(LimitedConnection, "answer_seconds", 2.0)
        with pytest.raises(LedgerUnwritable):
            take(url)


def rows(server, url):
    with server.connect(server.url(url, port=server.port)) as db:
        return db.execute("SELECT count(*) FROM paclm.events").fetchone()[0]


@pytest.mark.parametrize("guard", ["note of the host", "witness", "nothing"])
def test_commits_that_an_asynchronous_standby_lacked_are_noticed_by_note_and_witness(primary, url, tmp_path, guard):
    """The limit: a host that never held the ledger cannot know, and has no witness."""
    options = {}
    if guard == "witness":
        options["witness"] = tmp_path / "witness"
    if guard == "note of the host":
        options["holding"] = TAKE_OVER._replace(folder=tmp_path / "curator")
    with primary.standby(synchronous=False) as standby:
        with take(url, **options) as ledger:
            for _ in range(3):
                commit(ledger)
        wait_for(lambda: rows(standby, url) == rows(primary, url), "the standby to follow")
        standby.stop()
        with take(url, **options) as ledger:
            for _ in range(2):
                commit(ledger)
        primary.kill()
        standby.start()
        standby.promote()
        promoted = standby.url(url, port=standby.port)
        if guard == "nothing":
            check(promoted, at_least=3, at_most=3)
        else:
            with pytest.raises(LedgerRolledBack):
                take(promoted, **options)


@pytest.fixture
def waiting(postgres, database):
    """A ledger on a primary whose synchronous standby is down, with a commit that waits for it; and its failures."""
    create(database)
    with postgres.standby() as standby, take(database) as ledger:
        commit(ledger)
        standby.stop()
        failures = []

        def work():
            try:
                commit(ledger)
            except LedgerError as failure:
                failures.append(failure)

        worker = threading.Thread(target=work)
        worker.start()
        pid = ledger.store.db.info.backend_pid
        with postgres.connect() as admin:
            query = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
            wait_for(lambda: admin.execute(query, [pid]).fetchone() == ("SyncRep",), "the commit to wait")
        assert worker.is_alive()
        yield ledger, worker, failures
        postgres.wait_for_standbys("")
        worker.join(60)


@pytest.mark.parametrize("how", ["pg_cancel_backend", "pg_terminate_backend"])
@pytest.mark.parametrize("silenced", [False, True], ids=["as it comes", "warnings turned off for the login"])
def test_a_wait_for_the_standby_that_is_cancelled_is_a_doubt(postgres, database, how, silenced, request):
    """The row is on the primary then, and perhaps nowhere else: nothing may be released for it."""
    if silenced:
        with postgres.connect() as admin:
            admin.execute(f"ALTER ROLE {urlsplit(database).username} SET client_min_messages = error")
    ledger, worker, failures = request.getfixturevalue("waiting")
    before = ledger.account.tokens
    with postgres.connect() as admin:
        admin.execute(f"SELECT {how}(%s)", [ledger.store.db.info.backend_pid])
    worker.join(60)
    assert [type(failure) for failure in failures] == [LedgerUnwritable]
    assert ledger.account.tokens == before
    with pytest.raises(LedgerStopped):
        commit(ledger)
    assert ledger.store.db.closed
    postgres.wait_for_standbys("")
    check(database, at_least=2, at_most=2)


def test_a_commit_waits_for_its_standby_and_returns_once_it_has_it(postgres, waiting):
    ledger, worker, failures = waiting
    worker.join(0.3)
    assert worker.is_alive()
    assert ledger.account.tokens == TOKENS
    postgres.wait_for_standbys("")
    worker.join(60)
    assert failures == []
    assert ledger.account.tokens == 2 * TOKENS
