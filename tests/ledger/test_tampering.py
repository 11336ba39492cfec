"""What a person or a bad disk can do to the file: each has its own error, and nothing is released after it."""

import dataclasses
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from ledger.stores import IN_A_FILE
from paclm.errors import (
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LedgerFull,
    LedgerStopped,
    LedgerTampered,
    LedgerUnwritable,
    LedgerWrongKey,
)
from paclm.ledger import sqlite_file
from paclm.ledger.address import open_reader
from paclm.ledger.events import GENESIS, Head, LedgerKeys, Row, digest_of, make_row
from paclm.ledger.sqlite_store import transaction
from paclm.ledger.state import parse_row, to_state_fields


@pytest.fixture
def closed(setup):
    """A ledger with ten steps, closed."""
    setup.with_steps(10).close()
    return setup


def refused(setup, error, match="ledger"):
    """The same error at opening and in the report; returns the report."""
    with pytest.raises(error, match=match):
        setup.open()
    report = setup.verify()
    assert not report.intact
    assert re.search(match, report.problem)
    return report


def test_rows_cannot_be_changed_through_the_database(closed):
    for statement in ("UPDATE events SET body = 'x' WHERE seq = 3", "DELETE FROM events WHERE seq = 3"):
        with pytest.raises(closed.database_error, match="append-only"):
            closed.run(statement)


