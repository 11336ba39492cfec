"""Keys, quotas and replies in PostgreSQL: written by the newest server alone, with a login that has no other right."""

import sqlite3
from contextlib import closing, contextmanager
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from paclm.errors import KeyRefused, LedgerHeld, ServiceError, ServiceStopped
from paclm.ledger import postgres_hold
from paclm.ledger.address import Holding
from paclm.ledger.postgres import connect
from paclm.ledger.postgres_hold import Hold
from paclm.ledger.postgres_schema import LEDGER_TABLES, MIGRATIONS, migrate
from paclm.server.api_keys import KeyStore
from paclm.server.database import copy_service, open_database
from paclm.server.idempotency import Lost, Replies, Stored, body_digest
from paclm.server.postgres_front import check_front, let_in, shut_out

BODY = body_digest("/v1/completions", b"{}")
TAKING = Holding(take_over=True)


@pytest.fixture
def held(database):
    hold = Hold.take(database, Holding())
    yield hold
    hold.release()


@contextmanager
def taken(database):
    hold = Hold.take(database, TAKING)
    yield hold
    hold.release()


def front_login(url, configured, epoch):
    """What a server's start does, but for settling the books in between."""
    check_front(url, configured)
    login = shut_out(url, configured, epoch)
    let_in(url, login)
    return login


@pytest.fixture
def front_role(postgres):
    """Make a login without any right, whose sessions the owner may end; returns its address for a database."""

    def front_role(url, rights=""):
        name, owner = f"{conninfo_to_dict(url)['dbname']}_front", conninfo_to_dict(url)["user"]
        with postgres.connect() as admin:
            admin.execute(f"CREATE ROLE {name} LOGIN {rights or 'CONNECTION LIMIT 10'} PASSWORD 'of the front'")
            admin.execute(f"GRANT {name} TO {owner}")
        return make_conninfo(url, user=name, password="of the front")

    return front_role


@pytest.fixture
def login(database, held, front_role):
    return front_login(database, front_role(database), held.epoch)


@pytest.fixture
def front(login):
    """The keys and replies of a server's front, with its own login and permit."""
    with open_database(*login, is_front=True) as opened:
        yield opened


def contents(database):
    with open_database(database) as opened, opened.reading() as db:
        return [db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in ("keys", "replies")]


# ---------------------------------------------------------------- the permit


def test_after_a_takeover_the_old_front_changes_nothing_and_its_replies_are_repeated_by_the_new_one(
    database, login, front
):
    with KeyStore.open(database) as owner:
        owner.add("alice", quota_tokens=100)
    keys, replies = KeyStore(front), Replies(front)
    keys.reserve("alice", 10)
    replies.finish(replies.begin("alice", "done", BODY).ticket, Stored(200, b"text", "text/plain", {}))
    ticket = replies.begin("alice", "halfway", BODY).ticket
    new = Hold.take(database, TAKING)
    later = front_login(database, login.url, new.epoch)
    with pytest.raises(ServiceStopped, match="any more"):
        keys.reserve("alice", 1)  # its sessions were ended
    before = contents(database)
    with open_database(*login, is_front=True) as again:
        keys, replies = KeyStore(again), Replies(again)
        for write in (
            partial(keys.reserve, "alice", 1),
            partial(keys.settle, "alice", reserved=10, used=0),
            partial(replies.begin, "alice", "new", BODY),
            partial(replies.finish, ticket, Stored(200, b"late", "text/plain", {})),
            partial(replies.abandon, ticket),
            partial(replies.lose, ticket),
            replies.forget_expired,
            partial(again.together, [partial(keys.reserve, "alice", 1)]),
        ):
            with pytest.raises(ServiceStopped, match="took over"):
                write()
    assert contents(database) == before
    with open_database(database, later.permit) as opened:
        assert KeyStore(opened).recover() == 10
        assert Replies(opened).recover() == 1
        assert Replies(opened).begin("alice", "done", BODY) == Stored(200, b"text", "text/plain", {})
        assert Replies(opened).begin("alice", "halfway", BODY) == Lost()
        (alice,) = KeyStore(opened).list()
        assert (alice.used_tokens, alice.reserved_tokens) == (10, 0)
    new.release()


