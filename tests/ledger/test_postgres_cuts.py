"""The network between a curator and its database breaks: the ledger stops, and nothing counts as committed that is not.

A commit whose answer did not come is there whole or not at all, and only the next opening finds out which.
"""

import signal
import threading

import pytest

from ledger.faults import check, commit, create, take
from network import Proxy
from paclm.errors import LedgerError, LedgerStopped
from paclm.ledger.postgres import LimitedConnection
from postgres import wait_for


@pytest.fixture
def proxy(postgres):
    with Proxy(postgres.port) as proxy:
        yield proxy
        proxy.heal()


@pytest.fixture
def near(postgres, database):
    """The address of a ledger with one row, not by the proxy."""
    create(database)
    return database


@pytest.fixture
def far(postgres, near, proxy):
    """The same by the proxy."""
    return postgres.url(near, port=proxy.port)


def expect_stop(ledger):
    """A commit fails, and so does everything after it, also once the network is well again."""
    ledger.store.db.answer_seconds = 0.5
    with pytest.raises(LedgerError) as failure:
        commit(ledger)
    assert not isinstance(failure.value, LedgerStopped)
    with pytest.raises(LedgerStopped):
        commit(ledger)
    assert ledger.store.db.closed


@pytest.mark.parametrize("mode", ["cut", "freeze", "drop_requests"])
def test_a_request_that_does_not_arrive_stops_the_ledger(near, far, proxy, mode):
    with take(far) as ledger:
        commit(ledger)
        getattr(proxy, mode)()
        expect_stop(ledger)
        check(near, at_least=1, at_most=1)
        proxy.heal()  # what a frozen network kept is delivered now, behind a newer epoch
        with pytest.raises(LedgerStopped):
            commit(ledger)
    check(near, at_least=1, at_most=1)


def test_a_reply_that_does_not_arrive_stops_the_ledger_after_its_commit(near, far, proxy):
    with take(far) as ledger:
        commit(ledger)
        proxy.drop_replies()
        expect_stop(ledger)
        check(near, at_least=2, at_most=2)
        proxy.heal()
        with pytest.raises(LedgerStopped):
            commit(ledger)
    check(near, at_least=2, at_most=2)


def test_a_slow_network_is_no_doubt(near, far, proxy):
    with take(far) as ledger:
        proxy.delay(0.1)
        commit(ledger)
        assert check_rows(near) == 2
        proxy.heal()
    check(near, at_least=1, at_most=1)


def check_rows(url):
    with LimitedConnection.connect(url, autocommit=True) as db:
        return db.execute("SELECT count(*) FROM paclm.events").fetchone()[0]


def test_replies_that_overtake_each_other_change_nothing(near, far, proxy):
    """Two connections of one process: the heartbeat's answers are not taken for the commit's."""
    with take(far) as ledger:
        proxy.reorder()
        stop = threading.Event()

        def read():
            with LimitedConnection.connect(far, autocommit=True) as db:
                while not stop.is_set():
                    db.execute("SELECT pg_sleep(0.001)")

        other = threading.Thread(target=read)
        other.start()
        try:
            for _ in range(20):
                commit(ledger)
        finally:
            stop.set()
            other.join()
        assert proxy.num_overtakings > 0
        proxy.heal()
    check(near, at_least=20, at_most=20)


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_message_cut_at_any_byte_is_a_stop(near, far, proxy, direction):
    with take(far) as ledger:  # how much there is to cut
        proxy.end_after(direction, 100_000)
        commit(ledger)
        whole = 100_000 - proxy.rest(direction)
        proxy.heal()
    lengths = sorted({*range(0, whole, whole // 12), *range(whole - 8, whole)})
    seen = 1
    for length in lengths:
        with take(far) as ledger:
            assert check_rows(near) == seen + 1
            proxy.end_after(direction, length)
            expect_stop(ledger)
            proxy.heal()
        seen = check(near, at_least=seen, at_most=seen + 1)
    assert seen == 1 + len(lengths) * (direction == "replies")  # without its last byte a request is none


def test_ctrl_c_while_a_commit_waits_does_not_cancel_it(near, far, proxy, monkeypatch):
    """A cancelled commit may be on one server only. The commit goes on; the ledger stops."""
    monkeypatch.setattr(LimitedConnection, "cancel_safe", lambda *_, **__: pytest.fail("it was cancelled"))
    with take(far) as ledger:
        proxy.freeze()
        pressed = threading.Thread(
            target=lambda: (
                wait_for(lambda: proxy.num_held > 100, "the commit to be on its way"),
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT),
            )
        )
        pressed.start()
        with pytest.raises(KeyboardInterrupt):
            commit(ledger)
        pressed.join()
        with pytest.raises(LedgerStopped):
            commit(ledger)
        assert ledger.store.db.closed
        proxy.heal()
        wait_for(lambda: check_rows(near) == 2, "the commit that was on its way")
    check(near, at_least=1, at_most=1)
