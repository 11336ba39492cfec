"""The login of the process that speaks HTTP: it reads and counts keys, keeps replies, and cannot touch the ledger.

It is the one that the settings name, or one that the curator makes with a new password at every start. Nothing else is
taken on trust: PostgreSQL is asked for everything that this login could do.

A front that was broken into may hold locks. So nothing that decides who holds the ledger waits for a lock that this
login can take, and once the ledger is taken, in this order: sessions of the login are ended and its rights taken away,
a new permit is drawn, the books are settled, and the rights given back. What an old front had not committed by then was
never acted upon, and is undone.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from paclm.errors import LedgerBusy, LedgerError, ServiceError
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import LEDGER_TABLES

_RIGHTS = (
    "USAGE ON SCHEMA paclm",
    "SELECT, UPDATE (used_tokens, reserved_tokens) ON paclm.keys",
    "SELECT, INSERT, UPDATE, DELETE ON paclm.replies",
    "SELECT (changes) ON paclm.writing",
    "EXECUTE ON FUNCTION paclm.begin_writing(text)",
)
_OWNERS = ("user", "password", "passfile", "service", "sslcert", "sslkey", "sslpassword")
"""Parts of an address that belong to its login."""
_CONNECTIONS = 10
"""A front uses two, and must not use up all that the server has."""
_EVICT_SECONDS = 20.0
"""For the sessions of an old front to end."""
_EXCESS = """
WITH every AS (SELECT * FROM pg_catalog.pg_roles WHERE pg_catalog.pg_has_role(%(role)s, oid, 'MEMBER'))
SELECT 'is or may become ' || rolname || ', which is a superuser, creates roles, replicates, or uses '
  || 'files or processes of the server'
  FROM every WHERE rolsuper OR rolcreaterole OR rolreplication
    OR rolname IN ('pg_execute_server_program', 'pg_write_server_files', 'pg_read_server_files', 'pg_signal_backend')
UNION ALL SELECT 'is or may become ' || rolname || ', which owns the database, its schema or one of its tables'
  FROM every WHERE oid IN (SELECT relowner FROM pg_catalog.pg_class WHERE relnamespace = 'paclm'::regnamespace
    UNION SELECT nspowner FROM pg_catalog.pg_namespace WHERE nspname = 'paclm'
    UNION SELECT datdba FROM pg_catalog.pg_database WHERE datname = current_database())
