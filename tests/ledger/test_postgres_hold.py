"""The right to write a ledger in PostgreSQL: who has it, who notices that it is gone, and how it ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from network import Proxy
from paclm.errors import LedgerBusy, LedgerFenced, LedgerHeld, LedgerUnwritable
from paclm.ledger import postgres_hold
from paclm.ledger.address import Holding
from paclm.ledger.postgres import LimitedConnection, connect
from paclm.ledger.postgres_hold import Hold, refuse_if_held
from postgres import wait_for

SHORT = Holding(stale_seconds=1.0)
LONG = Holding(stale_seconds=60.0)


@pytest.fixture
def take(database):
    """Take the right in this database; it is let go at the end."""
    taken = []

    def take(holding=SHORT, url=database):
        taken.append(Hold.take(url, holding))
        return taken[-1]

    yield take
    for hold in taken:
        hold.release()


def seen(database):
    """When the database last saw a holder, and under which epoch."""
    with psycopg.connect(database) as db:
        return db.execute("SELECT seen, epoch FROM paclm.holder").fetchone()


def wait_for_a_beat(database):
    before = seen(database)
    wait_for(lambda: seen(database) > before, "a heartbeat")


def test_a_holder_that_is_alive_keeps_others_out_until_it_lets_go(take, database):
    first = take()
    wait_for_a_beat(database)
    with pytest.raises(LedgerHeld, match="in use by"):
        take()
    with pytest.raises(LedgerHeld, match="in use by"):
        refuse_if_held(database, SHORT.stale_seconds)
    first.release()
    refuse_if_held(database, SHORT.stale_seconds)
    assert take().epoch == first.epoch + 1


def test_of_many_that_wait_for_a_dead_holder_exactly_one_wins(take, database):
    take().release()
    with psycopg.connect(database) as db:
        db.execute("UPDATE paclm.holder SET name = 'dead', seen = clock_timestamp() - interval '1 hour'")
    together = threading.Barrier(4)

    def attempt(_):
        together.wait()
        try:
            return take(LONG)
        except LedgerBusy as busy:
            return busy

    with ThreadPoolExecutor(4) as standbys:
        results = list(standbys.map(attempt, range(4)))
    assert sorted(type(result).__name__ for result in results) == ["Hold", *["LedgerHeld"] * 3]


def test_who_is_taken_over_is_told_once_and_refused_from_then_on(take, database):
    told = []
    first = take()
    first.watch(told.append)
    second = take(SHORT._replace(take_over=True))
    wait_for(lambda: told, "the news")
    wait_for_a_beat(database)
    first.release()
    assert [type(error) for error in told] == [LedgerFenced]
    with pytest.raises(LedgerFenced):
        first.refuse_if_lost()
    second.refuse_if_lost()
    late = []
    first.watch(late.append)
    assert late == told
    assert seen(database)[1] == second.epoch


def test_a_connection_that_ends_while_nothing_is_written_is_noticed_and_the_heartbeat_goes_on(take, database, postgres):
    told, hold, watched = [], take(), connect(database)
    hold.watch(told.append, watched)
    wait_for_a_beat(database)
    assert told == []
    with postgres.connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", [watched.info.backend_pid])
    wait_for(lambda: told, "the news")
    wait_for_a_beat(database)
    assert [type(error) for error in told] == [LedgerUnwritable]
    with pytest.raises(LedgerUnwritable, match="was lost"):
        hold.refuse_if_lost()
    hold.release()
    watched.close()
    refuse_if_held(database, LONG.stale_seconds)


def test_a_heartbeat_outlives_its_connection(take, database, postgres):
    hold = take()
    with postgres.connect() as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", [hold._db.info.backend_pid])
    wait_for_a_beat(database)
    hold.refuse_if_lost()


def test_a_heartbeat_does_not_wait_for_a_standby_server(take, database, postgres):
    take()
    postgres.wait_for_standbys("nobody")
    try:
        wait_for_a_beat(database)
    finally:
        postgres.wait_for_standbys("")


@pytest.mark.parametrize("fault", ["cut", "silence"])
def test_a_release_ends_the_thread_also_where_the_database_is_out_of_reach(take, database, postgres, fault):
    with Proxy(postgres.port) as proxy:
        hold = take(LONG, postgres.url(database, port=proxy.port))
        getattr(proxy, {"cut": "cut", "silence": "freeze"}[fault])()
        hold.release()
        wait_for(lambda: not hold._beating.is_alive(), "the heartbeat to end")


def test_a_hold_is_not_taken_while_a_commit_waits(take, database, monkeypatch):
    take().release()
    monkeypatch.setattr("paclm.ledger.postgres_hold._LOCK_WAIT", "100ms")
    with psycopg.connect(database) as db:
        db.execute("UPDATE paclm.head SET seq = seq")
        with pytest.raises(LedgerBusy):
            take()
    assert take().epoch == 2


def test_a_holder_is_judged_by_its_own_heartbeat_not_by_a_shorter_one(take, database):
    take(LONG)
    with psycopg.connect(database) as db:
        db.execute("UPDATE paclm.holder SET seen = clock_timestamp() - interval '30 seconds'")
    with pytest.raises(LedgerHeld, match="counts as dead 60 s"):
        take(SHORT)


def test_a_time_that_is_far_ahead_is_no_living_holders(take, database):
    first = take(LONG)
    first.release()
    with psycopg.connect(database) as db:
        db.execute("UPDATE paclm.holder SET name = 'dead', seen = clock_timestamp() + interval '1 hour'")
    assert take(LONG).epoch == first.epoch + 1


def test_a_process_that_may_not_take_the_ledger_does_not_lock_it_either(take, database, monkeypatch):
    take(LONG)
    locked = []
    real = LimitedConnection.execute

    def execute(self, statement, *rest, **options):
        locked.append("FOR UPDATE" in str(statement))
        return real(self, statement, *rest, **options)

    monkeypatch.setattr(LimitedConnection, "execute", execute)
    with pytest.raises(LedgerHeld):
        take(LONG)
    assert locked
    assert not any(locked)


def test_a_process_that_hangs_while_it_takes_the_ledger_loses_its_turn(take, database, monkeypatch):
    take(SHORT).release()
    monkeypatch.setattr(postgres_hold, "_IDLE_WAIT", "200ms")
    real = postgres_hold._next_epoch

    def hang(db, stale_seconds):
        wait_for(lambda: is_gone(database, db.info.backend_pid), "the server to end a session that hangs")
        return real(db, stale_seconds)

    monkeypatch.setattr(postgres_hold, "_next_epoch", hang)
    with pytest.raises(LedgerUnwritable):
        take(SHORT)
    monkeypatch.setattr(postgres_hold, "_next_epoch", real)
    take(SHORT)


def is_gone(database, pid):
    with psycopg.connect(database) as db:
        return db.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone() is None


def test_a_lock_that_anyone_may_take_does_not_keep_a_holder_out(take, database):
    take().release()
    with psycopg.connect(database, autocommit=True) as anyone:
        anyone.execute("SELECT pg_advisory_lock(%s)", (int.from_bytes(b"paclm", "big"),))
        take()
