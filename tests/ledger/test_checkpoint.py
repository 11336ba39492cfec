"""The signed checkpoint: opening checks the rows since, `verify` checks all."""

import pytest

from paclm.errors import LedgerRolledBack, LedgerTampered
from paclm.ledger import ledger as ledger_module
from paclm.ledger.address import open_reader
from paclm.ledger.events import Checkpoint, Head, LedgerKeys
from paclm.ledger.postgres_store import PostgresStore
from paclm.ledger.sqlite_store import SqliteStore

EVERY = 5


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(ledger_module, "CHECKPOINT_EVERY", EVERY)


@pytest.fixture
def rows_read(monkeypatch):
    """The numbers of the rows that were read as parts of a chain."""
    seqs = []
    for store in (SqliteStore, PostgresStore):

        def rows(self, after=0, real=store.rows):
            for row in real(self, after):
                seqs.append(row.seq)
                yield row

        monkeypatch.setattr(store, "rows", rows)
    return seqs


@pytest.fixture
def closed(setup):
    """Twelve rows; the checkpoint is of row 10."""
    setup.with_steps(11).close()
    assert stored(setup).seq == 10
    return setup


def stored(setup):
    store = open_reader(setup.address)
    try:
        return store.checkpoint()
    finally:
        store.close()


def put(setup, checkpoint):
    setup.run("UPDATE checkpoint SET seq = ?, digest = ?, key = ?, mac = ?", tuple(checkpoint))


def forge(setup, seq):
    """A checkpoint of that row as it is now, by somebody who knows neither key nor MAC."""
    ((digest,),) = setup.run("SELECT digest FROM events WHERE seq = ?", (seq,))
    put(setup, stored(setup)._replace(seq=seq, digest=digest))


EDIT = "UPDATE events SET at = '2027-01-01T00:00:00.000Z' WHERE seq = ?"


def test_one_is_signed_every_few_rows_and_opening_reads_those_after_it(closed, rows_read):
    with closed.open() as ledger:
        assert rows_read == [11, 12]
        assert stored(closed).is_signed(ledger.ledger_id, ledger.keys)
        closed.commit(ledger, 12, 13, 14)
        assert stored(closed).seq == 15
    rows_read.clear()
    closed.open().close()
    assert rows_read == []


def test_opening_signs_one_where_many_rows_were_checked(closed, rows_read):
    closed.run("DELETE FROM checkpoint")
    closed.open().close()
    assert (rows_read, stored(closed).seq) == ([*range(1, 13)], 12)


def test_an_edited_row_behind_it_is_found_by_verify_and_one_after_it_at_opening(closed):
    closed.edit((EDIT, (4,)))
    closed.open().close()
    for keys in (None, [closed.key]):
        report = closed.verify(keys)
        assert (report.intact, report.bad_seq, report.verified_through) == (False, 4, 3)
        report = closed.verify(keys, only_recent=True)
        assert (report.intact, report.verified_through) == (True, 12)
    closed.edit((EDIT, (11,)))
    with pytest.raises(LedgerTampered, match="Row 11"):
        closed.open()
    report = closed.verify(only_recent=True)
    assert (report.intact, report.bad_seq, report.verified_through) == (False, 11, 10)


@pytest.mark.parametrize("how", ["no MAC", "another ledger", "a rotated key"])
def test_one_that_the_key_in_force_did_not_sign_for_this_ledger_covers_nothing(closed, rows_read, how):
    """An edited row behind it is refused at opening, too."""
    keys, ledger = {}, closed.resume()
    if how == "a rotated key":
        with closed.open() as rotated:
            rotated.rotate_key(closed.new_key)
        keys = closed.new_keys
    rows_read.clear()
    if how == "no MAC":
        forge(closed, 11)
    else:
        name = "0" * 32 if how == "another ledger" else ledger.ledger_id
        put(closed, Checkpoint.sign(name, ledger.head, LedgerKeys(closed.key)))
    closed.edit((EDIT, (4,)))
    with pytest.raises(LedgerTampered, match="Row 4"):
        closed.open(**keys)
    assert rows_read == [1, 2, 3, 4]
    assert not closed.verify([closed.new_key, closed.key] if keys else [closed.key]).intact


def test_a_forged_one_is_named_by_verify(closed):
    forge(closed, 11)
    report = closed.verify([closed.key])
    assert not report.intact
    assert "checkpoint" in report.problem
    assert closed.verify().intact  # without the key nothing shows it


def test_one_of_another_row_or_beyond_the_newest_is_a_rollback(closed):
    ledger = closed.resume()
    for seq, digest in ((40, bytes(32)), (8, ledger.head.digest)):
        put(closed, Checkpoint.sign(ledger.ledger_id, Head(seq, digest), ledger.keys))
        with pytest.raises(LedgerRolledBack, match=rf"row 12.*checkpoint is of row {seq}"):
            closed.open()
        for only_recent in (False, True):
            assert not closed.verify([closed.key], only_recent=only_recent).intact


def test_rows_removed_behind_it_are_noticed_without_note_and_witness(closed):
    closed.resume(12, 13, 14)
    assert stored(closed).seq == 15
    closed.lock.unlink()
    closed.edit(("DELETE FROM events WHERE seq > 12",), ("UPDATE belief SET seq = 12, sealed = ?", (b"sealed 11",)))
    with pytest.raises(LedgerRolledBack, match="checkpoint is of row 15"):
        closed.open()


def test_a_rotation_signs_a_new_one(setup, rows_read):
    with setup.with_steps(1) as ledger:
        assert stored(setup) is None
        ledger.rotate_key(setup.new_key)
        assert stored(setup).is_signed(ledger.ledger_id, LedgerKeys(setup.new_key))
        setup.commit(ledger, 2)
    rows_read.clear()
    setup.open(**setup.new_keys).close()
    assert rows_read == [4]


@pytest.mark.parametrize("checkpoint", [Checkpoint(None, None, None, None), Checkpoint(3, None, "k", b"m")])
def test_half_a_checkpoint_covers_nothing(setup, monkeypatch, checkpoint):
    """As SQLite reads a page that was cut off."""
    setup.with_steps(3).close()
    for store in (SqliteStore, PostgresStore):
        monkeypatch.setattr(store, "checkpoint", lambda self: checkpoint)
    setup.open().close()
    assert not setup.verify([setup.key]).intact
    assert not setup.verify(only_recent=True).intact
