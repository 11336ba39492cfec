"""A file cut off anywhere: SQLite reads the missing part of a page as zeros, and so NULL in every field."""

import shutil
from contextlib import closing

import pytest

from ledger.stores import IN_A_FILE
from paclm.errors import LedgerDamaged, LedgerTampered
from paclm.ledger.events import BadRow, Row, check_row
from paclm.ledger.sqlite_store import SqliteStore
from paclm.ledger.verify import remaining_tokens, signing_key, witness_on_record

pytestmark = IN_A_FILE

STEP, LAST_PAGES = 256, 2 * 4096
REFUSALS = (LedgerDamaged, LedgerTampered)


@pytest.fixture
def whole(setup):
    """The files of a closed ledger whose newest rows are on its last page."""
    setup.with_steps(6).close()
    return {file.name: file.read_bytes() for file in setup.folder.iterdir()}


def put(setup, whole, size):
    """The ledger's folder as it was, but for a ledger of so many bytes."""
    shutil.rmtree(setup.folder)
    setup.folder.mkdir(mode=0o700)
    for name, content in whole.items():
        file = setup.folder / name
        file.write_bytes(content[:size] if name == setup.path.name else content)
        file.chmod(0o600)


def sizes(whole):
    full = len(whole["ledger.sqlite"])
    return range(full - LAST_PAGES, full, STEP)


def test_a_ledger_cut_off_anywhere_in_its_last_pages_is_refused(setup, whole):
    attempts = (
        lambda: remaining_tokens(setup.path),
        lambda: witness_on_record(setup.path),
        setup.open,
        lambda: setup.adopt(),
    )
    for size in sizes(whole):
        for keys in (None, [setup.key]):
            put(setup, whole, size)
            report = setup.verify(keys)
            assert not report.intact, size
            assert report.problem
            assert "None" not in report.signers
        for attempt in attempts:
            put(setup, whole, size)
            with pytest.raises(REFUSALS):
                attempt()
    put(setup, whole, None)
    assert setup.verify([setup.key]).intact
    assert remaining_tokens(setup.path) > 0
    setup.open().close()


def test_a_key_that_was_cut_off_has_no_name(setup, whole):
    put(setup, whole, len(whole["ledger.sqlite"]) - 3072)  # the page's list of rows is there, and none of the rows
    assert signing_key(setup.path) is None


@pytest.mark.parametrize("name", Row._fields)
@pytest.mark.parametrize("wrong", [None, 1.5])
def test_a_field_of_another_type_makes_a_bad_row_and_no_crash(setup, name, wrong):
    setup.with_steps(1).close()
    with closing(SqliteStore.open_reader(setup.path)) as store:
        row = store.row(2)
    check_row(row, None)
    with pytest.raises(BadRow):
        check_row(row._replace(**{name: wrong}), None)
