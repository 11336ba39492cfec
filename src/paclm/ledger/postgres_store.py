"""A ledger in PostgreSQL. A commit is one statement that moves the head only for the newest epoch and the row before.

Whatever an older holder believes, its statement moves nothing and is refused. After any error, any warning of the
server and any doubt whether a commit is durable, the ledger stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from paclm.errors import InvalidInput, LedgerBusy, LedgerError, LedgerNotDurable, LedgerTampered, LedgerUnwritable
from paclm.ledger.address import Holding
from paclm.ledger.events import COUNTS, Checkpoint, Head, Row, Usage
from paclm.ledger.head_notes import HeadNote, HeadNotes, lock_path, open_notes, read_note
from paclm.ledger.postgres import READING_SECONDS, LimitedConnection, connect, name_of, translated
from paclm.ledger.postgres_hold import Hold, fenced
from paclm.ledger.postgres_schema import check_schema, kind_of, migrate
from paclm.ledger.state import UsageTable, add_usages
from paclm.ledger.store import Commit, Copy, Kind, Store, not_a_number

_COLUMNS = "seq, at, kind, body, key, previous, digest, mac"
_SUMS = ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in COUNTS)
_ADD_UP = (
    f"SELECT {{0}}, {', '.join(f'sum({name})' for name in COUNTS)}, "
    f"bool_and(coalesce({' AND '.join(f'{name} >= 0' for name in COUNTS)} AND units = trunc(units), false)) "
    'FROM paclm.usage GROUP BY {0} ORDER BY {0} COLLATE "C"'
)
"""Says last whether each is a number: `sum` would skip what is none."""
_DURABLE = "ARRAY[current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')]"
"""Read with every commit: a pooler or an administrator may change them at any time."""
_COMMIT = f"""
WITH moved AS (
  UPDATE paclm.head SET seq = %(seq)s
  WHERE epoch = %(epoch)s AND seq = %(after)s AND pg_backend_pid() = %(backend)s
    AND ARRAY['on', 'on', 'on'] = {_DURABLE}
    AND (SELECT digest FROM paclm.events WHERE events.seq = %(after)s) = %(previous)s
  RETURNING 1
), added AS (
  INSERT INTO paclm.events ({_COLUMNS})
  SELECT %(seq)s::bigint, %(at)s::text, %(kind)s::text, %(body)s::text, %(key)s::text, %(previous)s::bytea,
    %(digest)s::bytea, %(mac)s::bytea FROM moved
), belief AS (
  INSERT INTO paclm.belief SELECT 1, %(belief_seq)s::bigint, %(belief)s::bytea FROM moved
  WHERE %(belief)s::bytea IS NOT NULL
  ON CONFLICT (one) DO UPDATE SET seq = excluded.seq, sealed = excluded.sealed
), secret AS (
  INSERT INTO paclm.secret SELECT 1, %(secret)s::bytea FROM moved WHERE %(secret)s::bytea IS NOT NULL
  ON CONFLICT (one) DO UPDATE SET sealed = excluded.sealed
), sums AS (
  INSERT INTO paclm.usage (hour, key, {", ".join(COUNTS)})
  SELECT %(hour)s::text, entry.* FROM moved, unnest(%(keys)s::text[], %(tokens)s::bigint[],
    %(dissent_tokens)s::bigint[], %(charged_tokens)s::bigint[], %(units)s::numeric[], %(public_tokens)s::bigint[])
    AS entry
  ON CONFLICT (hour, key) DO UPDATE SET {_SUMS}
)
SELECT count(*), pg_backend_pid(), {_DURABLE} FROM moved
"""
_PART = 10_000
"""Rows read at a time."""
_SET_CHECKPOINT = (
    "INSERT INTO paclm.checkpoint VALUES (1, %s, %s, %s, %s) ON CONFLICT (one) DO UPDATE "
    "SET seq = excluded.seq, digest = excluded.digest, key = excluded.key, mac = excluded.mac"
)


class PostgresStore(Store):
    """One open ledger: by its holder, or by a reader."""

    why_rows_vanish = "the database was restored from a backup, or a standby that lacked the last commits was promoted"

    def __init__(self, url: str, db: LimitedConnection, hold: Hold | None, notes: HeadNotes | None) -> None:
        self.name = name_of(url)
        self.db = db
        self.hold = hold
        self._notes = notes
        self._note_read: HeadNote | None = None
        self._backend = db.info.backend_pid

    @classmethod
    def create(cls, url: str, content: Copy, kind: Kind, holding: Holding) -> None:
        """Fill an empty database in one transaction."""
        hold = Hold.take(url, holding)
        try:
            db = connect(url, answer_seconds=READING_SECONDS)
            try:
                store = cls(url, db, hold, None)
                with translated(store.name), db.transaction():
                    store._fill(content, kind)
            finally:
                db.close()
        finally:
            hold.release()

    @classmethod
    def discard(cls, url: str, holding: Holding) -> None:
        """Remove the target of an unfinished move: nothing was ever released from it."""
        hold = Hold.take(url, holding)
        try:
            db = connect(url)
            try:
                with translated(hold.name), db.transaction():
                    found = db.execute(
                        "SELECT 1 FROM paclm.head WHERE kind = 'incoming' AND epoch = %s FOR UPDATE", (hold.epoch,)
                    ).fetchone()
                    if found is None:
                        raise LedgerError(f"{hold.name} is in use, and is not removed.")
                    db.execute("DROP SCHEMA paclm CASCADE")
            finally:
                db.close()
        finally:
            hold.release()

    def _fill(self, content: Copy, kind: Kind) -> None:
        if self.kind != "none":
            raise LedgerBusy(f"{self.name} holds a ledger already. A secret has one ledger, which is never replaced.")
        seq = 0
        with (
            self.db.cursor() as cursor,
            cursor.copy(f"COPY paclm.events ({_COLUMNS}) FROM STDIN (FORMAT BINARY)") as to,
        ):
            to.set_types(["int8", "text", "text", "text", "text", "bytea", "bytea", "bytea"])
            for row in content.rows:
                to.write_row(row)
                seq = row.seq
        self.db.execute("INSERT INTO paclm.belief VALUES (1, %s, %s)", content.belief)
        if content.secret is not None:
            self.db.execute("INSERT INTO paclm.secret VALUES (1, %s)", (content.secret,))
        if content.checkpoint is not None:
            self.db.execute(_SET_CHECKPOINT, content.checkpoint)
        for (hour, key), usage in (content.usage or {}).items():
            counts = [getattr(usage, name) for name in COUNTS]
            self.db.execute("INSERT INTO paclm.usage VALUES (%s, %s, %s, %s, %s, %s, %s)", (hour, key, *counts))
        moved = self.db.execute(
            "UPDATE paclm.head SET seq = %s, kind = %s WHERE epoch = %s AND seq = 0", (seq, kind, self._epoch)
        )
        if moved.rowcount != 1:
            raise fenced(self.name)

    @classmethod
    def open_writer(cls, url: str, holding: Holding) -> PostgresStore:
        """Take the next epoch and open for writing."""
        asking = connect(url)
        try:
            kind_of(asking, name_of(url))  # raises where there is none, before an epoch is taken
        finally:
            asking.close()
        hold, notes = Hold.take(url, holding), None
        try:
            notes = None if holding.folder is None else open_notes(holding.folder)
            return cls(url, connect(url), hold, notes)
        except BaseException:
            hold.release()
            if notes is not None:
                notes.close()
            raise

    @classmethod
    def open_reader(cls, url: str, folder: Path | None = None) -> PostgresStore:
        """Open for reading alone, also while another process writes; a standby server will do."""
        note = None if folder is None else read_note(lock_path(folder / "ledger"))  # before any row is read
        db = connect(url, is_reading=True)
        try:
            kind_of(db, name_of(url))
            store = cls(url, db, None, None)
            store._note_read = note
            return store
        except BaseException:
            db.close()
            raise

    def close(self) -> None:
        """Close the connection, and tell others that nobody holds the ledger."""
        if self._notes is not None:
            self._notes.close()
        if self.hold is not None:
            self.hold.release()
        self.db.close()

    @property
    def epoch(self) -> int | None:
        """What the writes of this holder name; None for a reader."""
        return None if self.hold is None else self.hold.epoch

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Call this, from another thread and once, if another process takes over or the connection is lost."""
        if self.hold is not None:
            self.hold.watch(call, self.db)

    @property
    def _epoch(self) -> int:
        if self.hold is None:
            raise LedgerUnwritable(f"{self.name} was opened for reading.")
        self.hold.refuse_if_lost()
        return self.hold.epoch

    def append(self, commit: Commit) -> None:
        """Write a row and what belongs to it with one statement; all is durable when this returns."""
        added: UsageTable = {}
        add_usages(added, commit.row.at, commit.entries)
        belief_seq, belief = commit.belief or (None, None)
        values = {
            **commit.row._asdict(),
            "epoch": self._epoch,
            "after": commit.after,
            "backend": self._backend,
            "belief_seq": belief_seq,
            "belief": belief,
            "secret": commit.secret,
            "hour": commit.row.at[:13],
            "keys": [usage.key for usage in added.values()],
            **{name: [getattr(usage, name) for usage in added.values()] for name in COUNTS},
        }
        with translated(self.name):
            moved, backend, durable = self.db.execute(_COMMIT, values).fetchone() or (0, self._backend, ["on"] * 3)
        if moved != 1 and (backend, durable) != (self._backend, ["on"] * 3):
            raise LedgerNotDurable(
                f"The session of {self.name} was swapped or changed by another (synchronous_commit, fsync and "
                f"full_page_writes are {', '.join(durable)}), so nothing was written. Set all three to on, connect to "
                "the server itself, without a pooler, then restart."
            )
        if moved != 1:
            raise fenced(self.name)
        if commit.checkpoint is not None:
            self.set_checkpoint(commit.checkpoint)

    @property
    def kind(self) -> Kind:
        """What the head says."""
        found = self._one("SELECT kind FROM paclm.head")
        return found[0] if found is not None and found[0] in get_args(Kind) else "none"

    def mark(self, kind: Kind) -> None:
        """Change what this ledger is."""
        with translated(self.name):
            done = self.db.execute("UPDATE paclm.head SET kind = %s WHERE epoch = %s", (kind, self._epoch))
        if done.rowcount != 1:
            raise fenced(self.name)

    @property
    def note(self) -> HeadNote | None:
        """The newest row when this machine last held the ledger."""
        return self._note_read if self._notes is None else self._notes.newest

    def note_head(self, head: Head) -> None:
        """Note the newest row on this machine."""
        if self._notes is not None:
            self._notes.write(head)

    def migrate(self, at: str) -> None:
        """Apply the migrations that the database lacks."""
        migrate(self.db, self.name, at)

    def settle(self) -> None:
        """Nothing: a commit is where it belongs when it returns."""

    def set_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Store a checkpoint. It is signed: one by an older holder is true as well."""
        with translated(self.name):
            self.db.execute(_SET_CHECKPOINT, checkpoint)

    def freeze_view(self) -> None:
        """Read one state of the database from here on."""
        self._one("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def check_pages(self) -> None:
        """Nothing: reading every row finds what page checksums can tell."""

    def check_schema(self) -> None:
        """Refuse tables whose rows could be changed."""
        check_schema(self.db, self.name)
        found = self._one("SELECT seq = (SELECT max(seq) FROM paclm.events) FROM paclm.head")
        if found != (True,):
            raise LedgerTampered(f"The head of {self.name} is not its newest row: rows were removed or added by hand.")

    def count_rows(self, after: int = 0) -> int:
        """How many rows there are after that one."""
        return int(self._one("SELECT count(*) FROM paclm.events WHERE seq > %s", after)[0])

    def newest_row(self) -> Row | None:
        """The row with the highest number."""
        found = self._one(f"SELECT {_COLUMNS} FROM paclm.events ORDER BY seq DESC LIMIT 1")
        return None if found is None else Row(*found)

    def row(self, seq: int) -> Row | None:
        """One row by its number."""
        if not 0 < seq < 2**63:  # a forged row may name any number
            return None
        found = self._one(f"SELECT {_COLUMNS} FROM paclm.events WHERE seq = %s", seq)
        return None if found is None else Row(*found)

    def rows(self, after: int = 0) -> Iterator[Row]:
        """The rows after that one, oldest first, in parts."""
        while found := self._all(
            f"SELECT {_COLUMNS} FROM paclm.events WHERE seq > %s ORDER BY seq LIMIT {_PART}", after
        ):
            yield from (Row(*row) for row in found)
            after = found[-1][0]

    def notable_rows(self) -> Iterator[Row]:
        """All rows but engine steps, oldest first."""
        found = self._all(f"SELECT {_COLUMNS} FROM paclm.events WHERE kind <> 'stepped' ORDER BY seq")
        yield from (Row(*row) for row in found)

    def signers(self) -> tuple[str, ...]:
        """Names of the keys that the rows name as theirs, oldest first."""
        return tuple(name for (name,) in self._all("SELECT key FROM paclm.events GROUP BY key ORDER BY max(seq)"))

    def belief(self) -> tuple[Any, Any]:
        """The row that the stored belief was sealed for, and the sealed bytes; not checked."""
        return self._one("SELECT seq, sealed FROM paclm.belief") or (None, None)

    def secret(self) -> bytes | None:
        """The sealed secret; not checked."""
        found = self._one("SELECT sealed FROM paclm.secret")
        return None if found is None else found[0]

    def checkpoint(self) -> Checkpoint | None:
        """The stored checkpoint; not checked."""
        found = self._one("SELECT seq, digest, key, mac FROM paclm.checkpoint")
        return None if found is None else Checkpoint(*found)

    def usage(self) -> UsageTable:
        """The stored sums by hour and key."""
        rows = self._all(f"SELECT hour, key, {', '.join(COUNTS)} FROM paclm.usage ORDER BY hour, key")
        try:
            return {(hour, key): Usage(key, *map(int, counts)) for hour, key, *counts in rows}
        except (TypeError, ValueError, OverflowError, InvalidInput):
            raise not_a_number() from None

    def usage_by(self, column: Literal["hour", "key"]) -> dict[str, Usage]:
        """The same, added up for each hour or each key."""
        found = self._all(_ADD_UP.format(column))
        try:
            if not all(are_numbers for *_, are_numbers in found):
                raise not_a_number()
            return {name: Usage(name, *map(int, counts)) for name, *counts, _ in found}
        except (ValueError, OverflowError, InvalidInput):  # NaN and infinity are numeric, too
            raise not_a_number() from None

    def _one(self, statement: str, *arguments: object) -> Any:
        found = self._all(statement, *arguments)
        return found[0] if found else None

    def _all(self, statement: str, *arguments: object) -> list[Any]:
        with translated(self.name, is_reading=self.hold is None):
            cursor = self.db.execute(statement, arguments or None)
            return cursor.fetchall() if cursor.description else []
