"""Two or three processes that all believe they hold the ledger: the database lets only the newest of them write.

A schedule is a random order of what they do, each on its own connections. After every action the whole database is
compared with a model: what the newest holder did is there, what others tried changed nothing.
"""

import random
import threading
from contextlib import closing

import pytest

from ledger.faults import create
from paclm.errors import LedgerFenced, LedgerHeld
from paclm.ledger import postgres_hold, postgres_store
from paclm.ledger.address import Holding
from paclm.ledger.events import Row, Usage
from paclm.ledger.postgres import LimitedConnection, connect
from paclm.ledger.postgres_store import PostgresStore
from paclm.ledger.store import Commit

SCHEDULES, ACTIONS = 1000, 7
STALE_SECONDS = 3600.0
STATE = """
SELECT head.seq, head.epoch, head.kind, (SELECT max(seq) FROM paclm.events),
  (SELECT digest FROM paclm.events ORDER BY seq DESC LIMIT 1), belief.seq, belief.sealed,
  (SELECT sealed FROM paclm.secret), (SELECT coalesce(sum(tokens), 0)::bigint FROM paclm.usage),
  (SELECT name IS NOT NULL FROM paclm.holder)
FROM paclm.head, paclm.belief
"""


class Connections:
    """Logins take longer than all the rest of a schedule: what is closed is lent again, as if it were new."""

    def __init__(self):
        self._idle = []
        self._lock = threading.Lock()

    def connect(self, url, **options):
        with self._lock:
            db = self._idle.pop() if self._idle else None
        if db is None:
            db = connect(url, **options)
            db.close = lambda: self._idle.append(db)
        db.execute("SET synchronous_commit = on")
        return db

    def close(self):
        for db in self._idle:
            LimitedConnection.close(db)


@pytest.fixture
def ledger(database, monkeypatch):
    """The address of a ledger whose holders' connections are lent."""
    create(database)
    connections = Connections()
    for module in (postgres_hold, postgres_store):
        monkeypatch.setattr(module, "connect", connections.connect)
    monkeypatch.setattr(postgres_hold, "migrate", lambda *_: None)  # it is there; asking takes as long as the rest
    yield database
    connections.close()


def make_row(draw, seq, previous):
    digest = draw.randbytes(32)
    return Row(seq, "2026-11-16T08:30:00.000Z", "step", "{}", "key", previous, digest, b"mac")


