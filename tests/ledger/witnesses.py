"""The suite's two kinds of witness: what tests do with a file, or with a database on its server."""

import shutil
from urllib.parse import urlsplit

import pytest

from paclm.ledger import file_witness
from paclm.ledger.address import name_of

BOTH_WITNESSES = pytest.mark.witnesses("file", "database")
IN_A_WITNESS_FILE = pytest.mark.witnesses("file")
IN_A_WITNESS_DATABASE = pytest.mark.witnesses("database")
"""Marks of tests that are about them; without one the witness is a file."""


class FileWitnesses:
    """Witnesses in one folder."""

    kind = file_witness.FileWitness

    def __init__(self, folder):
        self.folder = folder

    def new(self, name="elsewhere.witness"):
        return self.folder / name

    def copy(self, place, name="old.witness"):
        return shutil.copy(place, self.folder / name)

    def remove(self, place):
        place.unlink()

    def rewrite(self, place, change):
        """Change the payload of both slots: with a fresh checksum, and without the key."""
        content = place.read_bytes()
        half = len(content) // 2
        slots = [file_witness._unpack(content[start : start + half]) for start in (0, half)]
        packed = (file_witness._pack(change(payload), mac) for payload, mac in slots)
        place.write_bytes(b"".join(slot.ljust(half, b"\0") for slot in packed))


class DatabaseWitnesses:
    """Witnesses on one server, each in a database of its own."""

    def __init__(self, server):
        from paclm.ledger.postgres_witness import PostgresWitness

        self.server, self.kind = server, PostgresWitness

    def new(self, _=None):
        return self.server.create_database()

    def copy(self, place, _=None):
        copy = self.new()
        [[ledger, turn, payload, mac]] = self.run(place, "SELECT * FROM paclm_witness.testimony")
        self.run(copy, "CREATE SCHEMA paclm_witness")
        self.run(copy, "CREATE TABLE paclm_witness.testimony (ledger text, turn bigint, payload bytea, mac bytea)")
        self.run(copy, "INSERT INTO paclm_witness.testimony VALUES (%s, %s, %s, %s)", ledger, turn, payload, mac)
        return copy

    def remove(self, place):
        self.run(place, "DROP SCHEMA paclm_witness CASCADE")

    def rewrite(self, place, change):
        [[payload]] = self.run(place, "SELECT payload FROM paclm_witness.testimony")
        self.run(place, "UPDATE paclm_witness.testimony SET payload = %s", change(payload))

    def cut(self, place):
        """End every connection to the database."""
        with self.server.connect() as admin:
            name = urlsplit(place).path[1:]
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])

    def run(self, place, statement, *arguments):
        with self.server.connect(place) as db:
            done = db.execute(statement, arguments or None)
            return done.fetchall() if done.description else []


def shown(place):
    """How messages name a witness."""
    return name_of(place).replace(".", r"\.")
