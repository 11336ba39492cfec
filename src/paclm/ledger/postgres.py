"""Connections to PostgreSQL on which nothing is guessed: every wait has a limit, and any doubt is an error.

Connections are never shared, pooled or opened again. A statement that is interrupted is not cancelled on the server:
a cancelled commit may be on one server only. Its connection is closed, and what it did is unknown until the next
opening reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict

from paclm.errors import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerNotDurable,
    LedgerUnwritable,
)

RV = TypeVar("RV")

SCHEMA = "paclm"
ANSWER_SECONDS = 30.0
"""No answer for this long is a lost connection."""
_CONNECT: Mapping[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "paclm",
}
_SESSION = {
    "synchronous_commit": "on",
    "statement_timeout": "0",  # a limit that cancels a commit leaves it on one server only
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}


class LimitedConnection(psycopg.Connection[Any]):
    """A connection that is closed when an answer does not come in time, or when its wait is interrupted."""

    answer_seconds = ANSWER_SECONDS

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Wait for an answer, up to the limit."""
        try:
            return waiting.wait(gen, self.pgconn.socket, interval=interval, timeout=timeout or self.answer_seconds)
        except psycopg.Error as error:
            if error.sqlstate is None:  # from this side: no answer, or no connection
                self.pgconn.finish()
            raise
        except BaseException:
            self.pgconn.finish()
            raise


def connect(url: str, *, is_reading: bool = False) -> LimitedConnection:
    """A connection in autocommit mode. For writing: to a primary whose commits are on its disk, and its standby's."""
    with translated(name_of(url), is_reading=is_reading):
        db = LimitedConnection.connect(url, autocommit=True, **_CONNECT)
    try:
        with translated(name_of(url), is_reading=is_reading):
            for name, value in {**_SESSION, "default_transaction_read_only": "on" if is_reading else "off"}.items():
                db.execute(f"SET {name} = {value}")
        if not is_reading:
            _check_durable(db, name_of(url))
    except BaseException:
        db.close()
        raise
    return db


def _check_durable(db: LimitedConnection, name: str) -> None:
    with translated(name):
        found = {
            setting: _one(db, f"SHOW {setting}") for setting in ("synchronous_commit", "fsync", "full_page_writes")
        }
        is_standby = _one(db, "SELECT pg_is_in_recovery()")
    for setting, value in found.items():
        if value != "on":
            raise LedgerNotDurable(
                f"PostgreSQL reports {setting} = {value} for {name}, not on: a commit might not reach the disk before "
                f"a token leaves. Set {setting} = on for this server and this login, and connect without a pooler."
            )
    if is_standby:
        raise LedgerUnwritable(
            f"{name} is a standby, which cannot be written. Name the primary; an address with several hosts and "
            "target_session_attrs=read-write finds it."
        )


def _one(db: LimitedConnection, statement: str) -> Any:
    row = db.execute(statement).fetchone()
    return None if row is None else row[0]


def name_of(url: str) -> str:
    """The address for messages: host, port and database, without user and password."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        return "postgresql://(not a valid address)"
    hosts, ports = str(parts.get("host", "")).split(","), str(parts.get("port", "")).split(",")
    ports = ports if len(ports) == len(hosts) else ports[:1] * len(hosts)
    places = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=True))
    return f"postgresql://{places}/{parts.get('dbname', '')}"


@contextmanager
def translated(name: str, *, is_reading: bool = False) -> Iterator[None]:
    """Raise PostgreSQL's errors as the ledger's, by their SQLSTATE. Texts of the server never hold a value of ours."""
    try:
        yield
    except psycopg.Error as error:
        raise _translation(name, error, is_reading) from None


def _translation(name: str, error: psycopg.Error, is_reading: bool) -> LedgerError:
    code = error.sqlstate or ""
    text = (error.diag.message_primary or str(error)).strip().splitlines()[0] if str(error) else type(error).__name__
    cause = f"PostgreSQL: {text.rstrip('.')}{f' ({code})' if code else ''}."
    again = "repeat." if is_reading else "restart: nothing was released that is not known to be committed."
    if code.startswith("53"):
        return LedgerFull(f"{name} has no room or no connection left. {cause} Make room, then {again}")
    if code in ("55P03", "57014", "40001", "40P01"):
        return LedgerBusy(f"Another process holds {name}. {cause} Wait for it, then {again}")
    if code in ("XX001", "XX002"):
        return LedgerDamaged(f"{name} is damaged. {cause} Restore a backup and adopt it.")
    if code == "25006":
        return LedgerUnwritable(f"{name} is read-only, as after a failover. {cause} Name the primary, then {again}")
    if code.startswith("28"):
        return LedgerUnwritable(f"{name} refuses the login. {cause} Correct user and password of the address.")
    if code == "42501":
        return LedgerUnwritable(f"The login for {name} lacks a right. {cause} Use the owner of the database.")
    if not code or code.startswith(("08", "57")):
        return LedgerUnwritable(
            f"The connection to {name} was lost or not made. {cause} Check the server and the network, then {again}"
        )
    return LedgerDamaged(f"{name} cannot be used as a ledger. {cause}")
