"""The tables of a ledger in PostgreSQL, in the schema `paclm` of a database of its own.

`head` is the fence: its one row holds the newest row's number and the epoch, and every write names both. A process that
takes the ledger over adds one to the epoch; what an older one still sends matches no row.
"""

from __future__ import annotations

from typing import Any

from psycopg import sql

from paclm.errors import LedgerError, LedgerMissing, LedgerTampered, LedgerUnwritable
from paclm.ledger.postgres import SCHEMA, LimitedConnection, translated

_COUNTS = "tokens bigint NOT NULL, dissent_tokens bigint NOT NULL, charged_tokens bigint NOT NULL, "

M001_INITIAL = (
    "CREATE TABLE paclm.head (one integer PRIMARY KEY CHECK (one = 1), seq bigint NOT NULL, epoch bigint NOT NULL, "
    "kind text NOT NULL)",
    "INSERT INTO paclm.head VALUES (1, 0, 0, 'none')",
    "CREATE TABLE paclm.holder (one integer PRIMARY KEY CHECK (one = 1), epoch bigint NOT NULL, name text, "
    "seen timestamptz NOT NULL, stale_seconds double precision NOT NULL)",
    "INSERT INTO paclm.holder VALUES (1, 0, NULL, clock_timestamp(), 0)",
    "CREATE TABLE paclm.events (seq bigint PRIMARY KEY, at text NOT NULL, kind text NOT NULL, body text NOT NULL, "
    "key text NOT NULL, previous bytea NOT NULL, digest bytea NOT NULL, mac bytea NOT NULL)",
    "CREATE INDEX notable ON paclm.events (seq) WHERE kind <> 'stepped'",
    "CREATE FUNCTION paclm.refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$BEGIN RAISE EXCEPTION 'the ledger is append-only'; END$$",
    "CREATE TRIGGER events_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON paclm.events "
    "FOR EACH STATEMENT EXECUTE FUNCTION paclm.refuse()",
    "CREATE TABLE paclm.belief (one integer PRIMARY KEY CHECK (one = 1), seq bigint NOT NULL, sealed bytea NOT NULL)",
    "CREATE TABLE paclm.secret (one integer PRIMARY KEY CHECK (one = 1), sealed bytea NOT NULL)",
    "CREATE TABLE paclm.checkpoint (one integer PRIMARY KEY CHECK (one = 1), seq bigint NOT NULL, "
    "digest bytea NOT NULL, key text NOT NULL, mac bytea NOT NULL)",
    f"CREATE TABLE paclm.usage (hour text, key text, {_COUNTS}units numeric NOT NULL, public_tokens bigint NOT NULL, "
    "PRIMARY KEY (hour, key))",
)
M002_SERVICE = (
    "CREATE TABLE paclm.service (one integer PRIMARY KEY CHECK (one = 1), changes bigint NOT NULL)",
    "INSERT INTO paclm.service VALUES (1, 0)",
    'CREATE TABLE paclm.keys (name text COLLATE "C" PRIMARY KEY, digest bytea NOT NULL UNIQUE, '
    "is_admin integer NOT NULL, quota_tokens bigint, used_tokens bigint NOT NULL DEFAULT 0, "
    'reserved_tokens bigint NOT NULL DEFAULT 0, created text COLLATE "C" NOT NULL, revoked_at text)',
    "CREATE TABLE paclm.replies (id bytea PRIMARY KEY, key_name text NOT NULL, salt bytea NOT NULL, "
    "body_check bytea NOT NULL, state text NOT NULL CHECK (state IN ('running', 'stored', 'lost')), sealed bytea, "
    "expires double precision NOT NULL) WITH (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0, "
    "toast.autovacuum_vacuum_threshold = 0, toast.autovacuum_vacuum_scale_factor = 0)",
    "CREATE INDEX replies_expires ON paclm.replies (expires)",
    # For a login that may not read the head: holds the epoch until the transaction ends, if it is still that one.
    "CREATE FUNCTION paclm.hold_epoch(mine bigint) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER "
    "SET search_path = pg_catalog, pg_temp AS "
    "$$BEGIN PERFORM 1 FROM paclm.head WHERE epoch = mine FOR KEY SHARE; RETURN FOUND; END$$",
    "REVOKE ALL ON FUNCTION paclm.hold_epoch(bigint) FROM PUBLIC",
)
M003_PROMISES = ("CREATE TABLE paclm.promises (kind text PRIMARY KEY, at text NOT NULL)",)
_COUNTED = "used_tokens >= 0 AND reserved_tokens >= 0 AND used_tokens::numeric + reserved_tokens <= 2::numeric ^ 62"
M004_PERMIT = (
    "DROP FUNCTION paclm.hold_epoch(bigint)",  # it locked the head, so a front could stop a takeover
    "DROP TABLE paclm.service",  # with all rights to it
    # Who may write keys and replies: the server whose permit has this hash. `writer` is the transaction that showed it.
    "CREATE TABLE paclm.writing (one integer PRIMARY KEY CHECK (one = 1), changes bigint NOT NULL, "
    "epoch bigint NOT NULL, permit bytea, writer xid8)",
    "INSERT INTO paclm.writing VALUES (1, 0, 0)",
    "CREATE FUNCTION paclm.begin_writing(mine text) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER "
    "SET search_path = pg_catalog, pg_temp AS "
    "$$BEGIN UPDATE paclm.writing SET changes = changes + 1, writer = pg_current_xact_id() "
    "WHERE permit = sha256(convert_to(mine, 'UTF8')); RETURN FOUND; END$$",
    "REVOKE ALL ON FUNCTION paclm.begin_writing(text) FROM PUBLIC",
    "CREATE FUNCTION paclm.refuse_others() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
    "SET search_path = pg_catalog, pg_temp AS "
    "$$BEGIN IF NOT pg_has_role(session_user, current_user, 'MEMBER') "
    "AND NOT EXISTS (SELECT FROM paclm.writing WHERE writer = pg_current_xact_id()) "
    "THEN RAISE EXCEPTION 'this transaction has shown no permit' USING ERRCODE = '42501'; END IF; RETURN NULL; END$$",
    f"UPDATE paclm.keys SET used_tokens = 2::numeric ^ 62, reserved_tokens = 0 WHERE NOT ({_COUNTED})",
    f"ALTER TABLE paclm.keys ADD CONSTRAINT counted CHECK ({_COUNTED})",
    *(
        f"CREATE TRIGGER {table}_permitted BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON paclm.{table} "
        "FOR EACH STATEMENT EXECUTE FUNCTION paclm.refuse_others()"
        for table in ("keys", "replies")
    ),
)
MIGRATIONS = {
    "m001_initial": M001_INITIAL,
    "m002_service": M002_SERVICE,
    "m003_promises": M003_PROMISES,
    "m004_permit": M004_PERMIT,
}
LEDGER_TABLES = ("head", "holder", "events", "belief", "secret", "checkpoint", "usage", "promises", "migrations")
"""What only the holder of the ledger may write."""
_LOCK = int.from_bytes(b"paclm", "big")