def test_a_slow_server_that_was_overtaken_shuts_nobody_out(database, held, login):
    new = Hold.take(database, TAKING)
    later = front_login(database, login.url, new.epoch)
    with open_database(*later, is_front=True) as opened:
        with pytest.raises(ServiceError, match="took over"):
            shut_out(database, login.url, held.epoch)
        with pytest.raises(ServiceError, match="took over"):
            let_in(database, login)
        with opened.writing():  # its sessions live
            pass
    new.release()


HOLDS = {
    "a write by permit": ["SELECT paclm.begin_writing('{permit}')", "UPDATE paclm.keys SET used_tokens = 99"],
    "keys": ["SELECT 1 FROM paclm.keys FOR UPDATE"],
    "replies": ["LOCK TABLE paclm.replies IN ACCESS EXCLUSIVE MODE"],
    "a lock of its own": ["SELECT pg_advisory_lock({migrations})"],
    "its own entry": ["ALTER ROLE CURRENT_USER PASSWORD 'mine'"],
    "no timeout": ["SET LOCAL idle_in_transaction_session_timeout = 0", "SELECT 1 FROM paclm.keys FOR UPDATE"],
}


@contextmanager
def holding(login, statements, num_sessions=1):
    """A front that was broken into: open transactions that hold what their login can hold."""
    values = {"permit": login.permit, "migrations": int.from_bytes(b"paclm", "big")}
    sessions = [psycopg.connect(login.url) for _ in range(num_sessions)]
    try:
        for statement in statements:
            for session in sessions:
                session.execute(statement.format(**values))
        yield sessions
    finally:
        for session in sessions:
            session.close()


@pytest.mark.parametrize("is_made", [False, True], ids=["given", "made"])
@pytest.mark.parametrize("what", HOLDS)
def test_whatever_an_old_front_holds_a_takeover_is_not_blocked_and_misses_nothing(
    postgres, front_role, monkeypatch, what, is_made
):
    monkeypatch.setattr(postgres_hold, "_LOCK_WAIT", "100ms")
    database = postgres.create_database(may_create_roles=is_made)
    configured = "" if is_made else front_role(database)
    try:
        old = Hold.take(database, Holding())
        login = front_login(database, configured, old.epoch)
        with KeyStore.open(database) as keys:
            keys.add("alice")
        with open_database(*login, is_front=True) as front:
            KeyStore(front).reserve("alice", 7)
        with holding(login, HOLDS[what]) as (session,):
            new = Hold.take(database, TAKING)
            check_front(database, configured)
            later = shut_out(database, configured, new.epoch)
            with open_database(database, later.permit) as books:
                assert KeyStore(books).recover() == 7
                Replies(books).recover()
            let_in(database, later)
            with pytest.raises(psycopg.OperationalError):
                session.commit()
        with open_database(*later, is_front=True) as front:
            assert [key.used_tokens for key in KeyStore(front).list()] == [7]
        for hold in (old, new):
            hold.release()
    finally:
        postgres.drop_database(database)


@pytest.mark.parametrize("what", ["a write by permit", "keys"])
def test_a_front_under_another_login_blocks_no_takeover_and_keeps_no_rights(postgres, front_role, monkeypatch, what):
    """The login was changed, as one does after a break-in: the old one must be shut out as well."""
    database = postgres.create_database(may_create_roles=True)
    try:
        old = Hold.take(database, Holding())
        given = front_login(database, front_role(database), old.epoch)
        with holding(given, HOLDS[what]) as (session,):
            new = Hold.take(database, TAKING)
            later = front_login(database, "", new.epoch)
            with pytest.raises(psycopg.OperationalError):
                session.commit()
        with psycopg.connect(given.url) as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute("SELECT 1 FROM paclm.keys FOR UPDATE")
        with open_database(*later, is_front=True) as front:
            KeyStore(front).list()
        for hold in (old, new):
            hold.release()
    finally:
        postgres.drop_database(database)


def test_what_a_made_login_set_for_itself_does_not_outlive_a_takeover(postgres):
    database = postgres.create_database(may_create_roles=True)
    try:
        old = Hold.take(database, Holding())
        login = front_login(database, "", old.epoch)
        with psycopg.connect(login.url, autocommit=True) as db:
            db.execute("ALTER ROLE CURRENT_USER SET default_transaction_read_only = on")
        new = Hold.take(database, TAKING)
        with KeyStore.open(database) as keys:
            keys.add("alice")
        with open_database(*front_login(database, "", new.epoch), is_front=True) as front:
            KeyStore(front).reserve("alice", 7)
        for hold in (old, new):
            hold.release()
    finally:
        postgres.drop_database(database)