@IN_A_FILE
def test_a_truncated_an_emptied_and_an_overwritten_file_are_refused(closed):
    os.truncate(closed.path, closed.path.stat().st_size // 2)
    refused(closed, LedgerDamaged)
    os.truncate(closed.path, 0)
    with pytest.raises(LedgerDamaged):
        closed.open()
    assert not closed.verify().intact
    closed.path.write_bytes(b"not a database at all" * 500)
    refused(closed, LedgerDamaged, "NOTADB")


MOVE = "UPDATE events SET seq = ? WHERE seq = ?"
EDITS = {
    "edited body": (5, ("UPDATE events SET body = replace(body, '\"tokens\":4', '\"tokens\":1') WHERE seq = 5",)),
    "edited time": (7, ("UPDATE events SET at = '2027-01-01T00:00:00.000Z' WHERE seq = 7",)),
    "deleted": (7, ("DELETE FROM events WHERE seq = 6",)),
    "moved up": (11, ("DELETE FROM events WHERE seq = 6",), *[(MOVE, (seq - 1, seq)) for seq in range(7, 12)]),
    "swapped": (4, (MOVE, (99, 4)), (MOVE, (4, 5)), (MOVE, (5, 99))),
}


@pytest.mark.parametrize("edited", EDITS)
def test_the_first_bad_row_is_named(closed, edited):
    bad, *statements = EDITS[edited]
    closed.edit(*statements)
    report = refused(closed, LedgerTampered, r"Row \d+")
    assert report.bad_seq == bad or edited == "moved up"


def test_removing_the_newest_row_leaves_a_belief_that_does_not_fit(closed):
    closed.edit(("DELETE FROM events WHERE seq = 11",))
    refused(closed, LedgerTampered, "belief .* row 10")


def test_a_signed_row_of_another_history_breaks_the_link_of_the_next(setup):
    """It has the same charge and belief and a MAC of the same key; only the row after it does not follow from it."""
    setup.with_steps(3).close()
    before = setup.copy()
    setup.resume(4, 5)
    newest = setup.copy("newest.sqlite")
    setup.put(before)
    setup.lock.unlink()
    setup.wait(seconds=1)
    setup.resume(4)
    (other,) = setup.run("SELECT at, digest, mac FROM events WHERE seq = 5")
    setup.put(newest)
    setup.lock.unlink()
    setup.edit(("UPDATE events SET at = ?, digest = ?, mac = ? WHERE seq = 5", other))
    assert refused(setup, LedgerTampered).bad_seq == 6


@IN_A_FILE
def test_a_belief_of_another_type_is_refused(closed):
    """One bit of a record's header makes text of a blob; STRICT tables do not check types when reading."""
    ((sealed,),) = closed.run("SELECT sealed FROM belief")
    closed.run("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(closed.path.read_bytes())
    blob = bytes([2 * len(sealed) + 12])  # SQLite's mark of a blob of this length; text has the next number
    data[data.rindex(blob, 0, data.rindex(sealed))] += 1
    closed.path.write_bytes(data)
    assert "belief" in closed.verify().problem.lower()
    refused(closed, LedgerError, "belief")


@pytest.mark.parametrize("change", [("sealed = ?", b"sealed 9"), ("seq = ?", 10)])
def test_a_changed_belief_is_refused(closed, change):
    column, value = change
    closed.edit((f"UPDATE belief SET {column}", (value,)))
    refused(closed, LedgerTampered, "belief")


def test_a_removed_trigger_is_refused(closed):
    closed.run(closed.drop_trigger)
    refused(closed, LedgerTampered, "events_no_")


@pytest.mark.parametrize("only_recent", [False, True])
@pytest.mark.parametrize("change", ["units = '0'", "tokens = tokens + 1"])
def test_changed_figures_by_key_are_found(closed, change, only_recent):
    closed.edit((f"UPDATE usage SET {change}",))
    report = closed.verify(only_recent=only_recent)
    assert (report.intact, report.bad_seq) == (False, None)
    assert report.contents.state.tokens == 40


NO_NUMBERS = ["-16", "NULL"]
IN_FILES, IN_DATABASES = (
    ["''", "'x'", "'0,0'", "' 1'", "'-0'", "'5' || char(0)", f"'{'9' * 5000}'"],
    ["0.5", "'NaN'", "'Infinity'"],
)


def test_sums_that_are_no_numbers_are_refused_also_where_the_rest_adds_up(closed):
    """The database adds up the sums, and skips or takes what is no number."""
    ((units,),) = closed.run("SELECT units FROM usage")
    is_file = not isinstance(closed.address, str)
    if not is_file:
        closed.run("ALTER TABLE usage ALTER units DROP NOT NULL")
    closed.run("INSERT INTO usage SELECT hour, 'mallory', 0, 0, 0, '0', 0 FROM usage")
    assert closed.verify(only_recent=True).intact
    for value in NO_NUMBERS + (IN_FILES if is_file else IN_DATABASES):
        closed.run(f"UPDATE usage SET units = {value} WHERE key = 'mallory'")
        left = int(units) - {"-16": -16, "' 1'": 1}.get(value, 0)
        closed.run("UPDATE usage SET units = ? WHERE key = 'alice'", (str(left),))
        for only_recent in (False, True):
            report = closed.verify(only_recent=only_recent)
            assert "not a number" in (report.problem or ""), value
        with closing(open_reader(closed.address)) as store:
            for column in ("hour", "key"):
                with pytest.raises(LedgerTampered, match="not a number"):
                    store.usage_by(column)


def forge(setup, change):
    """Rewrite the last row and its digest as is possible without the key, signed with another key."""
    rows = [Row(*found) for found in setup.run("SELECT * FROM events ORDER BY seq")]
    event, after = change(*parse_row(rows[-1]))
    forged = make_row(Head(10, rows[-2].digest), 11, rows[-1].at, event, to_state_fields(after), LedgerKeys(bytes(32)))
    row = forged._replace(key=rows[-1].key)
    row = row._replace(digest=digest_of(*row[:6]))
    setup.edit(("DELETE FROM events WHERE seq = 11",), ("INSERT INTO events VALUES (?,?,?,?,?,?,?,?)", row))
    setup.lock.unlink()  # its note is of the row as it was, and is not signed


def test_a_row_forged_with_correct_hashes_and_sums_fails_its_mac(closed):
    def cheaper(event, after):
        entry = dataclasses.replace(event.entries[0], tokens=3, charged_tokens=3, units=3 * closed.price)
        saved = {"tokens": after.tokens - 1, "charged_tokens": after.charged_tokens - 1}
        after = dataclasses.replace(after, spent_units=after.spent_units - closed.price, **saved)
        return dataclasses.replace(event, entries=(entry,)), after

    forge(closed, cheaper)
    closed.edit(("UPDATE usage SET tokens = 39, charged_tokens = 39, units = ?", (str(39 * closed.price),)))
    assert closed.verify().intact  # hashes alone cannot show it, and the report shows that no MAC was checked
    assert not closed.verify().macs_checked
    report = closed.verify([closed.key])
    assert (report.intact, report.bad_seq) == (False, 11)
    with pytest.raises(LedgerTampered, match=r"Row 11 .*MAC"):
        closed.open()


def free(event, after):
    entry = event.entries[0]
    spent, charged = after.spent_units - entry.units, after.charged_tokens - entry.charged_tokens
    entry = dataclasses.replace(entry, units=0, charged_tokens=0)
    after = dataclasses.replace(after, spent_units=spent, charged_tokens=charged)
    return dataclasses.replace(event, entries=(entry,)), after


@pytest.mark.parametrize(
    "change", [free, lambda event, after: (event, dataclasses.replace(after, spent_units=0))], ids=["price", "totals"]
)
def test_a_row_below_its_price_or_with_wrong_totals_is_found_without_a_key(closed, change):
    forge(closed, change)
    report = closed.verify()
    assert (report.intact, report.bad_seq) == (False, 11)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"event":{},"after":{}}', '{"event":1,"after":2}'])
def test_a_row_that_cannot_be_read_is_named(closed, body):
    row = Row(*closed.run("SELECT * FROM events WHERE seq = 11")[0])._replace(body=body)
    closed.edit(("UPDATE events SET body = ?, digest = ? WHERE seq = 11", (body, digest_of(*row[:6]))))
    report = closed.verify()
    assert (report.intact, report.bad_seq) == (False, 11)


def test_rows_that_were_all_written_again_under_another_key_do_not_pass_for_a_missing_key(closed):
    head, keys, forged = Head(0, GENESIS), LedgerKeys(bytes(32)), []
    for found in closed.run("SELECT * FROM events ORDER BY seq"):
        event, after = parse_row(Row(*found))
        row = make_row(head, found[0], Row(*found).at, event, to_state_fields(after), keys)
        forged.append((row.previous, row.digest, row.mac, row.key, row.seq))
        head = Head(row.seq, row.digest)
    change = "UPDATE events SET previous = ?, digest = ?, mac = ?, key = ? WHERE seq = ?"
    closed.edit(*((change, values) for values in forged))
    assert not closed.verify([closed.key]).intact


def test_another_key_and_a_ledger_of_a_newer_paclm_are_refused(closed):
    with pytest.raises(LedgerWrongKey):
        closed.open(mac_key=bytes(32))
    with pytest.raises(LedgerWrongKey, match="not checked"):
        closed.verify([bytes(32)])
    closed.run("INSERT INTO migrations VALUES ('m999_later', '2030')")
    with pytest.raises(LedgerError, match="m999_later"):
        closed.open()


@IN_A_FILE
def test_a_full_disk_stops_the_ledger_and_keeps_what_was_committed(setup):
    ledger = setup.with_steps(3)
    (pages,) = ledger.store.db.execute("PRAGMA page_count").fetchone()
    ledger.store.db.execute(f"PRAGMA max_page_count={pages}")

    def fill():
        while True:
            setup.before = ledger.account
            ledger.commit(setup.step(), b"sealed")

    with pytest.raises(LedgerFull, match="SQLITE_FULL"):
        fill()
    with pytest.raises(LedgerStopped, match="SQLITE_FULL"):
        ledger.commit(setup.step(), b"later")
    ledger.close()
    with setup.open() as ledger:
        assert ledger.account == setup.before


@IN_A_FILE
def test_a_write_that_the_system_cuts_off_stops_the_ledger(setup):
    """A limit on file sizes, in its own process: the write fails in the kernel, as on a failing disk."""
    setup.create().close()
    program = f"""
import resource, sys
from paclm.errors import LedgerError, LedgerStopped
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
ledger = Ledger.open({str(setup.path)!r}, bytes(range(32)))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    while True:
        ledger.commit([Usage("a", 1, 0, 1, {setup.price})], b"sealed")
        print(ledger.account.tokens, flush=True)
except LedgerError as error:
    print(type(error).__name__)
try:
    ledger.commit([], None)
except LedgerStopped:
    print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *counted, name, stopped = done.stdout.split()
    assert (name in ("LedgerFull", "LedgerUnwritable"), stopped) == (True, "stopped")
    with setup.open() as ledger:
        assert ledger.account.tokens == int(counted[-1]) > 0


@IN_A_FILE
def test_another_program_that_holds_the_database_stops_the_ledger(setup, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.05)
    ledger = setup.with_steps(1)
    with closing(sqlite3.connect(setup.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerBusy, match="SQLITE_BUSY"):
            setup.commit(ledger, 2)
    with pytest.raises(LedgerStopped):
        setup.commit(ledger, 2)
    ledger.close()
    with setup.open() as ledger:
        assert ledger.sealed_belief == b"sealed 1"


@IN_A_FILE
def test_a_transaction_keeps_other_writers_out_from_its_start(setup):
    """What it reads cannot change before it writes."""
    with setup.with_steps(1) as ledger, closing(sqlite3.connect(setup.path, timeout=0)) as other:
        with transaction(ledger.store.db), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("UPDATE usage SET units = '0'")
        other.execute("UPDATE usage SET units = '0'")


@IN_A_FILE
def test_a_folder_that_cannot_be_written_is_refused(closed, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who can write everywhere
    with pytest.raises(LedgerUnwritable):
        closed.open()


@IN_A_FILE
def test_losing_the_side_file_after_a_crash_is_seen_by_the_witness(setup, tmp_path):
    """The write-ahead log is part of the ledger: without it the newest commits are gone."""
    ledger = setup.with_steps(3, witness=setup.witness)
    image = tmp_path / "image"
    image.mkdir(mode=0o700)
    shutil.copy(setup.path, image / "ledger.sqlite")  # by hand, without ledger.sqlite-wal
    ledger.close()
    setup.path = image / "ledger.sqlite"
    with pytest.raises(LedgerError, match="row 5"):
        setup.open(witness=setup.witness)


def test_a_body_is_canonical_json_that_names_its_fields(closed):
    ((body,),) = closed.run("SELECT body FROM events WHERE seq = 2")
    fields = json.loads(body)
    assert fields["event"]["entries"][0]["units"] == 4 * closed.price
    assert json.dumps(fields, sort_keys=True, separators=(",", ":")) == body
