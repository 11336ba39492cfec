"""A ledger in PostgreSQL: the fence, the hold, and what of the server's settings is refused."""

import os
import re
import threading
import traceback
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from ledger.stores import IN_A_DATABASE, crash
from paclm.errors import (
    LedgerError,
    LedgerFenced,
    LedgerHeld,
    LedgerNotDurable,
    LedgerStopped,
    LedgerTampered,
    LedgerUnwritable,
    LedgerWrongKey,
)
from paclm.ledger.address import Holding, name_of, open_reader, without_password
from paclm.ledger.events import Usage
from paclm.ledger.postgres_hold import Hold
from paclm.ledger.postgres_schema import MIGRATIONS
from postgres import wait_for

pytestmark = IN_A_DATABASE


def content(setup):
    """All but the heartbeats."""
    return {table: rows for table, rows in setup.copy().items() if table != "holder"}


def take_over(setup):
    return setup.open(holding=setup.holding._replace(take_over=True))


def test_every_opening_takes_the_next_epoch(setup):
    epochs = []
    for attempt in (setup.create, setup.open, setup.open):
        with attempt() as ledger:
            epochs.append(ledger.store.epoch)
    assert epochs == [epochs[0] + n for n in range(3)]
    with closing(open_reader(setup.address)) as reader:
        assert reader.epoch is None


