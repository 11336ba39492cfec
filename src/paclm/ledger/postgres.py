"""Connections to PostgreSQL on which nothing is guessed: every wait has a limit, and any doubt is an error.

Connections are never shared, pooled or opened again. A statement that is interrupted is not cancelled on the server:
a cancelled commit may be on one server only. Its connection is closed, and what it did is unknown until the next
opening reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import psycopg
from psycopg import waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import Diagnostic
from psycopg.types.json import Json

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
NO_ADDRESS = "postgresql://(not a valid address)"
ANSWER_SECONDS = 30.0
"""A commit without an answer for this long is in doubt, and its connection lost."""
READING_SECONDS = 600.0
"""The same for what may take long and leaves no doubt: reading, and filling an empty ledger."""
_CONNECT: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "paclm",
}
"""Where the address itself says nothing else."""
_SESSION = {
    "synchronous_commit": "on",
    "client_min_messages": "warning",  # a cancelled wait for a standby server is told by a warning alone
    "default_transaction_isolation": "read committed",
    "search_path": "pg_catalog",  # nobody else's function is called by mistake
    "statement_timeout": "0",  # a limit that cancels a commit leaves it on one server only
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",  # a service without requests is no reason to stop
}
"""Whatever the server, the database or the login have set. Some settings are unknown to some versions."""
_SET = (
    "SELECT pg_catalog.set_config(name, value, false) FROM pg_catalog.json_each_text(%s) "
    "AS wanted(name, value) WHERE pg_catalog.current_setting(name, true) IS NOT NULL"
)


class InDoubt(psycopg.OperationalError):
    """The server took the statement, but with a warning."""


class LimitedConnection(psycopg.Connection[Any]):
    """A connection that is closed when no answer comes in time, when its wait is interrupted, and after a warning."""

    answer_seconds = ANSWER_SECONDS
    warning: str | None = None
    """What the server warned of while it worked on the newest statement."""

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Wait for an answer, up to the limit."""
        self.warning = None
        try:
            limited = _limit(gen, self.answer_seconds if timeout is None else timeout)
            answer = waiting.wait(limited, self.pgconn.socket, interval=interval)
            if self.warning is not None:
                raise InDoubt(self.warning)
        except psycopg.Error as error:
            if error.sqlstate is None:  # from this side: no answer, or no connection
                self.pgconn.finish()
            raise
        except BaseException:
            self.pgconn.finish()
            raise
        return answer

    def note_warning(self, notice: Diagnostic) -> None:
        """Remember a warning."""
        if notice.severity_nonlocalized == "WARNING":
            self.warning = notice.message_primary or "of something"


def _limit(gen: PQGen[RV], seconds: float) -> PQGen[RV]:
    """The same exchange with the server; an error once it has been silent for so long."""
    deadline = time.monotonic() + seconds
    try:
        wish = next(gen)
        while True:
            ready = yield wish
            if ready:
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                raise psycopg.OperationalError(f"no answer for {seconds:g} s")
            wish = gen.send(ready)
    except StopIteration as end:
        result: RV = end.value
        return result


def connect(url: str, *, is_reading: bool = False, answer_seconds: float | None = None) -> LimitedConnection:
    """A connection in autocommit mode. For writing: to a primary whose commits are on its disk, and its standby's."""
    name = name_of(url)
    if name == NO_ADDRESS:  # libpq's own words would show parts of the password
        raise LedgerUnwritable(
            "The address of the database is not a valid URL: postgresql://USER:PASSWORD@HOST:PORT/DATABASE. "
            "Write special characters of user and password as %XX, such as %40 for @."
        )
    with translated(name, is_reading=is_reading):
        db = LimitedConnection.connect(autocommit=True, **_CONNECT | conninfo_to_dict(url))
    if is_reading:
        db.answer_seconds = READING_SECONDS
    else:
        db.add_notice_handler(db.note_warning)
    if answer_seconds is not None:
        db.answer_seconds = answer_seconds
    try:
        with translated(name, is_reading=is_reading):
            db.execute(_SET, (Json(_SESSION | ({"default_transaction_read_only": "on"} if is_reading else {})),))
        if not is_reading:
            _check_durable(db, name)
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
        return NO_ADDRESS
    hosts, ports = str(parts.get("host", "")).split(","), str(parts.get("port", "")).split(",")
    if any("@" in part for part in (*hosts, str(parts.get("dbname", "")))):
        return NO_ADDRESS  # what is taken for a host or a database is the end of a password
    if not all(port.isdigit() for port in ports if port):
        return NO_ADDRESS  # or for a port
    ports = ports if len(ports) == len(hosts) else ports[:1] * len(hosts)
    places = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=True))
    return f"postgresql://{places}/{parts.get('dbname', '')}"


def server_of(url: str) -> int | None:
    """What tells a server from others, also by another name; None where its login may not ask."""
    try:
        with closing(connect(url, is_reading=True)) as db:
            found = db.execute("SELECT system_identifier FROM pg_control_system()").fetchone()
    except (psycopg.Error, LedgerError):
        return None
    return found[0] if found else None


def without_password(url: str) -> str:
    """The same address to be written down: its passwords are left out."""
    parts = {name: str(value) for name, value in conninfo_to_dict(url).items()}
    kept = {name: value for name, value in parts.items() if name not in ("password", "sslpassword")}
    return url if kept == parts else f"postgresql:///?{urlencode(kept, quote_via=quote)}"


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
    if isinstance(error, InDoubt):
        return LedgerUnwritable(
            f"{name} answered with a warning: {text.rstrip('.')}. Whether the commit is durable is in doubt, so "
            "nothing was released. Check the server and its standby, then restart."
        )
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
    if not code or code.startswith(("08", "57", "25P")):
        return LedgerUnwritable(
            f"The connection to {name} was lost or not made. {cause} Check server, network and login, then {again}"
        )
    return LedgerDamaged(f"{name} cannot be used as a ledger. {cause}")
