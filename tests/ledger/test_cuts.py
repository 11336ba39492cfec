"""A file cut off anywhere: SQLite reads a page that ends early as if zeros stood there, and a NULL in every field."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest

from paclm.errors import LedgerDamaged, LedgerTampered
from paclm.ledger.events import BadRow, Row, check_row
from paclm.ledger.recovery import adopt_restored
from paclm.ledger.store import Store
from paclm.ledger.verify import remaining_tokens, signing_key, verify, witness_on_record

STEP, LAST_PAGES = 256, 2 * 4096
REFUSALS = (LedgerDamaged, LedgerTampered)


@pytest.fixture
def whole(books):
    """The files of a closed ledger whose newest rows are on its last page."""
    books.with_steps(6).close()
    return {file.name: file.read_bytes() for file in books.folder.iterdir()}


def put(books, whole, size):
    """The ledger's folder as it was, but for a ledger of so many bytes."""
    shutil.rmtree(books.folder)
    books.folder.mkdir(mode=0o700)
    for name, content in whole.items():
        file = books.folder / name
        file.write_bytes(content[:size] if name == books.path.name else content)
        file.chmod(0o600)


def sizes(whole):
    full = len(whole["ledger.sqlite"])
    return range(full - LAST_PAGES, full, STEP)


def test_a_ledger_cut_off_anywhere_in_its_last_pages_is_not_intact(books, whole):
    for size in sizes(whole):
        for keys in (None, [books.key]):
            put(books, whole, size)
            report = verify(books.path, keys)
            assert not report.intact, size
            assert report.problem
            assert "None" not in report.signers
    put(books, whole, None)
    assert verify(books.path, [books.key]).intact


def test_nothing_is_told_from_a_ledger_that_was_cut_off(books, whole):
    for size in sizes(whole):
        for look in (remaining_tokens, witness_on_record):
            put(books, whole, size)
            with pytest.raises(REFUSALS):
                look(books.path)
    put(books, whole, None)
    assert remaining_tokens(books.path) > 0


def test_a_ledger_that_was_cut_off_is_neither_opened_nor_adopted(books, whole):
    for size in sizes(whole):
        put(books, whole, size)
        with pytest.raises(REFUSALS):
            books.open()
        put(books, whole, size)
        with pytest.raises(REFUSALS):
            adopt_restored(books.path, books.key, confirmed_by="ada")
    put(books, whole, None)
    books.open().close()


def test_a_key_that_was_cut_off_has_no_name(books, whole):
    put(books, whole, len(whole["ledger.sqlite"]) - 3072)  # the page's list of rows is there, and none of the rows
    assert signing_key(books.path) is None


@pytest.mark.parametrize("name", Row._fields)
@pytest.mark.parametrize("wrong", [None, 1.5])
def test_a_field_of_another_type_makes_a_bad_row_and_no_crash(books, name, wrong):
    books.with_steps(1).close()
    with closing(Store.open_reader(books.path)) as store:
        row = store.row(2)
    check_row(row, None)
    with pytest.raises(BadRow):
        check_row(row._replace(**{name: wrong}), None)
