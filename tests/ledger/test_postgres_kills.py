"""Kills at random instants under a load of commits: what was reported is in the ledger, and at most one step more."""

import pytest

from ledger import postgres_kills
from ledger.faults import create


def run(postgres, database, victims, seed):
    create(database)
    assert postgres_kills.run_kills(postgres, database, victims, seed) >= len(victims)


@pytest.mark.parametrize("victim", postgres_kills.VICTIMS)
def test_five_kills_lose_nothing_that_was_reported(postgres, database, victim):
    run(postgres, database, [victim] * 5, 21)


@pytest.mark.stress
@pytest.mark.parametrize("victim", postgres_kills.VICTIMS)
def test_twenty_kills_lose_nothing_that_was_reported(postgres, database, victim):
    run(postgres, database, [victim] * 20, 22)
