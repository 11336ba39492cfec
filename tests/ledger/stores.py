"""The suite's two stores: what tests do with a ledger, with its file or its database, and with their copies."""

import shutil
import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ledger.witnesses import FileWitnesses
from paclm.config import MechanismConfig
from paclm.ledger import address as addresses
from paclm.ledger import recovery
from paclm.ledger.address import Holding
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.verify import verify
from paclm.privacy.accounting import units_up

KEY = bytes(range(32))
NEW_KEY = bytes(range(1, 33))
PER_TOKEN, TOTAL = 2.0**-20, 2.0**-10
PRICE = units_up(PER_TOKEN)
SETTINGS = MechanismConfig(per_token=PER_TOKEN, total=TOTAL)
IN_A_FILE, IN_A_DATABASE = pytest.mark.stores("sqlite"), pytest.mark.stores("postgres")
"""Marks of tests that are about one store."""


def crash(ledger):
    """End a ledger in a database as the death of its process does: nobody is told."""
    store = ledger.store
    for db in (store.hold._db, store.db):
        db.pgconn.finish()
    store.close()
    if ledger.witness is not None:
        ledger.witness.close()


class Setup(ABC):
    """One ledger, the curator's folder, and a clock that moves only when told to. Each store inherits this."""

    key, new_key, settings, price = KEY, NEW_KEY, SETTINGS, PRICE
    holding = None
    address: str | Path

    def __init__(self, folder):
        self.folder = folder / "curator"
        self.folder.mkdir(mode=0o700)
        self.lock = self.folder / "ledger.lock"
        self.witnesses = FileWitnesses(folder)
        self.witness = self.witnesses.new()
        self.backup = folder / "copy.sqlite"
        self.new_keys = {"mac_key": NEW_KEY, "old_keys": [KEY]}
        self.now = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)

    @abstractmethod
    def another(self, folder):
        """Place for another ledger of the same kind, with its own folder."""

    @abstractmethod
    def content(self):
        """All that is stored, for comparison."""

    @abstractmethod
    def copy(self, name="before.sqlite"):
        """A copy of the closed ledger made by hand, without the mark of a backup."""

    @abstractmethod
    def put(self, copy):
        """Replace the ledger by a copy, as an operator might by hand."""

    @abstractmethod
    def remove(self):
        """Remove the ledger, and leave the curator's folder."""

    @abstractmethod
    def run(self, statement, arguments=()):
        """The rows of one SQL statement, as somebody with the database's own program would run it."""

    @abstractmethod
    def edit(self, *statements):
        """Change the ledger with its triggers removed, then restore them."""

    def create(self, **changes):
        arguments = {
            "workspace": "digest of a workspace",
            "num_worlds": 128,
            "settings": SETTINGS,
            "sealed_belief": b"sealed 0",
            "clock": self.clock,
            "holding": self.holding,
        }
        return Ledger.create(self.address, changes.pop("mac_key", KEY), **(arguments | changes))

    def open(self, **changes):
        options = {"clock": self.clock, "holding": self.holding} | changes
        return Ledger.open(self.address, options.pop("mac_key", KEY), **options)

    @property
    def opening(self):
        """Python that opens the ledger in another process, after `Ledger` and `Holding` were imported."""
        place = str(self.address) if isinstance(self.address, Path) else self.address
        folder = "" if self.holding is None else f"__import__('pathlib').Path({str(self.folder)!r})"
        return f"Ledger.open({place!r}, bytes(range(32)), holding=Holding({folder}))"

    def adopt(self, **options):
        options = {"confirmed_by": "ada", "holding": self.holding} | options
        return recovery.adopt_restored(self.address, options.pop("mac_key", KEY), **options)

    def replace_witness(self, witness, **options):
        options = {"confirmed_by": "ada", "holding": self.holding} | options
        recovery.replace_witness(self.address, KEY, witness=witness, **options)

    def back_up(self, to=None):
        recovery.backup(self.address, to or self.backup)

    def verify(self, keys=None, **options):
        return verify(self.address, keys, folder=self.folder, **options)

    def clock(self):
        return self.now

    def wait(self, **span):
        self.now += timedelta(**span)

    @staticmethod
    def step(tokens=4, key="alice", dissent=1, public=0):
        return [Usage(key, tokens, dissent, tokens, tokens * PRICE, public)]

    def with_steps(self, count, **changes):
        ledger = self.create(**changes)
        self.commit(ledger, *range(1, count + 1))
        return ledger

    def commit(self, ledger, *numbers):
        """Steps whose sealed beliefs have these numbers."""
        for n in numbers:
            ledger.commit(self.step(), b"sealed %d" % n)

    def resume(self, *numbers, **options):
        """Open, commit these steps and close; the closed ledger still shows its state."""
        with self.open(**options) as ledger:
            self.commit(ledger, *numbers)
        return ledger

    def second(self, folder):
        """The same ledger and notes in a copied workspace."""
        folder.mkdir()
        other = self.another(folder)
        other.put(self.copy())
        shutil.copy(self.lock, other.lock)
        return other

    def lose_steps(self, steps):
        """Two steps with a witness, a backup, more steps, and a rollback to the backup; returns the lost account."""
        self.with_steps(2, witness=self.witness).close()
        self.back_up()
        account = self.resume(*range(3, steps + 3), witness=self.witness).account
        self.newest = self.copy("newest.sqlite")
        self.put(self.backup)
        return account


