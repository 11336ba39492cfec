"""Keys, quotas and replies in PostgreSQL: written in the newest epoch alone, with a login that has no other right."""

import sqlite3
import threading
from contextlib import closing
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from paclm.errors import KeyRefused, LedgerHeld, ServiceError, ServiceStopped
from paclm.ledger.address import Holding
from paclm.ledger.postgres_hold import Hold
from paclm.ledger.postgres_schema import LEDGER_TABLES
from paclm.server.api_keys import KeyStore
from paclm.server.database import copy_service, open_database
from paclm.server.idempotency import Lost, Replies, Stored, body_digest
from paclm.server.postgres_front import front_login
from server.stepped import wait_until

BODY = body_digest("/v1/completions", b"{}")
TAKING = Holding(take_over=True)


@pytest.fixture
def held(database):
    hold = Hold.take(database, Holding())
    yield hold
    hold.release()


@pytest.fixture
def front_role(postgres):
    """Make a login without any right; returns its address for a database."""

    def front_role(url, rights=""):
        name = f"{conninfo_to_dict(url)['dbname']}_front"
        with postgres.connect() as admin:
            admin.execute(f"CREATE ROLE {name} LOGIN {rights} PASSWORD 'of the front'")
        return make_conninfo(url, user=name, password="of the front")

    return front_role


@pytest.fixture
def front(database, held, front_role):
    """The keys and replies of a server's front, with its own login and epoch."""
    url = front_login(database, front_role(database), held.epoch)
    with open_database(url, held.epoch, is_front=True) as opened:
        yield opened


def contents(database):
    with open_database(database) as opened, opened.reading() as db:
        return [db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in ("keys", "replies", "service")]


# ---------------------------------------------------------------- the epoch


def test_after_a_takeover_the_old_front_changes_nothing_and_its_replies_are_repeated_by_the_new_one(database, front):
    with KeyStore.open(database) as owner:
        owner.add("alice", quota_tokens=100)
    keys, replies = KeyStore(front), Replies(front)
    keys.reserve("alice", 10)
    replies.finish(replies.begin("alice", "done", BODY).ticket, status=200, body=b"text", media_type="text/plain")
    ticket = replies.begin("alice", "halfway", BODY).ticket
    new = Hold.take(database, TAKING)
    before = contents(database)
    for write in (
        partial(keys.reserve, "alice", 1),
        partial(keys.settle, "alice", reserved=10, used=0),
        partial(replies.begin, "alice", "new", BODY),
        partial(replies.finish, ticket, status=200, body=b"late", media_type="text/plain"),
        partial(replies.abandon, ticket),
        partial(replies.lose, ticket),
        replies.forget_expired,
        partial(front.together, [partial(keys.reserve, "alice", 1)]),
    ):
        with pytest.raises(ServiceStopped, match="took over"):
            write()
    assert contents(database) == before
    with open_database(database, new.epoch) as opened:
        assert KeyStore(opened).recover() == 10
        assert Replies(opened).recover() == 1
        assert Replies(opened).begin("alice", "done", BODY) == Stored(200, b"text", "text/plain")
        assert Replies(opened).begin("alice", "halfway", BODY) == Lost()
        (alice,) = KeyStore(opened).list()
        assert (alice.used_tokens, alice.reserved_tokens) == (10, 0)
    new.release()


def test_a_takeover_waits_for_a_transaction_that_has_begun_and_refuses_the_next(postgres, database, front):
    with KeyStore.open(database) as owner:
        owner.add("alice")
    keys, taken = KeyStore(front), []
    taker = threading.Thread(target=lambda: taken.append(Hold.take(database, TAKING)))
    with front.writing() as db:
        db.execute("UPDATE keys SET reserved_tokens = 7")
        taker.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        with postgres.connect() as admin:
            name = [conninfo_to_dict(database)["dbname"]]
            wait_until(lambda: admin.execute(waiting, name).fetchone() == (1,))
        assert taken == []
    taker.join(60)
    assert [hold.epoch for hold in taken] == [2]
    with pytest.raises(ServiceStopped):
        keys.reserve("alice", 1)
    assert [key.reserved_tokens for key in keys.list()] == [7]
    taken[0].release()


def test_a_transaction_that_begins_during_a_takeover_waits_for_it_and_is_refused(postgres, database, front):
    with KeyStore.open(database) as owner:
        owner.add("alice")
    refused = []

    def reserve():
        try:
            KeyStore(front).reserve("alice", 1)
        except ServiceStopped as error:
            refused.append(error)

    writer = threading.Thread(target=reserve)
    with psycopg.connect(database) as taker:
        taker.execute("SELECT 1 FROM paclm.head FOR UPDATE")
        writer.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'"
        with postgres.connect() as admin:
            name = [conninfo_to_dict(database)["dbname"]]
            wait_until(lambda: admin.execute(waiting, name).fetchone() == (1,))
        taker.execute("UPDATE paclm.head SET epoch = epoch + 1")
    writer.join(60)
    assert len(refused) == 1
    assert [key.reserved_tokens for key in KeyStore(front).list()] == [0]


