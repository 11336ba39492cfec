"""The login of the process that speaks HTTP: it reads and counts keys, keeps replies, and cannot touch the ledger.

It is the one that the settings name, or one that the curator makes with a new password at every start. Nothing else is
taken on trust: before it is handed over, PostgreSQL is asked for everything that this login could do.
"""

from __future__ import annotations

import secrets
from typing import Any

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from paclm.errors import LedgerError, ServiceError
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_schema import LEDGER_TABLES

_RIGHTS = (
    "USAGE ON SCHEMA paclm",
    "SELECT, UPDATE (used_tokens, reserved_tokens) ON paclm.keys",
    "SELECT, INSERT, UPDATE, DELETE ON paclm.replies",
    "SELECT, UPDATE ON paclm.service",
    "EXECUTE ON FUNCTION paclm.hold_epoch(bigint)",
)
_OWNERS = ("user", "password", "passfile", "service", "sslcert", "sslkey", "sslpassword")
"""Parts of an address that belong to its login."""
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
LIMIT 1
"""


def front_login(url: str, configured: str, epoch: int) -> str:
    """The address that the front connects to, with a login that can neither write nor read the ledger's tables.

    `url` is the owner's, `configured` the front's as in the settings, if it is there; `epoch` is the holder's.
    """
    name = name_of(url)
    try:
        db = connect(url)
        try:
            address = configured or _make(db, url, epoch)
            _allow_and_check(db, name, address)
        finally:
            db.close()
    except LedgerError as error:
        raise ServiceError(f"The front cannot be given a login. {error}") from None
    return address


def _make(db: LimitedConnection, url: str, epoch: int) -> str:
    """A login of this database's own, with a new password: an older front makes no new connection."""
    with translated(name_of(url)):
        role, exists, can_create = _asked(
            db,
            "SELECT role, EXISTS (SELECT FROM pg_roles WHERE rolname = role), "
            "(SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user) "
            "FROM (SELECT 'paclm_front_' || lpad(to_hex(oid::bigint), 8, '0') AS role FROM pg_database "
            "WHERE datname = current_database()) AS named",
        )
        if not can_create:
            raise ServiceError(
                "The login of the ledger may not create roles, and the process that speaks HTTP needs one of its own, "
                f"which cannot write the ledger. Run as an administrator: CREATE ROLE {role} LOGIN PASSWORD '...'; "
                "then set front_url in [ledger], or PACLM_LEDGER_FRONT, to the ledger's address with that login."
            )
        password = secrets.token_hex(32)
        verifier = db.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        with db.transaction():
            if not _asked(db, "SELECT paclm.hold_epoch(%s)", epoch)[0]:
                raise ServiceError(f"Another server took over the ledger in {name_of(url)}: this one must stop.")
            change = "ALTER ROLE {} LOGIN PASSWORD {}" if exists else "CREATE ROLE {} LOGIN PASSWORD {}"
            db.execute(sql.SQL(change).format(sql.Identifier(role), sql.Literal(verifier)))
    own = {name: value for name, value in conninfo_to_dict(url).items() if name not in _OWNERS}
    return make_conninfo("", **{**own, "user": role, "password": password})


def _allow_and_check(db: LimitedConnection, name: str, address: str) -> None:
    """Refuse a login of another database, or one that could touch the ledger's tables; give it what it needs."""
    try:
        front = connect(address)
    except LedgerError as error:
        raise ServiceError(
            f"The login of the front does not work. {error} Where a password is not what this server asks for, make a "
            "login for the front and name it with front_url in [ledger], or PACLM_LEDGER_FRONT."
        ) from None
    try:
        with translated(name):
            mark = secrets.randbits(62)
            _asked(db, "SELECT pg_advisory_lock(%s)", mark)  # seen in this database alone
            if _asked(front, "SELECT pg_try_advisory_lock(%s)", mark)[0]:
                raise ServiceError(
                    "front_url of the ledger names another database than its url. Both must name the same one; only "
                    "the logins differ."
                )
            (role,) = _asked(front, "SELECT session_user")
            tables = [f"paclm.{table}" for table in LEDGER_TABLES]
            excess = db.execute(_EXCESS, {"role": role, "tables": tables}).fetchone()
            if excess is not None:
                raise ServiceError(
                    f"The front's login {role} {excess[0]}. It serves the network, so it must not be able to touch the "
                    "ledger: name a login without such rights with front_url in [ledger], or PACLM_LEDGER_FRONT."
                )
            for right in _RIGHTS:
                db.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(right), sql.Identifier(role)))
    finally:
        front.close()


def _asked(db: LimitedConnection, statement: str, *values: object) -> tuple[Any, ...]:
    found = db.execute(statement, values or None).fetchone()
    assert found is not None
    return tuple(found)