def migrate(db: LimitedConnection, name: str, at: str) -> None:
    """Make the schema, or apply the migrations that it lacks; one process at a time."""
    with translated(name):
        if has_schema(db) and _applied(db) == set(MIGRATIONS):  # without a lock that others might keep
            return
    with translated(name), db.transaction():
        db.execute("SET LOCAL lock_timeout = '10s'")
        db.execute("SET LOCAL idle_in_transaction_session_timeout = '5s'")
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        if not has_schema(db):
            db.execute(f"CREATE SCHEMA {SCHEMA}")
            db.execute("CREATE TABLE paclm.migrations (name text PRIMARY KEY, at text NOT NULL)")
        applied = _applied(db)
        if newer := sorted(applied - set(MIGRATIONS)):
            raise LedgerError(f"{name} was made by a newer paclm (it has {', '.join(newer)}). Update paclm to open it.")
        for step, statements in MIGRATIONS.items():
            if step not in applied:
                for statement in statements:
                    db.execute(sql.SQL(statement))
                db.execute("INSERT INTO paclm.migrations VALUES (%s, %s)", (step, at))


def _applied(db: LimitedConnection) -> set[str]:
    return {found for (found,) in db.execute("SELECT name FROM paclm.migrations")}


def has_schema(db: LimitedConnection) -> bool:
    """Whether the database holds the tables of a ledger, empty or not."""
    found = db.execute("SELECT to_regclass('paclm.migrations') IS NOT NULL").fetchone()
    return bool(found and found[0])


def kind_of(db: LimitedConnection, name: str) -> str:
    """What the database holds; refused where it holds no ledger."""
    with translated(name, is_reading=True):
        found = db.execute("SELECT kind FROM paclm.head").fetchone() if has_schema(db) else None
    if found is None or found[0] == "none":
        raise LedgerMissing(f"There is no ledger in {name}. It is made when the workspace first generates a token.")
    return str(found[0])


def check_schema(db: LimitedConnection, name: str) -> None:
    """Refuse tables whose rows could be changed: the trigger that forbids it must be there and enabled."""
    with translated(name, is_reading=True):
        trigger: Any = db.execute(
            "SELECT tgenabled FROM pg_trigger WHERE tgrelid = 'paclm.events'::regclass AND tgname = 'events_no_change'"
        ).fetchone()
        durable = "SELECT relname FROM pg_class WHERE relnamespace = 'paclm'::regnamespace AND relpersistence = 'p'"
        tables = {found for (found,) in db.execute(durable)}  # unlogged ones are empty after a crash
        missing = sorted(set(LEDGER_TABLES) - tables)
        older = sorted(set(MIGRATIONS) - _applied(db)) if missing and "migrations" in tables else []
    if older:
        raise LedgerUnwritable(
            f"{name} was made by an older paclm (it lacks {', '.join(older)}). Open it once with this one, with "
            "paclm serve or another command that writes, then repeat."
        )
    if missing or trigger is None or trigger[0] not in (b"O", b"A", "O", "A"):
        raise LedgerTampered(
            f"{name} has not the tables and triggers of a ledger: {', '.join(missing) or 'events_no_change'} differ."
        )
