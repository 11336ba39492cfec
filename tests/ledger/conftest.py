"""Every ledger test runs on both stores, except those marked with `stores`: they are about one.

Its witness is a file, except where the mark `witnesses` says otherwise.
"""

from itertools import product

import pytest

from ledger.stores import PostgresSetup, SqliteSetup
from ledger.witnesses import DatabaseWitnesses

STORES = ("sqlite", "postgres")


def pytest_generate_tests(metafunc):
    if "setup" in metafunc.fixturenames:
        stores, witnesses = (metafunc.definition.get_closest_marker(name) for name in ("stores", "witnesses"))
        pairs = list(product(stores.args if stores else STORES, witnesses.args if witnesses else ["file"]))
        names = [store if witness == "file" else f"{store}, witness in a database" for store, witness in pairs]
        metafunc.parametrize("setup", pairs, ids=names, indirect=True)


@pytest.fixture
def setup(request, tmp_path):
    """A place for a ledger, a file or a database, and for its witness."""
    store, witness = request.param
    if store == "sqlite":
        setup = SqliteSetup(tmp_path)
    else:
        setup = PostgresSetup(tmp_path, request.getfixturevalue("postgres"), request.getfixturevalue("database"))
    if witness == "database":
        setup.witnesses = DatabaseWitnesses(request.getfixturevalue("postgres"))
        setup.witness = setup.witnesses.new()
    return setup