def test_an_old_front_that_comes_back_can_hold_nothing_while_the_books_are_settled(database, held, login):
    with taken(database) as new:
        shut_out(database, login.url, new.epoch)
        for attempt in ("SELECT 1 FROM paclm.keys FOR UPDATE", "LOCK TABLE paclm.replies"):
            with psycopg.connect(login.url) as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(attempt)


def test_a_front_that_fills_its_connections_does_not_block_a_takeover(database, held, login):
    with holding(login, ["SELECT 1"], num_sessions=10) as sessions:
        with pytest.raises(psycopg.OperationalError, match="too many connections"):
            psycopg.connect(login.url)
        with taken(database) as new:
            front_login(database, login.url, new.epoch)
        with pytest.raises(psycopg.OperationalError):
            sessions[0].execute("SELECT 1")


def test_the_database_refuses_writes_that_show_no_permit(database, login, held):
    with KeyStore.open(database) as keys:
        keys.add("alice")
    before = contents(database)
    columns = "id, key_name, salt, body_check, state, expires"
    reply = f"INSERT INTO paclm.replies ({columns}) VALUES ('', '', '', '', 'lost', 0)"
    with psycopg.connect(login.url, autocommit=True) as db:
        for write in (
            "UPDATE paclm.keys SET used_tokens = 1",
            "UPDATE paclm.keys SET reserved_tokens = 0 WHERE false",
            reply,
            "DELETE FROM paclm.replies",
            "UPDATE paclm.replies SET state = 'lost'",
        ):
            with db.transaction(force_rollback=True):
                db.execute("SELECT paclm.begin_writing(%s)", [str(held.epoch)])
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    db.execute(write)
        with db.transaction(force_rollback=True):
            with db.transaction(force_rollback=True):
                assert db.execute("SELECT paclm.begin_writing(%s)", [login.permit]).fetchone() == (True,)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(reply)  # it was undone
        with db.transaction():
            db.execute("SELECT paclm.begin_writing(%s)", [login.permit])
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute(reply)  # it was for that transaction
    assert contents(database) == before


def test_the_owner_needs_no_permit(database, held):
    """To make and revoke keys beside a server, and to repair them by hand."""
    with KeyStore.open(database) as keys:
        keys.add("alice")
        Hold.take(database, TAKING).release()
        keys.reserve("alice", 1)
        with psycopg.connect(database) as db:
            db.execute("UPDATE paclm.keys SET used_tokens = 3")
        assert [(key.used_tokens, key.reserved_tokens) for key in keys.list()] == [(3, 1)]


# ---------------------------------------------------------------- counters

MOST = 2**62


@pytest.mark.parametrize(("used", "reserved"), [(-1, 0), (0, -1), (2**63 - 1, 2**63 - 1), (MOST, 1), (MOST + 1, 0)])
def test_counters_that_no_start_could_read_cannot_be_written(database, login, used, reserved):
    with KeyStore.open(database) as keys:
        keys.add("alice")
    with psycopg.connect(login.url) as db:
        db.execute("SELECT paclm.begin_writing(%s)", [login.permit])
        with pytest.raises(psycopg.errors.CheckViolation):
            db.execute("UPDATE paclm.keys SET used_tokens = %s, reserved_tokens = %s", [used, reserved])