class SqliteSetup(Setup):
    """A ledger in a file."""

    database_error = sqlite3.Error
    drop_trigger = "DROP TRIGGER events_no_delete"
    forbidden = "UPDATE belief SET seq = 0"
    refuse_secrets = ("CREATE TRIGGER refusing BEFORE INSERT ON secret BEGIN SELECT RAISE(ABORT, 'no'); END",)

    def __init__(self, folder):
        super().__init__(folder)
        self.path = self.folder / "ledger.sqlite"

    @property
    def address(self):
        return self.path

    def another(self, folder):
        return SqliteSetup(folder)

    def content(self):
        return self.path.read_bytes()

    def copy(self, name="before.sqlite"):
        return Path(shutil.copy(self.path, self.folder.parent / name))

    def put(self, copy):
        self.remove()
        shutil.copy(copy, self.path)
        self.path.chmod(0o600)

    def remove(self):
        for file in self.folder.glob("ledger.sqlite*"):
            file.unlink()

    def run(self, statement, arguments=()):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(statement, arguments).fetchall()

    def edit(self, *statements):
        triggers = self.run("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        dropped, restored = [(f"DROP TRIGGER {name}",) for name, _ in triggers], [(sql,) for _, sql in triggers]
        for statement in (*dropped, *statements, *restored):
            self.run(*statement)


class PostgresSetup(Setup):
    """A ledger in a database. A copy by hand is a dump of its tables."""

    drop_trigger = "DROP TRIGGER events_no_change ON events"
    forbidden = "UPDATE paclm.belief SET seq = 0"
    refuse_secrets = ("ALTER TABLE secret ADD CHECK (sealed <> 'secret, new seal')",)
    tables = ("head", "holder", "events", "belief", "secret", "checkpoint", "usage")

    def __init__(self, folder, server, url):
        super().__init__(folder)
        self.server, self.address = server, url
        self.holding = Holding(self.folder)

    @property
    def database_error(self):
        import psycopg

        return psycopg.Error

    def content(self):
        return self.copy()

    def another(self, folder):
        return PostgresSetup(folder, self.server, self.server.create_database())

    def connect(self):
        """A connection as the ledger's owner, whose statements may name tables without their schema."""
        return self.server.connect(self.address, options="-c search_path=paclm")

    def copy(self, name=""):
        with self.connect() as db:
            return {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in self.tables}

    def put(self, copy):
        self.remove()
        if isinstance(copy, Path):  # a backup in a file
            with closing(addresses.open_reader(copy)) as store:
                addresses.create(self.address, store.copy(), store.kind, self.holding)
            return
        from paclm.ledger import postgres_schema
        from paclm.ledger.postgres import connect

        with closing(connect(self.address)) as db:
            postgres_schema.migrate(db, "", "")
        with self.connect() as db, db.transaction():
            for table, rows in copy.items():
                db.execute("DELETE FROM head; DELETE FROM holder" if table == "head" else "SELECT 1")
                for row in rows:
                    db.execute(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row)

    def remove(self):
        with self.connect() as db:
            db.execute("DROP SCHEMA IF EXISTS paclm CASCADE")

    def run(self, statement, arguments=()):
        with self.connect() as db:
            done = db.execute(statement.replace("?", "%s"), arguments or None)
            return done.fetchall() if done.description else []

    def edit(self, *statements):
        self.run("ALTER TABLE events DISABLE TRIGGER USER")
        for statement in statements:
            self.run(*statement)
        self.run("ALTER TABLE events ENABLE TRIGGER USER")
        self.run("UPDATE head SET seq = (SELECT max(seq) FROM events)")