UNION ALL SELECT 'has rights on the table ' || entry
  FROM every, unnest(%(tables)s::text[]) AS entry
  WHERE has_table_privilege(oid, entry, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
    OR has_any_column_privilege(oid, entry, 'SELECT, INSERT, UPDATE, REFERENCES')
UNION ALL SELECT 'has rights on the table paclm.writing'
  FROM every WHERE has_table_privilege(oid, 'paclm.writing', 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
    OR has_any_column_privilege(oid, 'paclm.writing', 'INSERT, UPDATE, REFERENCES')
UNION ALL SELECT 'could use up all connections of the server (ALTER ROLE ' || rolname || ' CONNECTION LIMIT 10)'
  FROM every WHERE rolname = %(role)s AND rolconnlimit < 0
UNION ALL SELECT 'could keep a transaction open for ever (set max_prepared_transactions = 0)'
  WHERE current_setting('max_prepared_transactions') <> '0'
LIMIT 1
"""
_MAY_END = "SELECT pg_has_role(%(role)s, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE')"
"""Whether the owner may end sessions of the login."""
_IS_FULL = """
SELECT rolconnlimit BETWEEN 0 AND (SELECT count(*) FROM pg_stat_activity WHERE usesysid = pg_roles.oid)
FROM pg_roles WHERE rolname = %(role)s
"""
_END = """
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE usename = ANY (%(roles)s) AND datname = current_database() AND (%(of)s::integer[] IS NULL OR pid = ANY (%(of)s))
  AND (SELECT epoch FROM paclm.head) = %(epoch)s
"""
"""Not by a server that was overtaken: they may be those of its successor."""


_FRONTS = """
SELECT rolname FROM pg_class, aclexplode(relacl) AS entry JOIN pg_roles ON pg_roles.oid = entry.grantee
WHERE pg_class.oid = 'paclm.replies'::regclass AND entry.grantee <> relowner
  AND (pg_has_role(rolname, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE'))
"""
"""Logins that fronts have had, whose sessions the owner may end."""


class Login(NamedTuple):
    """What the curator hands to its front."""

    url: str
    permit: str
    """Shown in every transaction. The database knows its hash."""


def check_front(url: str, configured: str) -> None:
    """Refuse, before anything is taken, a login that will not do. `url` is the owner's, `configured` the front's."""
    with _explained(), closing(connect(url)) as db, translated(name_of(url)):
        role, exists = _role(db, configured)
        owner, may_create = _asked(
            db, "SELECT rolname, rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"
        )
        if configured and exists and _asked(db, _IS_FULL, role=role)[0]:
            _check_rights(db, role)  # its sessions will be ended
        elif configured:
            _check(db, configured)
        elif not may_create:
            raise ServiceError(
                "The login of the ledger may not create roles, and the process that speaks HTTP needs one of its own, "
                f"which cannot write the ledger. Run as an administrator: CREATE ROLE {role} LOGIN CONNECTION LIMIT "
                f"{_CONNECTIONS} PASSWORD '...'; GRANT {role} TO {owner}; then set front_url in [ledger], or "
                "PACLM_LEDGER_FRONT, to the ledger's address with that login."
            )
        if configured and not _asked(db, _MAY_END, role=role)[0]:
            raise ServiceError(
                f"The login of the ledger may not end sessions of {role}, which could then block the next server. Run "
                f"as an administrator: GRANT {role} TO {owner}."
            )


def shut_out(url: str, configured: str, epoch: int) -> Login:
    """End the front of every earlier server, which can write nothing from here on; `let_in` lets the next one in."""
    login = Login(configured, secrets.token_hex(32))
    with _explained(), closing(connect(url)) as db, translated(name_of(url)):
        role, exists = _role(db, configured)
        password = secrets.token_hex(32)
        if exists and not configured and not _asked(db, _MAY_END, role=role)[0]:
            db.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(sql.Identifier(role)))

        fronts = {role, *(name for (name,) in db.execute(_FRONTS).fetchall())}

        def change() -> None:
            done = db.execute(
                "UPDATE paclm.writing SET epoch = %(epoch)s, permit = %(permit)s, changes = changes + 1, writer = NULL "
                "WHERE epoch <= %(epoch)s",
                {"epoch": epoch, "permit": hashlib.sha256(login.permit.encode()).digest()},
            )
            if done.rowcount != 1:
                raise _overtaken(url)
            if not configured:
                verifier = db.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
                statement = f"{'ALTER' if exists else 'CREATE'} ROLE {{}} LOGIN CONNECTION LIMIT {{}} PASSWORD {{}}"
                db.execute(
                    sql.SQL(statement).format(sql.Identifier(role), sql.Literal(_CONNECTIONS), sql.Literal(verifier))
                )
                db.execute(sql.SQL("ALTER ROLE {} RESET ALL").format(sql.Identifier(role)))  # what it set for itself
                inside = sql.SQL("ALTER ROLE {} IN DATABASE {} RESET ALL")
                db.execute(inside.format(sql.Identifier(role), sql.Identifier(db.info.dbname)))
            for what in ("TABLES", "FUNCTIONS"):
                revoking = sql.SQL("REVOKE ALL ON ALL {} IN SCHEMA paclm FROM {}")
                for front in fronts:
                    db.execute(revoking.format(sql.SQL(what), sql.Identifier(front)))

        _without_sessions(db, name_of(url), sorted(fronts), epoch, change)
    if configured:
        return login
    own = {name: value for name, value in conninfo_to_dict(url).items() if name not in _OWNERS}
    return login._replace(url=make_conninfo("", **{**own, "user": role, "password": password}))


def let_in(url: str, login: Login) -> None:
    """Give the login the rights that a front needs, once it has no others."""
    with _explained(), closing(connect(url)) as db, translated(name_of(url)):
        role = _check(db, login.url)
        with db.transaction():
            if not _asked(db, "SELECT paclm.begin_writing(%(permit)s)", permit=login.permit)[0]:
                raise _overtaken(url)
            for right in _RIGHTS:
                db.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(right), sql.Identifier(role)))


def _without_sessions(
    db: LimitedConnection, name: str, roles: list[str], epoch: int, change: Callable[[], None]
) -> None:
    """Make the change, and end all sessions of these logins that began before it: they may hold what it waits for."""
    deadline = time.monotonic() + _EVICT_SECONDS
    sessions, is_made = _end_sessions(db, roles, epoch), False
    while sessions or not is_made:
        if time.monotonic() > deadline:
            raise ServiceError(
                f"Sessions of {' or '.join(roles)}, or of another login that a front once had, do not end, and hold "
                "the keys and quotas. Run for each as an administrator: ALTER ROLE x NOLOGIN; SELECT "
                "pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'x'; then give the login that is "
                "still used a new password, and start again."
            )
        if is_made:
            time.sleep(0.02)
            sessions = _end_sessions(db, roles, epoch, sessions)
            continue
        with suppress(LedgerBusy), translated(name):
            with db.transaction():
                db.execute("SET LOCAL lock_timeout = '500ms'")
                db.execute("SET LOCAL idle_in_transaction_session_timeout = '5s'")
                try:
                    change()
                except errors.InternalError_ as error:  # the login was changed by itself at the same time
                    raise LedgerBusy(str(error)) from None
            is_made = True
        sessions = _end_sessions(db, roles, epoch)


def _end_sessions(db: LimitedConnection, roles: list[str], epoch: int, of: list[int] | None = None) -> list[int]:
    """End the sessions of these logins, or those of these that are left; returns which."""
    with db.transaction():
        db.execute("SET LOCAL client_min_messages = error")  # it warns of a session that has ended meanwhile
        return [pid for pid, _ in db.execute(_END, {"roles": roles, "epoch": epoch, "of": of}).fetchall()]


def _check(db: LimitedConnection, address: str) -> str:
    """Refuse a login of another database, or one that could touch the ledger's tables; returns its name."""
    try:
        front = connect(address)
    except LedgerError as error:
        raise ServiceError(
            f"The login of the front does not work. {error} Where a password is not what this server asks for, make a "
            "login for the front and name it with front_url in [ledger], or PACLM_LEDGER_FRONT."
        ) from None
    with closing(front):
        mark = secrets.randbits(62)
        _asked(db, "SELECT pg_advisory_lock(%(mark)s)", mark=mark)  # seen in this database alone
        if _asked(front, "SELECT pg_try_advisory_lock(%(mark)s)", mark=mark)[0]:
            raise ServiceError(
                "front_url of the ledger names another database than its url. Both must name the same one; only "
                "the logins differ."
            )
        (role,) = _asked(front, "SELECT session_user")
    _check_rights(db, role)
    return str(role)


def _check_rights(db: LimitedConnection, role: str) -> None:
    tables = [f"paclm.{table}" for table in LEDGER_TABLES]
    excess = db.execute(_EXCESS, {"role": role, "tables": tables}).fetchone()
    if excess is not None:
        raise ServiceError(
            f"The front's login {role} {excess[0]}. It serves the network, so it must not be able to touch or block "
            "the ledger: name a login without such rights with front_url in [ledger], or PACLM_LEDGER_FRONT."
        )


def _role(db: LimitedConnection, configured: str) -> tuple[str, bool]:
    """The name of the front's login, and whether there is one: the configured one, or this database's own."""
    user = conninfo_to_dict(configured).get("user")
    if configured and not user:  # named elsewhere, such as in a service file
        with closing(connect(configured)) as front:
            (user,) = _asked(front, "SELECT session_user")
    own = "'paclm_front_' || lpad(to_hex(oid::bigint), 8, '0')"
    found = _asked(
        db,
        f"SELECT role, EXISTS (SELECT FROM pg_roles WHERE rolname = role) FROM (SELECT coalesce(%(role)s::text, {own}) "
        "AS role FROM pg_database WHERE datname = current_database()) AS named",
        role=user,
    )
    return str(found[0]), bool(found[1])


def _overtaken(url: str) -> ServiceError:
    return ServiceError(f"Another server took over the ledger in {name_of(url)}: this one must stop.")


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise ServiceError(f"The front cannot be given a login. {error}") from None


def _asked(db: LimitedConnection, statement: str, **values: object) -> tuple[Any, ...]:
    found = db.execute(statement, values).fetchone()
    assert found is not None
    return tuple(found)