def test_a_start_survives_the_largest_counters(database, login):
    with KeyStore.open(database) as keys:
        keys.add("alice", quota_tokens=5)
        keys.add("bob")
    with psycopg.connect(login.url) as db:
        db.execute("SELECT paclm.begin_writing(%s)", [login.permit])
        db.execute("UPDATE paclm.keys SET used_tokens = %s, reserved_tokens = %s", [MOST // 2, MOST // 2])
    with open_database(database, login.permit) as books:
        assert KeyStore(books).recover() == MOST
        assert [(key.used_tokens, key.reserved_tokens) for key in KeyStore(books).list()] == [(MOST, 0)] * 2


def test_an_older_database_with_counters_that_no_start_could_read_is_repaired(database, monkeypatch):
    def migrate_to(names):
        monkeypatch.setattr("paclm.ledger.postgres_schema.MIGRATIONS", {name: MIGRATIONS[name] for name in names})
        with closing(connect(database)) as db:
            migrate(db, "it", "")

    migrate_to(list(MIGRATIONS)[:3])
    with psycopg.connect(database) as db:
        for name, used, reserved in (("a", 2**63 - 1, 2**63 - 1), ("b", -5, 0), ("c", 4, 2)):
            db.execute(
                "INSERT INTO paclm.keys (name, digest, is_admin, created, used_tokens, reserved_tokens) "
                "VALUES (%s, %s, 0, '', %s, %s)",
                [name, name.encode(), used, reserved],
            )
    migrate_to(list(MIGRATIONS))
    with KeyStore.open(database) as keys:
        found = {key.name: (key.used_tokens, key.reserved_tokens) for key in keys.list()}
    assert found == {"a": (MOST, 0), "b": (MOST, 0), "c": (4, 2)}  # no more than was counted is free


# ---------------------------------------------------------------- beside each other


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


# ---------------------------------------------------------------- the login of the front


def test_the_front_can_do_nothing_to_the_ledger(database, login):
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
        "CREATE OR REPLACE FUNCTION paclm.begin_writing(mine text) RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "CREATE FUNCTION paclm.mine() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "ALTER FUNCTION paclm.begin_writing(text) SECURITY INVOKER",
        "ALTER TABLE paclm.keys DISABLE TRIGGER ALL",
        "SET session_replication_role = replica",
        "UPDATE paclm.writing SET writer = pg_current_xact_id()",
        "SELECT permit FROM paclm.writing",
        "SELECT changes FROM paclm.writing FOR UPDATE",
        "DO 'BEGIN LOCK TABLE paclm.writing IN ROW EXCLUSIVE MODE; END'",
        "DO 'BEGIN LOCK TABLE paclm.keys IN ROW EXCLUSIVE MODE; END'",
        "DO 'BEGIN LOCK TABLE paclm.head IN ACCESS SHARE MODE; END'",
        f"REVOKE {conninfo_to_dict(login.url)['user']} FROM {owner}",  # who ends its sessions
        "ALTER ROLE CURRENT_USER CONNECTION LIMIT -1",
        "CREATE TRIGGER mine BEFORE UPDATE ON paclm.head EXECUTE FUNCTION paclm.refuse()",
        "UPDATE paclm.keys SET quota_tokens = NULL",
        "UPDATE paclm.keys SET revoked_at = NULL",
        "INSERT INTO paclm.keys (name, digest, is_admin, created) VALUES ('mine', '', 1, '')",
        "DELETE FROM paclm.keys",
        "TRUNCATE paclm.keys, paclm.replies, paclm.writing",
        "DROP TABLE paclm.replies",
    ]
    with psycopg.connect(login.url, autocommit=True) as db:
        for attempt in attempts:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.execute(attempt)
        for permit, is_right in ((login.permit, True), (login.permit[:-1], False), ("", False), (None, False)):
            assert db.execute("SELECT paclm.begin_writing(%s)", [permit]).fetchone() == (is_right,)
        # Tables and functions of its own, found first, are not what the owner's functions use.
        db.execute("CREATE TEMPORARY TABLE writing AS SELECT 1 AS one, 1 AS changes, sha256('mine') AS permit")
        db.execute("SET search_path = pg_temp, paclm")
        assert db.execute("SELECT paclm.begin_writing('mine')").fetchone() == (False,)
        with db.transaction():
            db.execute("SELECT paclm.begin_writing(%s)", [login.permit])
            assert db.execute("UPDATE paclm.keys SET used_tokens = used_tokens + 1").rowcount == 1  # what it is for


@pytest.mark.parametrize(
    ("rights", "grant", "what"),
    [
        ("SUPERUSER", "", "superuser"),
        ("CREATEROLE", "", "creates roles"),
        ("REPLICATION", "", "replicates"),
        ("NOINHERIT", "REVOKE {role} FROM {owner}; GRANT {owner} TO {role}", "owns"),
        ("", "GRANT pg_write_all_data TO {role}", "has rights on the table"),
        ("", "GRANT pg_read_all_data TO {role}", "has rights on the table"),
        ("", "GRANT pg_execute_server_program TO {role}", "files or processes of the server"),
        ("", "ALTER TABLE paclm.belief OWNER TO {role}", "owns"),
        ("", "ALTER SCHEMA paclm OWNER TO {role}", "owns"),
        ("", "GRANT TRIGGER ON paclm.head TO {role}", "paclm.head"),
        ("", "GRANT UPDATE (seq) ON paclm.head TO {role}", "paclm.head"),
        ("", "GRANT INSERT ON paclm.events TO PUBLIC", "paclm.events"),
        ("", "GRANT SELECT ON paclm.secret TO {role}", "paclm.secret"),
        ("", "GRANT UPDATE (permit) ON paclm.writing TO PUBLIC", "paclm.writing"),
        ("CONNECTION LIMIT -1", "", "all connections"),
    ],
)
def test_a_login_that_could_touch_the_ledger_is_refused(postgres, database, held, front_role, rights, grant, what):
    url = front_role(database, rights)
    names = {"owner": conninfo_to_dict(database)["user"], "role": conninfo_to_dict(url)["user"]}
    with postgres.connect(make_conninfo(postgres.admin_url, dbname=names["owner"])) as admin:
        if grant:
            admin.execute(grant.format(**names))
    with pytest.raises(ServiceError, match=what):
        check_front(database, url)


def test_a_login_whose_transactions_could_outlive_it_is_refused(postgres, database, held, front_role):
    url = front_role(database)
    check_front(database, url)
    with postgres.connect() as admin:
        admin.execute("ALTER SYSTEM SET max_prepared_transactions = 1")
    try:
        postgres.restart()
        with pytest.raises(ServiceError, match="max_prepared_transactions = 0"):
            check_front(database, url)
    finally:
        with postgres.connect() as admin:
            admin.execute("ALTER SYSTEM RESET max_prepared_transactions")
        postgres.restart()


def test_an_owner_who_may_not_end_its_sessions_is_told_what_to_run(postgres, database, held, front_role):
    url, owner = front_role(database), conninfo_to_dict(database)["user"]
    with postgres.connect() as admin:
        admin.execute(f"REVOKE {conninfo_to_dict(url)['user']} FROM {owner}")
    with pytest.raises(ServiceError, match=f"GRANT .*_front TO {owner}"):
        check_front(database, url)


def test_the_owner_himself_and_a_login_of_another_database_are_refused(postgres, database, held, front_role):
    with pytest.raises(ServiceError, match="owns"):
        check_front(database, database)
    other = postgres.create_database()
    try:
        Hold.take(other, Holding()).release()
        with pytest.raises(ServiceError, match="another database"):
            check_front(database, front_role(other))
    finally:
        postgres.drop_database(other)
    with pytest.raises(ServiceError, match="front_url"):
        check_front(database, make_conninfo(database, user="nobody_knows"))


def test_an_owner_who_may_create_roles_makes_a_login_with_a_new_password_each_time(postgres):
    database = postgres.create_database(may_create_roles=True)
    hold = Hold.take(database, Holding())
    first = front_login(database, "", hold.epoch)
    try:
        second = front_login(database, "", hold.epoch)
        old, new = conninfo_to_dict(first.url), conninfo_to_dict(second.url)
        assert old["user"] == new["user"] != conninfo_to_dict(database)["user"]
        assert old["password"] != new["password"]
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(first.url)
        with open_database(*second, is_front=True) as opened:
            assert KeyStore(opened).list() == []
        with pytest.raises(ServiceError, match="took over"):
            front_login(database, "", hold.epoch - 1)  # a slow server that was overtaken leaves the password alone
        psycopg.connect(second.url).close()
        assert new["password"] not in postgres.log
    finally:
        hold.release()
        postgres.drop_database(database)


def test_an_owner_who_may_not_create_roles_is_told_what_to_run(database, held):
    with pytest.raises(
        ServiceError,
        match=r"CREATE ROLE paclm_front_[0-9a-f]{8} LOGIN CONNECTION LIMIT 10 PASSWORD.*PACLM_LEDGER_FRONT",
    ):
        check_front(database, "")


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
        replies.finish(replies.begin("alice", "done", BODY).ticket, Stored(200, b"text", "text/plain", {}))
        for _ in range(2):  # repeated after a crash it does the same
            copy_service(source, target)
        assert KeyStore(target).list() == keys.list()
        assert KeyStore(target).identify(key).reserved_tokens == 30
        assert Replies(target).begin("alice", "done", BODY) == Stored(200, b"text", "text/plain", {})
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
