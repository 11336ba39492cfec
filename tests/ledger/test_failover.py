"""A standby that lacked the last commits is promoted: the witness, on another server, notices and restores them."""

from contextlib import closing

import pytest

from ledger.stores import PostgresSetup, crash
from ledger.witnesses import DatabaseWitnesses
from paclm.errors import LedgerRolledBack
from paclm.ledger.address import Holding, open_reader
from postgres import PostgresServer, wait_for


@pytest.fixture
def primary():
    with PostgresServer() as server:
        yield server


@pytest.fixture
def failed_over(primary, postgres, tmp_path):
    """Three steps reach an asynchronous standby; it is away for three more, the primary dies, and it is promoted."""
    setup = PostgresSetup(tmp_path, primary, primary.create_database())
    setup.witness = DatabaseWitnesses(postgres).new()
    ledger = setup.with_steps(3, witness=setup.witness)
    with primary.standby(synchronous=False) as standby:
        url = standby.url(setup.address)
        wait_for(lambda: rows_at(url) == ledger.head.seq, "the standby to have every row")
        standby.stop()
        setup.commit(ledger, 4, 5, 6)
        setup.account_before = ledger.account
        crash(ledger)
        primary.kill()
        standby.start()
        standby.promote()
        setup.address, setup.folder = url, tmp_path / "other host"  # the other host noted nothing
        setup.holding = Holding(setup.folder, take_over=True)
        yield setup


def rows_at(url):
    with closing(open_reader(url)) as store:
        return store.count_rows()


def test_a_promoted_standby_without_the_last_commits_is_refused_and_restored_by_the_witness(failed_over):
    setup = failed_over
    with pytest.raises(LedgerRolledBack, match=r"row 5.*row 8"):
        setup.open(witness=setup.witness)
    event = setup.adopt(witness=setup.witness)
    assert (event.proof, event.last_seq, event.lost_until) == ("witness", 5, 8)
    with setup.open(witness=setup.witness) as ledger:
        assert (ledger.account, ledger.sealed_belief) == (setup.account_before, b"sealed 6")
        setup.commit(ledger, 7)
    assert setup.verify([setup.key]).intact
