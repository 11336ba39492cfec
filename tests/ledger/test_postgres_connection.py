"""Connections to PostgreSQL: limits, what the address and the administrator set, TLS, and poolers."""

import time
from contextlib import closing
from urllib.parse import urlsplit

import psycopg
import pytest

from ledger.faults import check, commit, create, silent_server, take
from paclm.errors import LedgerBusy, LedgerFenced, LedgerNotDurable, LedgerUnwritable
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import migrate


def show(db, setting):
    return db.execute(f"SHOW {setting}").fetchone()[0]


def set_for_role(postgres, url, setting, value):
    with postgres.connect() as admin:
        admin.execute(f"ALTER ROLE {urlsplit(url).username} SET {setting} = '{value}'")


# ---------------------------------------------------------------- limits
def test_the_limit_is_on_silence_and_not_on_a_long_exchange(database):
    with closing(connect(database, answer_seconds=0.6)) as db:
        rows = db.execute("SELECT pg_sleep(0.01), repeat('x', 10000) FROM generate_series(1, 150)").fetchall()
        assert len(rows) == 150
        with pytest.raises(psycopg.OperationalError, match="no answer"):
            db.execute("SELECT pg_sleep(20)")
        assert db.closed
        with pytest.raises(psycopg.OperationalError, match="closed"):
            db.execute("SELECT 1")


def test_reading_may_take_longer_than_a_commit(database):
    with closing(connect(database, is_reading=True)) as reader, closing(connect(database)) as writer:
        assert reader.answer_seconds > 5 * writer.answer_seconds


def test_a_server_that_never_answers_is_given_up():
    with silent_server() as port, pytest.raises(LedgerUnwritable):
        connect(f"postgresql://me@127.0.0.1:{port}/db?connect_timeout=2")


def test_a_silent_first_host_is_passed_over_for_the_next(postgres, database):
    create(database)
    parts = urlsplit(database)
    login, _, place = parts.netloc.rpartition("@")
    with silent_server() as port:
        hosts = parts._replace(netloc=f"{login}@127.0.0.1:{port},{place}", query="connect_timeout=2").geturl()
        with closing(connect(hosts)) as db:
            assert db.info.port == postgres.port


def test_a_migration_by_another_process_is_waited_for_and_then_named(database, monkeypatch):
    with closing(connect(database)) as other, closing(connect(database)) as db, other.transaction():
        other.execute("SELECT pg_advisory_xact_lock(%s)", (int.from_bytes(b"paclm", "big"),))
        real = LimitedConnection.execute
        monkeypatch.setattr(LimitedConnection, "execute", lambda self, text, *rest: real(self, hurry(text), *rest))
        with pytest.raises(LedgerBusy):
            migrate(db, "the ledger", "")


def hurry(text):
    return text.replace("lock_timeout = '10s'", "lock_timeout = '100ms'") if isinstance(text, str) else text


# ---------------------------------------------------------------- what others set
@pytest.mark.parametrize(
    ("setting", "value", "used"),
    [
        ("synchronous_commit", "off", "on"),
        ("statement_timeout", "60s", "0"),
        ("lock_timeout", "60s", "0"),
        ("idle_in_transaction_session_timeout", "60s", "0"),
        ("idle_session_timeout", "60s", "0"),
        ("default_transaction_isolation", "serializable", "read committed"),
        ("search_path", "nowhere", "pg_catalog"),
        ("client_min_messages", "error", "warning"),
        ("client_min_messages", "debug5", "warning"),
        ("bytea_output", "escape", "escape"),
        ("DateStyle", "German", "German, DMY"),
        ("client_encoding", "LATIN1", "LATIN1"),
        ("standard_conforming_strings", "off", "off"),
    ],
)
def test_settings_of_an_administrator_neither_stop_nor_weaken_commits(postgres, database, setting, value, used):
    create(database)
    set_for_role(postgres, database, setting, value)
    with take(database) as ledger:
        commit(ledger)
        assert show(ledger.store.db, setting) == used
    check(database, at_least=1, at_most=1)


