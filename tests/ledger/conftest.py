"""Every ledger test runs on both stores, except those marked with `stores`: they are about one."""

import pytest

from ledger.stores import PostgresSetup, SqliteSetup

STORES = ("sqlite", "postgres")


def pytest_generate_tests(metafunc):
    if "setup" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("stores")
        metafunc.parametrize("setup", STORES if marker is None else marker.args, indirect=True)


@pytest.fixture
def setup(request, tmp_path):
    """A place for a ledger: a file or a database."""
    if request.param == "sqlite":
        return SqliteSetup(tmp_path)
    return PostgresSetup(tmp_path, request.getfixturevalue("postgres"), request.getfixturevalue("database"))
