"""A witness in PostgreSQL, best on another server than the ledger: one row for each ledger, in a schema of its own.

A write is one statement that names the write before. It needs no lock: of two processes that have read the same
testimony one writes, and the other is refused. Older testimonies stay in the table's file, sealed, until a vacuum.
"""

from __future__ import annotations

from paclm.errors import LedgerRolledBack, LedgerTampered, LedgerUnwritable, WitnessMissing
from paclm.ledger.events import LedgerKeys
from paclm.ledger.postgres import LimitedConnection, connect, name_of, translated
from paclm.ledger.testimony import IF_LOST, Signed, Testimony, Witness

_LOCK = int.from_bytes(b"witness", "big")
_TABLE = (
    "CREATE TABLE paclm_witness.testimony (ledger text PRIMARY KEY, turn bigint NOT NULL, payload bytea NOT NULL, "
    "mac bytea NOT NULL)"
)
_WRITE = """
UPDATE paclm_witness.testimony SET turn = %(turn)s, payload = %(payload)s, mac = %(mac)s
WHERE ledger = %(ledger)s AND turn = %(turn)s - 1 AND mac = %(seen)s
  AND pg_backend_pid() = %(backend)s AND current_setting('synchronous_commit') = 'on'
"""


class PostgresWitness(Witness):
    """An open witness in a database."""

    def __init__(self, url: str, keys: LedgerKeys) -> None:
        super().__init__(name_of(url), keys)
        self._db = _connect(url)
        self._newest: Signed | None = None

    @classmethod
    def create(cls, url: str, keys: LedgerKeys, testimony: Testimony) -> PostgresWitness:
        """Add the first testimony of a ledger, which must have none there."""
        witness = cls(url, keys)
        try:
            witness._add(Signed.sign(testimony, 0, keys))
        except BaseException:
            witness.close()
            raise
        return witness

    def _add(self, first: Signed) -> None:
        ledger, db = first.testimony.ledger, self._db
        with translated(self.name), db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            if not _has_table(db):
                db.execute("CREATE SCHEMA paclm_witness")
                db.execute(_TABLE)
            added = db.execute(
                "INSERT INTO paclm_witness.testimony VALUES (%s, 0, %s, %s) ON CONFLICT DO NOTHING",
                (ledger, first.payload, first.mac),
            )
        if added.rowcount != 1:
            raise LedgerRolledBack(
                f"{self.name} holds a witness of this ledger already. A new witness starts empty; pass an existing one "
                "when opening instead. If that one was replaced: DELETE FROM paclm_witness.testimony "
                f"WHERE ledger = '{ledger}' there, or name another database."
            )
        self._newest = first

    @staticmethod
    def exists(url: str, ledger: str) -> bool:
        """Whether the database has a testimony of this ledger."""
        db = _connect(url)
        try:
            return _row(db, name_of(url), ledger) is not None
        finally:
            db.close()

    def read(self, ledger: str) -> Testimony:
        """The testimony of this ledger."""
        found = _row(self._db, self.name, ledger)
        if found is None:
            raise WitnessMissing(
                f"There is no testimony of this ledger in {self.name}. Name the right database (PACLM_WITNESS or "
                f"--witness); {IF_LOST}"
            )
        turn, payload, mac = found
        newest = Signed.parse(payload, mac, self.name)
        self.check(newest, ledger)
        if newest.turn != turn:
            raise LedgerTampered(f"The turn in the witness {self.name} is not the one that the ledger's key signed.")
        self._newest = newest
        return newest.testimony

    def write(self, testimony: Testimony) -> None:
        """Replace the testimony that was read, or written last."""
        before = self._newest
        if before is None:
            raise LedgerUnwritable(f"The witness {self.name} was not read.")
        signed = Signed.sign(testimony, before.turn + 1, self.keys)
        values = {
            "ledger": testimony.ledger,
            "turn": signed.turn,
            "payload": signed.payload,
            "mac": signed.mac,
            "seen": before.mac,
            "backend": self._db.info.backend_pid,
        }
        with translated(self.name):
            written = self._db.execute(_WRITE, values).rowcount
        if written != 1:
            raise LedgerRolledBack(
                f"The witness {self.name} was written by another process, which took this ledger over or serves a copy "
                "of it. Only the one that the witness records may go on: stop the other, or start this one again as "
                "its standby. Two histories of one secret cannot be merged."
            )
        self._newest = signed

    def write_twice(self, testimony: Testimony) -> None:
        """Write once: there is no other slot."""
        self.write(testimony)

    def close(self) -> None:
        """Close the connection."""
        self._db.close()


def _connect(url: str) -> LimitedConnection:
    try:
        return connect(url)
    except LedgerUnwritable as error:
        raise WitnessMissing(f"The witness cannot be opened. {error} It is needed here; {IF_LOST}") from None


def _has_table(db: LimitedConnection) -> bool:
    found = db.execute("SELECT to_regclass('paclm_witness.testimony') IS NOT NULL").fetchone()
    return bool(found and found[0])


def _row(db: LimitedConnection, name: str, ledger: str) -> tuple[int, bytes, bytes] | None:
    with translated(name):
        if not _has_table(db):
            return None
        return db.execute(
            "SELECT turn, payload, mac FROM paclm_witness.testimony WHERE ledger = %s", (ledger,)
        ).fetchone()