def test_a_login_that_may_only_read_is_refused(postgres, database):
    create(database)
    set_for_role(postgres, database, "default_transaction_read_only", "on")
    with pytest.raises(LedgerUnwritable, match="read-only"):
        take(database)


def test_a_function_of_the_same_name_elsewhere_is_not_called(postgres, database):
    create(database)
    with postgres.connect(database) as db:
        db.execute("CREATE SCHEMA trap")
        db.execute("CREATE FUNCTION trap.pg_backend_pid() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
    set_for_role(postgres, database, "search_path", "trap, pg_catalog")
    with take(database) as ledger:
        commit(ledger)
    check(database, at_least=1, at_most=1)


def test_the_address_decides_where_it_says_something(database):
    with closing(connect(f"{database}?application_name=mine&keepalives_idle=77")) as db:
        parameters = db.info.get_parameters()
        assert show(db, "application_name") == "mine"
    assert parameters["keepalives_idle"] == "77"
    assert parameters["connect_timeout"] == "10"


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
def test_a_server_that_does_not_sync_is_refused(postgres, database, setting):
    with postgres.connect() as admin:
        try:
            set_on_server(admin, f"SET {setting} = off", setting, "off")
            with pytest.raises(LedgerNotDurable, match=setting):
                connect(database)
        finally:
            set_on_server(admin, f"RESET {setting}", setting, "on")


def set_on_server(admin, change, setting, value):
    admin.execute(f"ALTER SYSTEM {change}")
    admin.execute("SELECT pg_reload_conf()")
    while show(admin, setting) != value:
        time.sleep(0.01)


# ---------------------------------------------------------------- TLS and names
def test_a_ledger_is_used_over_tls_with_a_checked_certificate(postgres, database):
    url = postgres.url(database, tls=True)
    create(url)
    with take(url) as ledger:
        commit(ledger)
        assert ledger.store.db.pgconn.ssl_in_use
    check(database, at_least=1, at_most=1)


def test_a_server_with_another_certificate_is_refused(postgres, database, tmp_path):
    from network import make_certificate

    (tmp_path / "other.crt").write_text(make_certificate()[1])
    url = postgres.url(database, tls=True).replace(str(postgres.certificate), str(tmp_path / "other.crt"))
    with pytest.raises(LedgerUnwritable, match="certificate"):
        connect(url)


def test_neither_password_nor_user_is_in_a_message(database):
    parts = urlsplit(database)
    wrong = parts._replace(netloc=parts.netloc.replace(parts.password, "sesame")).geturl()
    with pytest.raises(LedgerUnwritable) as failure:
        connect(wrong)
    assert "sesame" not in str(failure.value)
    assert parts.username not in name_of(wrong).removesuffix(f"/{parts.path[1:]}")


# ---------------------------------------------------------------- poolers
def test_a_session_that_a_pooler_swaps_or_shares_commits_nothing(database):
    """As behind a pooler of transactions: the statement runs in another session, or after another's SET."""
    create(database)
    with take(database) as ledger:
        ledger.store._backend += 1  # another session than the one that was checked
        with pytest.raises(LedgerNotDurable, match="pooler"):
            commit(ledger)
    with take(database) as ledger:
        ledger.store.db.execute("SET synchronous_commit = local")
        with pytest.raises(LedgerNotDurable, match="pooler"):
            commit(ledger)
    check(database, at_least=0, at_most=0)


def test_an_older_holder_is_told_that_it_was_taken_over(database):
    create(database)
    with take(database) as old, take(database), pytest.raises(LedgerFenced):
        commit(old)
    check(database, at_least=0, at_most=0)


def test_a_warning_is_a_doubt_on_a_connection_for_writing(database):
    warn = "DO $$BEGIN RAISE WARNING 'careful'; END$$"
    with closing(connect(database, is_reading=True)) as db:
        db.execute(warn)
    with closing(connect(database)) as db:
        db.execute("DO $$BEGIN RAISE NOTICE 'nothing'; END$$")
        with pytest.raises(LedgerUnwritable, match="careful"), translated("the ledger"):
            db.execute(warn)
        assert db.closed