def test_without_an_epoch_an_old_server_would_still_write(database, held):
    """The twin: the same writes by a login that names no epoch."""
    with KeyStore.open(database) as keys:
        keys.add("alice")
        Hold.take(database, TAKING).release()
        keys.reserve("alice", 1)
        assert [key.reserved_tokens for key in keys.list()] == [1]


def test_keys_are_made_and_revoked_beside_a_running_server_which_knows_at_once(database, held, front):
    with pytest.raises(LedgerHeld):
        Hold.take(database, Holding())
    keys = KeyStore(front)
    with KeyStore.open(database) as owner:
        key = owner.add("alice")
        assert keys.identify(key).name == "alice"
        owner.revoke("alice")
    assert keys.identify(key) is None
    with pytest.raises(KeyRefused):
        keys.reserve("alice", 1)


def test_a_lost_connection_is_told_once_and_never_made_again(postgres, database, front):
    with KeyStore.open(database) as owner:
        owner.add("alice")
    keys, told = KeyStore(front), []
    front.on_lost = lambda: told.append(True)

    def end_it():
        with front.writing() as db:
            db.execute("UPDATE keys SET used_tokens = 9")
            (pid,) = db.execute("SELECT pg_backend_pid()").fetchone()
            with postgres.connect() as admin:
                admin.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])

    with pytest.raises(ServiceError):
        front.together([partial(keys.reserve, "alice", 3), end_it, partial(keys.reserve, "alice", 4)])
    for read_or_write in (partial(keys.reserve, "alice", 1), keys.list):
        with pytest.raises(ServiceStopped):
            read_or_write()
    assert told == [True]
    with KeyStore.open(database) as owner:
        assert [(key.used_tokens, key.reserved_tokens) for key in owner.list()] == [(0, 0)]


def test_a_takeover_does_not_wait_for_a_front_that_hangs_in_a_transaction(database, front):
    with KeyStore.open(database) as owner:
        owner.add("alice")
    hanging = front.writing()
    hanging.__enter__().execute("SET LOCAL idle_in_transaction_session_timeout = '1ms'")  # else seconds
    Hold.take(database, TAKING).release()
    with pytest.raises(ServiceStopped):
        hanging.__exit__(None, None, None)


# ---------------------------------------------------------------- the login of the front


def test_the_front_can_do_nothing_to_the_ledger(database, held, front_role):
    url = front_login(database, front_role(database), held.epoch)
    owner = conninfo_to_dict(database)["user"]
    with KeyStore.open(database) as keys:
        keys.add("alice", quota_tokens=5)
    attempts = [
        statement.format(table)
        for table in LEDGER_TABLES
        for statement in (
            "SELECT 1 FROM paclm.{}",
            "INSERT INTO paclm.{} DEFAULT VALUES",
            "DELETE FROM paclm.{}",
            "TRUNCATE paclm.{}",
            "ALTER TABLE paclm.{} DISABLE TRIGGER ALL",
            "ALTER TABLE paclm.{} OWNER TO CURRENT_USER",
            "DROP TABLE paclm.{}",
            "COPY paclm.{} TO STDOUT",
        )
    ]
    attempts += [
        "UPDATE paclm.head SET epoch = 9",
        "UPDATE paclm.holder SET seen = now()",
        "UPDATE paclm.belief SET seq = 1",
        "SELECT 1 FROM paclm.head FOR KEY SHARE",
        f"SET ROLE {owner}",
        f"SET SESSION AUTHORIZATION {owner}",
        f"GRANT {owner} TO CURRENT_USER",
        "DROP SCHEMA paclm CASCADE",
        "CREATE TABLE paclm.mine (one integer)",
        "CREATE OR REPLACE FUNCTION paclm.hold_epoch(mine bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "CREATE FUNCTION paclm.mine() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "ALTER FUNCTION paclm.hold_epoch(bigint) SECURITY INVOKER",
        "CREATE TRIGGER mine BEFORE UPDATE ON paclm.head EXECUTE FUNCTION paclm.refuse()",
        "UPDATE paclm.keys SET quota_tokens = NULL",
        "UPDATE paclm.keys SET revoked_at = NULL",
        "INSERT INTO paclm.keys (name, digest, is_admin, created) VALUES ('mine', '', 1, '')",
        "DELETE FROM paclm.keys",
        "TRUNCATE paclm.keys, paclm.replies, paclm.service",
        "DROP TABLE paclm.replies",
    ]
    with psycopg.connect(url, autocommit=True) as db:
        for attempt in attempts:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(attempt)
        for epoch, is_held in ((held.epoch, True), (held.epoch - 1, False), (held.epoch + 1, False), (None, False)):
            assert db.execute("SELECT paclm.hold_epoch(%s)", [epoch]).fetchone() == (is_held,)
        # A function of its own, found first, is not what hold_epoch calls.
        db.execute("CREATE TEMPORARY TABLE head (one integer, epoch bigint)")
        db.execute("INSERT INTO head VALUES (1, 9)")
        db.execute("SET search_path = pg_temp, paclm")
        assert db.execute("SELECT paclm.hold_epoch(9)").fetchone() == (False,)
        assert db.execute("UPDATE paclm.keys SET used_tokens = used_tokens + 1").rowcount == 1  # what it is for