WRITES = {
    "a step": lambda setup, ledger: setup.commit(ledger, 9),
    "public tokens": lambda setup, ledger: ledger.commit([Usage("a", public_tokens=1)], None),
    "a secret": lambda setup, ledger: ledger.seal_secret(b"another", "file"),
    "a rotation": lambda setup, ledger: ledger.rotate_key(setup.new_key, b"new seal"),
    "an extension": lambda setup, ledger: ledger.extend(1.0, confirmed_by="ada"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("has_moved", [True, False], ids=["after a row of the new one", "at the same row"])
def test_nothing_of_an_older_holder_is_written(setup, write, has_moved):
    old = setup.with_steps(2)
    with take_over(setup) as new:
        if has_moved:
            setup.commit(new, 3)
        before = content(setup)
        with pytest.raises(LedgerFenced, match="took over"):
            WRITES[write](setup, old)
        with pytest.raises(LedgerStopped):
            setup.commit(old, 4)
        old.close()
        assert content(setup) == before
        setup.commit(new, 4)  # closing the old one took nothing from the new one
        with pytest.raises(LedgerHeld):
            setup.open()
    assert setup.verify([setup.key]).intact


def test_an_older_holder_does_not_change_what_the_ledger_is(setup):
    old = setup.with_steps(1)
    with take_over(setup):
        with pytest.raises(LedgerFenced):
            old.store.mark("moved")
        assert old.store.kind == "live"
    old.close()


def test_while_a_holder_lives_others_only_read(setup):
    with setup.with_steps(2) as ledger:
        for attempt in (setup.open, setup.adopt, setup.create, lambda: setup.replace_witness(None)):
            with pytest.raises(LedgerHeld, match=f"process {os.getpid()}, last seen"):
                attempt()
        assert setup.verify([setup.key]).intact
        setup.back_up()
        setup.commit(ledger, 3)  # no refusal took the epoch
    setup.open().close()


def test_a_crashed_holder_counts_as_dead_once_the_database_has_not_seen_it_for_long(setup):
    crash(setup.with_steps(2))
    with pytest.raises(LedgerHeld, match="15 s after"):
        setup.open()
    setup.run("UPDATE holder SET seen = seen - interval '14 seconds'")
    with pytest.raises(LedgerHeld):
        setup.open(holding=setup.holding._replace(stale_seconds=60))
    setup.run("UPDATE holder SET seen = seen - interval '2 seconds'")
    assert setup.resume(3).account.tokens == 12


def test_nothing_is_left_after_closing_nor_after_a_refusal(setup):
    setup.with_steps(1).close()
    for attempt in (setup.open, lambda: setup.open(mac_key=bytes(32)), setup.open):
        try:
            attempt().close()
        except LedgerWrongKey:
            continue
    assert [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name] == []
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert not any(os.path.exists(name) and os.path.samefile(name, setup.lock) for name in descriptors)
    query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'paclm'"
    wait_for(lambda: setup.run(query) == [], "all connections to end")


def set_for_all(setup, name, value):
    """As an administrator of the server or the database may, for every new session."""
    with setup.server.connect() as admin:
        admin.execute(f"ALTER DATABASE {urlsplit(setup.address).path[1:]} SET {name} = {value}")


def test_the_sessions_own_settings_win_over_the_databases(setup):
    for name, value in (("synchronous_commit", "off"), ("statement_timeout", 60_000), ("client_min_messages", "error")):
        set_for_all(setup, name, value)
    with setup.with_steps(2) as ledger:
        assert ledger.store.db.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert ledger.store.db.execute("SHOW statement_timeout").fetchone() == ("0",)
        assert ledger.account.tokens == 8


@pytest.mark.parametrize("name", ["fsync", "full_page_writes"])
def test_a_server_that_does_not_write_to_its_disk_is_refused(setup, name):
    setup.with_steps(1).close()

    def set_to(value):
        with setup.server.connect() as admin:
            admin.execute(f"ALTER SYSTEM SET {name} = {value}")
            admin.execute("SELECT pg_reload_conf()")
        wait_for(lambda: setup.run(f"SHOW {name}") == [(value,)], f"{name} = {value}")

    ledger = setup.open()
    set_to("off")
    try:
        with pytest.raises(LedgerNotDurable, match=name):
            wait_for_end(lambda: setup.commit(ledger, 2))  # its session learns of the change a little later
        ledger.close()
        with pytest.raises(LedgerNotDurable, match=f"{name} = off"):
            setup.open()
        assert setup.verify([setup.key]).intact
    finally:
        set_to("on")
    setup.open().close()


def wait_for_end(act):
    """Repeat it until it raises."""
    for _ in range(50):
        act()


def another_backend(ledger):
    ledger.store._backend += 1


def another_setting(ledger):
    ledger.store.db.execute("SET synchronous_commit = off")


@pytest.mark.parametrize("change", [another_backend, another_setting])
def test_a_session_that_a_pooler_swapped_or_reset_is_refused(setup, change):
    with setup.with_steps(2) as ledger:
        before = content(setup)
        change(ledger)
        with pytest.raises(LedgerNotDurable, match="pooler"):
            setup.commit(ledger, 3)
        with pytest.raises(LedgerStopped):
            setup.commit(ledger, 3)
        assert content(setup) == before
    assert setup.resume(3).account.tokens == 12


def test_a_warning_of_the_server_stops_the_ledger(setup):
    """Such as that a commit did not wait for the standby server: it is here, and nothing of it was released."""
    with setup.with_steps(2) as ledger:
        setup.run(
            "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN RAISE WARNING 'not replicated'; RETURN NEW; END$$"
        )
        setup.run("CREATE TRIGGER warns BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION warn()")
        with pytest.raises(LedgerUnwritable, match=r"not replicated.*doubt"):
            setup.commit(ledger, 3)
        with pytest.raises(LedgerStopped):
            setup.commit(ledger, 4)
    setup.run("DROP TRIGGER warns ON events")
    assert setup.resume().account.tokens == 12


def test_a_standby_server_is_read_and_never_written(setup):
    with setup.with_steps(2) as ledger, setup.server.standby(synchronous=False) as standby:
        primary, setup.address = setup.address, standby.url(setup.address)
        wait_for(lambda: setup.verify([setup.key]).num_events == 3, "the standby to have all rows")
        with pytest.raises(LedgerUnwritable, match="standby"):
            take_over(setup)
        setup.address = primary
        setup.commit(ledger, 3)


def edited(setup, *statements):
    """The reason for which a ledger after these statements is refused, at opening and by `verify`."""
    for statement in statements:
        setup.run(statement)
    with pytest.raises(LedgerTampered) as found:
        setup.open()
    assert setup.verify([setup.key]).problem == str(found.value)
    return str(found.value)


@pytest.mark.parametrize("how", ["DISABLE TRIGGER events_no_change", "ENABLE REPLICA TRIGGER events_no_change"])
def test_tables_whose_rows_could_be_changed_are_refused(setup, how):
    setup.with_steps(2).close()
    assert "events_no_change" in edited(setup, f"ALTER TABLE events {how}")


def test_a_missing_table_and_a_head_that_is_not_the_newest_row_are_refused(setup):
    setup.with_steps(2).close()
    assert "not its newest row" in edited(setup, "UPDATE head SET seq = 2")
    setup.run("UPDATE head SET seq = 3")
    setup.open().close()
    assert "belief" in edited(setup, "ALTER TABLE belief SET UNLOGGED")
    setup.run("ALTER TABLE belief SET LOGGED")
    assert "usage" in edited(setup, "DROP TABLE usage")


def test_a_gap_is_not_counted_as_verified(setup):
    setup.with_steps(6).close()
    setup.run("ALTER TABLE events DISABLE TRIGGER events_no_change")
    setup.run("DELETE FROM events WHERE seq = 4")
    setup.run("ALTER TABLE events ENABLE TRIGGER events_no_change")
    report = setup.verify([setup.key])
    assert (report.intact, report.verified_through) == (False, 3)


def test_a_newer_ledger_is_refused_before_its_epoch_is_taken(setup):
    setup.with_steps(1).close()
    setup.run("INSERT INTO migrations VALUES ('m999_later', '2030')")
    before = content(setup)
    with pytest.raises(LedgerError, match="m999_later"):
        setup.open()
    assert content(setup) == before


def test_a_reader_of_an_older_ledger_is_told_to_open_it_once(setup):
    setup.with_steps(2).close()
    setup.run("DROP TABLE promises")
    assert "promises differ" in setup.verify([setup.key]).problem
    setup.run("DELETE FROM migrations WHERE name = 'm003_promises'")
    with pytest.raises(LedgerUnwritable, match=r"lacks m003_promises\)\. Open it once"):
        setup.verify([setup.key])
    setup.open().close()
    assert setup.verify([setup.key]).intact


PASSWORD = "hunter2"
ADDRESSES = {
    "wrong password": "postgresql://{user}:hunter2@127.0.0.1:{port}/{name}",
    "nobody listens": "postgresql://{user}:hunter2@127.0.0.1:1/{name}",
    "no such option": "postgresql://{user}:hunter2@127.0.0.1:{port}/{name}?hunter2=1",
    "bad escape": "postgresql://{user}:hunter2%zz@127.0.0.1:{port}/{name}",
    "at in the password": "postgresql://{user}:x@hunter2@127.0.0.1:{port}/{name}",
    "colon before at": "postgresql://{user}@x:hunter2@127.0.0.1:{port}/{name}",
    "slash in the password": "postgresql://{user}:x/hunter2@127.0.0.1:{port}/{name}",
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_no_part_of_a_password_is_in_an_error(setup, case):
    parts = urlsplit(setup.address)
    setup.address = ADDRESSES[case].format(user=parts.username, port=parts.port, name=parts.path[1:])
    for attempt in (setup.open, setup.create, setup.verify, setup.back_up):
        with pytest.raises(LedgerError) as found:
            attempt()
        assert PASSWORD not in "".join(traceback.format_exception(found.value))
    assert PASSWORD not in name_of(setup.address)


def test_no_password_is_in_the_names_of_an_open_ledger(setup):
    password = urlsplit(setup.address).password
    with setup.create() as ledger:
        shown = repr((ledger, ledger.name, ledger.store, ledger.store.db, ledger.store.hold, setup.holding))
        assert password not in shown
        assert re.search(rf"127\.0\.0\.1:{setup.server.port}/test_", ledger.name)


def test_a_holder_from_before_a_restored_dump_commits_nothing_after_an_equal_epoch_and_row(setup):
    """On a host without a note of its own nothing else tells the two apart."""
    setup.with_steps(3).close()
    dump = setup.copy()
    with setup.open() as old:
        setup.commit(old, 4, 5)
        setup.put(dump)
        with setup.open(holding=Holding(take_over=True)) as new:
            setup.commit(new, 14, 15)
            assert (new.store.epoch, new.head.seq) == (old.store.epoch, old.head.seq)
            with pytest.raises(LedgerFenced):
                setup.commit(old, 6)
            setup.commit(new, 16)


def test_who_may_not_hold_an_older_database_does_not_migrate_it_below_a_living_server(setup, monkeypatch):
    older = {name: MIGRATIONS[name] for name in list(MIGRATIONS)[:3]}
    monkeypatch.setattr("paclm.ledger.postgres_schema.MIGRATIONS", older)
    with setup.with_steps(1):
        monkeypatch.setattr("paclm.ledger.postgres_schema.MIGRATIONS", MIGRATIONS)
        with pytest.raises(LedgerHeld):
            Hold.take(setup.address, Holding())
        assert {name for (name,) in setup.run("SELECT name FROM migrations")} == set(older)


@pytest.mark.parametrize("password", ["7/secret", "12,34/secret"])
def test_the_end_of_a_password_is_not_taken_for_the_name_of_a_database(password):
    url = f"postgresql://ada:{password}@db.example/clinic"
    assert "secret" not in name_of(url) + without_password(url)