class Schedule:
    """Holders that act in turn, and what the database must then hold."""

    def __init__(self, url, db, seed):
        self.url, self.db, self.draw = url, db, random.Random(seed)
        self.holders = [None] * self.draw.choice((2, 2, 3))
        self.views = [0] * len(self.holders)
        self.model = list(db.execute(STATE).fetchone())
        self.digests = dict(db.execute("SELECT seq, digest FROM paclm.events").fetchall())
        self.done = []

    def run(self):
        try:
            for _ in range(ACTIONS):
                self.act()
                found = list(self.db.execute(STATE).fetchone())
                assert found == self.model, f"after {self.done}: {found} and not {self.model}"
        finally:
            for store in self.holders:
                if store is not None:
                    store.close()

    def act(self):
        number = self.draw.randrange(len(self.holders))
        store = self.holders[number]
        if store is None or self.draw.random() < 0.15:
            self.done.append((number, "take"))
            return self.take(number)
        action = self.draw.choice(("step", "step", "step", "quiet", "rotate", "repeat", "mark", "release"))
        self.done.append((number, action))
        getattr(self, action)(number, store)
        return None

    def is_newest(self, store):
        return store.epoch == self.model[1]

    def take(self, number):
        """Politely, or not; the one who takes reads where the ledger stands."""
        holding = Holding(stale_seconds=STALE_SECONDS, take_over=self.draw.random() < 0.7)
        if not holding.take_over and self.model[9]:
            with pytest.raises(LedgerHeld):
                PostgresStore.open_writer(self.url, holding)
            return
        taken = PostgresStore.open_writer(self.url, holding)
        if self.holders[number] is not None:
            self.holders[number].close()
        self.holders[number], self.views[number] = taken, self.model[0]
        self.model[1] += 1
        self.model[9] = True
        assert taken.epoch == self.model[1]

    def append(self, number, store, after, *, is_right, belief=True, secret=None):
        row = make_row(self.draw, after + 1, self.digests.get(after, b"none"))
        sealed = self.draw.randbytes(64)
        commit = Commit(row, after, (Usage("key", 1, 0, 1, 1),), (row.seq, sealed) if belief else None, secret)
        if not is_right:
            with pytest.raises(LedgerFenced):
                store.append(commit)
            return
        store.append(commit)
        self.views[number] = self.model[0] = self.model[3] = row.seq
        self.model[4] = self.digests[row.seq] = row.digest
        self.model[5:7] = [row.seq, sealed] if belief else self.model[5:7]
        self.model[7] = secret or self.model[7]
        self.model[8] += 1

    def step(self, number, store):
        self.append(number, store, self.views[number], is_right=self.is_newest(store))

    def quiet(self, number, store):
        self.append(number, store, self.views[number], is_right=self.is_newest(store), belief=False)

    def rotate(self, number, store):
        secret = self.draw.randbytes(64)
        self.append(number, store, self.views[number], is_right=self.is_newest(store), secret=secret)

    def repeat(self, number, store):
        """A commit that was made already, or that skips a row."""
        self.append(number, store, self.views[number] + self.draw.choice((-1, 1)), is_right=False)

    def mark(self, number, store):
        kind = self.draw.choice(("live", "copy"))
        if self.is_newest(store):
            store.mark(kind)
            self.model[2] = kind
        else:
            with pytest.raises(LedgerFenced):
                store.mark(kind)

    def release(self, number, store):
        store.close()
        self.holders[number] = None
        if self.is_newest(store):
            self.model[9] = False


def run_schedules(url, seeds):
    with closing(connect(url)) as db:
        for seed in seeds:
            try:
                Schedule(url, db, seed).run()
            except BaseException:
                print(f"schedule {seed}")
                raise


def test_only_the_newest_holder_commits_in_a_thousand_interleavings(ledger):
    run_schedules(ledger, range(SCHEDULES))


@pytest.mark.parametrize("clause", ["epoch = %(epoch)s AND ", " AND seq = %(after)s"])
def test_the_schedules_fail_where_the_fence_has_a_gap(ledger, monkeypatch, clause):
    """Of these schedules, more than one in ten finds each gap; which ones is fixed by their seeds."""
    assert postgres_store._COMMIT.count(clause) == 1
    monkeypatch.setattr(postgres_store, "_COMMIT", postgres_store._COMMIT.replace(clause, ""))
    with pytest.raises(BaseException, match=r"DID NOT RAISE|after|duplicate"):
        run_schedules(ledger, range(100))


def test_holders_that_race_never_both_commit_a_row(ledger):
    """At the same time, not in turn: what each reported is in the ledger, in one chain, and never behind a newer epoch.

    Each round one process takes over while the other commits.
    """
    reports = []

    def work(number):
        draw = random.Random(number)
        for _ in range(15):
            with closing(PostgresStore.open_writer(ledger, Holding(take_over=True))) as store:
                last = store.newest_row()
                try:
                    for _ in range(draw.randrange(1, 20)):
                        row = make_row(draw, last.seq + 1, last.digest)
                        store.append(Commit(row, last.seq))
                        reports.append((store.epoch, row.seq, row.digest))
                        last = row
                except LedgerFenced:
                    continue

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(connect(ledger)) as db:
        rows = dict(db.execute("SELECT seq, digest FROM paclm.events WHERE seq > 1").fetchall())
    assert reports
    assert {seq: digest for _, seq, digest in reports} == rows
    assert len(reports) == len(rows)
    assert sorted(rows) == list(range(2, len(rows) + 2))
    by_row = sorted(reports, key=lambda report: report[1])
    assert [epoch for epoch, _, _ in by_row] == sorted(epoch for epoch, _, _ in reports)