@pytest.mark.parametrize(
    ("rights", "grant", "what"),
    [
        ("SUPERUSER", "", "superuser"),
        ("CREATEROLE", "", "creates roles"),
        ("REPLICATION", "", "replicates"),
        ("NOINHERIT", "GRANT {owner} TO {role}", "owns"),
        ("", "GRANT pg_write_all_data TO {role}", "has rights on the table"),
        ("", "GRANT pg_read_all_data TO {role}", "has rights on the table"),
        ("", "GRANT pg_execute_server_program TO {role}", "files or processes of the server"),
        ("", "ALTER TABLE paclm.belief OWNER TO {role}", "owns"),
        ("", "ALTER SCHEMA paclm OWNER TO {role}", "owns"),
        ("", "GRANT TRIGGER ON paclm.head TO {role}", "paclm.head"),
        ("", "GRANT UPDATE (seq) ON paclm.head TO {role}", "paclm.head"),
        ("", "GRANT INSERT ON paclm.events TO PUBLIC", "paclm.events"),
        ("", "GRANT SELECT ON paclm.secret TO {role}", "paclm.secret"),
    ],
)
def test_a_login_that_could_touch_the_ledger_is_refused(postgres, database, held, front_role, rights, grant, what):
    url = front_role(database, rights)
    names = {"owner": conninfo_to_dict(database)["user"], "role": conninfo_to_dict(url)["user"]}
    with postgres.connect(make_conninfo(postgres.admin_url, dbname=names["owner"])) as admin:
        if grant:
            admin.execute(grant.format(**names))
    with pytest.raises(ServiceError, match=what):
        front_login(database, url, held.epoch)


def test_the_owner_himself_and_a_login_of_another_database_are_refused(postgres, database, held, front_role):
    with pytest.raises(ServiceError, match="owns"):
        front_login(database, database, held.epoch)
    other = postgres.create_database()
    try:
        Hold.take(other, Holding()).release()
        with pytest.raises(ServiceError, match="another database"):
            front_login(database, front_role(other), held.epoch)
    finally:
        postgres.drop_database(other)
    with pytest.raises(ServiceError, match="front_url"):
        front_login(database, make_conninfo(database, user="nobody_knows"), held.epoch)


def test_an_owner_who_may_create_roles_makes_a_login_with_a_new_password_each_time(postgres):
    database = postgres.create_database(may_create_roles=True)
    hold = Hold.take(database, Holding())
    first = front_login(database, "", hold.epoch)
    try:
        second = front_login(database, "", hold.epoch)
        old, new = conninfo_to_dict(first), conninfo_to_dict(second)
        assert old["user"] == new["user"] != conninfo_to_dict(database)["user"]
        assert old["password"] != new["password"]
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(first)
        with open_database(second, hold.epoch, is_front=True) as opened:
            assert KeyStore(opened).list() == []
        with pytest.raises(ServiceError, match="took over"):
            front_login(database, "", hold.epoch - 1)  # a slow server that was overtaken leaves the password alone
        psycopg.connect(second).close()
        assert new["password"] not in postgres.log
    finally:
        hold.release()
        postgres.drop_database(database)


def test_an_owner_who_may_not_create_roles_is_told_what_to_run(database, held):
    with pytest.raises(ServiceError, match=r"CREATE ROLE paclm_front_[0-9a-f]{8} LOGIN PASSWORD.*PACLM_LEDGER_FRONT"):
        front_login(database, "", held.epoch)


# ---------------------------------------------------------------- moving


@pytest.mark.parametrize("is_back", [False, True], ids=["to a database", "to a file"])
def test_keys_counters_and_replies_move_whole(path, database, is_back):
    with open_database(path) as file, open_database(database) as remote:
        source, target = (remote, file) if is_back else (file, remote)
        keys, replies = KeyStore(source), Replies(source)
        key = keys.add("alice", quota_tokens=100)
        keys.add("root", admin=True)
        keys.reserve("alice", 30)
        keys.revoke("root")
        replies.finish(replies.begin("alice", "done", BODY).ticket, status=200, body=b"text", media_type="text/plain")
        for _ in range(2):  # repeated after a crash it does the same
            copy_service(source, target)
        assert KeyStore(target).list() == keys.list()
        assert KeyStore(target).identify(key).reserved_tokens == 30
        assert Replies(target).begin("alice", "done", BODY) == Stored(200, b"text", "text/plain")
        KeyStore(target).add("bob")
        with pytest.raises(ServiceError, match="differ"):
            copy_service(source, target)
        assert {found.name for found in KeyStore(target).list()} == {"alice", "root", "bob"}


def test_a_move_that_fails_leaves_the_target_as_it_was(path, database):
    with open_database(path) as file, open_database(database) as remote:
        KeyStore(remote).add("alice")
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TRIGGER full BEFORE INSERT ON keys BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
            db.commit()
        with pytest.raises(ServiceError, match="disk is full"):
            copy_service(remote, file)
        assert KeyStore(file).list() == []
        assert len(KeyStore(remote).list()) == 1
