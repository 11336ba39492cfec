"""The ledger in ordinary use: charge, belief, settings, sums, permissions."""

import copy
import os
import pickle
import re
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ledger.stores import IN_A_FILE
from paclm.config import MechanismConfig
from paclm.errors import (
    BudgetExceeded,
    InvalidInput,
    LedgerError,
    LedgerMissing,
    LedgerNotDurable,
    LedgerStopped,
    UnsoundState,
)
from paclm.ledger import address as addresses
from paclm.ledger import sqlite_file, sqlite_store, state
from paclm.ledger.events import Usage
from paclm.privacy.accounting import UNITS_PER_NAT
from paclm.privacy.bounds import success_bound


def test_account_and_belief_come_back_exactly(setup):
    with setup.create() as ledger:
        ledger.commit([*setup.step(3), Usage("bob", 2, 0, 2, 2 * setup.price, 7)], b"sealed 1")
        account, head = ledger.account, ledger.head
    ledger = setup.resume()
    assert (ledger.account, ledger.head, ledger.sealed_belief) == (account, head, b"sealed 1")
    assert (account.tokens, account.dissent_tokens, account.spent_units) == (5, 1, 5 * setup.price)
    assert (ledger.state.public_tokens, ledger.settings) == (7, setup.settings)


def test_a_step_without_a_new_belief_keeps_the_old_one(setup):
    with setup.with_steps(2) as ledger:
        ledger.commit(setup.step(dissent=0), None)
    ledger = setup.resume()
    assert (ledger.sealed_belief, ledger.head.seq, ledger.state.belief_seq) == (b"sealed 2", 4, 3)


def test_every_commit_is_there_for_others_when_it_returns(setup):
    with setup.create() as ledger:
        for n in range(1, 6):
            setup.commit(ledger, n)
            assert setup.run("SELECT max(seq) FROM events") == [(n + 1,)]
            assert setup.run("SELECT sealed FROM belief") == [(b"sealed %d" % n,)]


@IN_A_FILE
@pytest.mark.parametrize(("name", "value"), [("journal_mode", "wal"), ("synchronous", 2)])
def test_durable_settings_are_read_back_from_sqlite_and_refused_otherwise(setup, monkeypatch, name, value):
    with setup.create() as ledger:
        assert ledger.store.db.execute(f"PRAGMA {name}").fetchone() == (value,)

    class Stubborn(sqlite3.Connection):
        """Takes the setting and answers with another one, as SQLite does where it cannot comply."""

        def execute(self, sql, *arguments):
            if sql == f"PRAGMA {name}":
                sql = "SELECT 'delete'" if name == "journal_mode" else "SELECT 1"
            return super().execute(sql, *arguments)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite_file.sqlite3, "connect", lambda *a, **k: real(*a, **k, factory=Stubborn))
    with pytest.raises(LedgerNotDurable, match=name):
        setup.open()


def test_overspending_is_refused_and_writes_nothing(setup):
    most = setup.settings.total / setup.settings.per_token
    with setup.create() as ledger:
        ledger.commit(setup.step(int(most) - 1), b"sealed 1")
        with pytest.raises(BudgetExceeded):
            ledger.commit(setup.step(2), b"sealed 2")
        assert ledger.sealed_belief == b"sealed 1"
        ledger.commit(setup.step(1), b"sealed 3")  # the refusal did not stop the ledger
        assert ledger.account.remaining_units == 0
    assert setup.verify([setup.key]).intact


TOKEN = 2**40
"""Units of one token under the settings of these tests."""


@pytest.mark.parametrize(
    ("charge", "usage"),
    [
        ("every-token", Usage("a", 4, 1, 4, 4 * TOKEN - 1)),  # a unit short
        ("every-token", Usage("a", 4, 1, 3, 3 * TOKEN)),  # one token for nothing
        ("every-token", Usage("a", 2, 3, 2, 9 * TOKEN)),  # more dissent than tokens
        ("dissent", Usage("a", 9, 2, 1, TOKEN)),
    ],
)
def test_a_step_charged_below_its_price_is_refused(setup, charge, usage):
    assert setup.price == TOKEN
    with setup.create(settings=replace(setup.settings, charge=charge)) as ledger:
        assert ledger.by_key() == {}
        with pytest.raises(UnsoundState):
            ledger.commit([usage], b"sealed 1")
        assert ledger.head.seq == 1
        assert ledger.by_key() == {}


@pytest.mark.parametrize(("change", "charged"), [({"charge": "dissent"}, 2), ({"release": "plurality"}, 0)])
def test_only_dissent_is_charged_under_dissent_and_nothing_if_the_secret_is_not_read(setup, change, charged):
    with setup.create(settings=replace(setup.settings, **change)) as ledger:
        ledger.commit([Usage("a", 9, 2, charged, charged * setup.price)], b"sealed 1" if charged else None)
        assert ledger.account.spent_units == charged * setup.price


def test_totals_past_the_integers_of_sqlite_are_kept_exactly(setup):
    settings = MechanismConfig(per_token=3.0, total=30.0)
    with setup.create(settings=settings) as ledger:
        for n in range(10):
            ledger.commit([Usage("a", 1, 1, 1, 3 * UNITS_PER_NAT)], b"%d" % n)
    with setup.open() as ledger:
        assert ledger.account.spent_units == 30 * UNITS_PER_NAT > 2**63
        assert ledger.by_key()["a"].units == ledger.by_hour()["2026-11-20T08"].units == 30 * UNITS_PER_NAT


def test_settings_change_from_now_on_and_are_recorded(setup):
    with setup.with_steps(1) as ledger:
        assert not ledger.change_settings(setup.settings)
        assert ledger.change_settings(replace(setup.settings, per_token=2**-21, charge="dissent", support_size=50))
        ledger.commit([Usage("a", 4, 1, 1, setup.price // 2)], b"sealed 2")
    ledger = setup.resume()
    assert (ledger.settings.charge, ledger.sealed_belief) == ("dissent", b"sealed 2")
    assert setup.verify([setup.key]).intact


def test_a_larger_total_and_one_below_the_spend_are_never_settings(setup):
    with setup.with_steps(2) as ledger:
        with pytest.raises(InvalidInput, match="paclm ledger extend"):
            ledger.change_settings(replace(setup.settings, total=2**-9))
        with pytest.raises(InvalidInput, match="spent"):
            ledger.change_settings(replace(setup.settings, total=2.0**-18))
        assert ledger.head.seq == 3


def test_lowering_the_total_after_the_first_charge_does_not_lower_the_bound(setup):
    """It was lowered knowing outputs: a bound at the spend is no guarantee."""
    with setup.create() as ledger:
        ledger.change_settings(replace(setup.settings, total=2.0**-11))
        assert ledger.bounds.mia == success_bound(2.0**-11, 1 / 2)  # nothing was released: a new commitment
        setup.commit(ledger, 1)
        ledger.change_settings(replace(setup.settings, total=2.0**-15))
        assert ledger.account.total_nats == 2.0**-15
        assert ledger.bounds.mia == success_bound(2.0**-11, 1 / 2)
        assert ledger.bounds.world_id == success_bound(2.0**-11, 1 / 128)


def test_a_lowered_total_is_raised_again_up_to_the_committed_one_and_no_further(setup):
    with setup.with_steps(1) as ledger:
        bounds, committed = ledger.bounds, setup.settings.total
        ledger.change_settings(replace(setup.settings, total=committed / 8))
        ledger.change_settings(replace(setup.settings, total=committed / 2))
        ledger.change_settings(setup.settings)
        assert (ledger.account.total_nats, ledger.bounds) == (committed, bounds)
        ledger.change_settings(replace(setup.settings, total=committed / 8))
        with pytest.raises(InvalidInput, match="paclm ledger extend"):
            ledger.change_settings(replace(setup.settings, total=committed * 1.0001))
    with setup.open() as ledger:
        ledger.change_settings(setup.settings)
        left = ledger.account.remaining_units // setup.price
        ledger.commit([Usage("a", left, left, left, left * setup.price)], b"sealed 2")
        with pytest.raises(BudgetExceeded):  # the charges under all totals together stay within the committed one
            setup.commit(ledger, 3)
    assert setup.verify([setup.key]).intact


def test_before_the_first_charge_a_lower_total_is_the_commitment(setup):
    with setup.create() as ledger:
        ledger.change_settings(replace(setup.settings, total=2.0**-11))
        with pytest.raises(InvalidInput, match="paclm ledger extend"):
            ledger.change_settings(setup.settings)


def test_extending_weakens_the_bound_and_says_who_confirmed(setup):
    with setup.with_steps(1) as ledger:
        expected = ledger.bounds_for(2.0**-8)
        ledger.extend(2.0**-8, confirmed_by="ada")
        assert ledger.bounds == expected
        assert ledger.bounds.mia == success_bound(2.0**-8, 1 / 2)
        assert ledger.settings.total == 2.0**-8
        with pytest.raises(InvalidInput):
            ledger.extend(2.0**-9, confirmed_by="ada")
    assert setup.resume().account.total_nats == 2.0**-8
    ((body,),) = setup.run("SELECT body FROM events WHERE kind = 'extended'")
    assert '"confirmed_by":"ada"' in body


def test_sums_by_day_key_and_hour(setup):
    with setup.create() as ledger:
        ledger.commit(setup.step(4, "alice"), b"1")
        setup.wait(hours=2)
        ledger.commit(setup.step(2, "bob", public=5), b"2")
        setup.wait(days=1)
        ledger.commit([*setup.step(1, "alice"), *setup.step(3, "alice")], b"3")
        days = state.by_day(ledger.by_hour())
        assert {day: sums.tokens for day, sums in days.items()} == {"2026-11-20": 6, "2026-11-21": 4}
        assert ledger.by_key()["alice"] == Usage("alice", 8, 3, 8, 8 * setup.price, 0)
        assert ledger.by_key()["bob"].public_tokens == 5
        assert {hour: usage.units for hour, usage in ledger.by_hour().items()} == {
            "2026-11-20T08": 4 * setup.price,
            "2026-11-20T10": 2 * setup.price,
            "2026-11-21T10": 4 * setup.price,
        }


def test_sums_are_read_once_and_updated_with_every_row(setup, monkeypatch):
    setup.with_steps(2).close()
    with setup.open() as ledger:
        read, count = ledger.store.usage_by, 0

        def usage_by(column):
            nonlocal count
            count += 1
            return read(column)

        monkeypatch.setattr(ledger.store, "usage_by", usage_by)
        for hours in (1, 30, -48):  # also with a clock that was set back
            setup.wait(hours=hours)
            ledger.commit([*setup.step(2, "bob", public=3), *setup.step(1, "alice")], b"sealed")
            found, table = (ledger.by_key(), ledger.by_hour()), ledger.store.usage()
            by_hour = {hour: Usage(hour) for hour, _ in sorted(table)}
            for (hour, _), usage in table.items():
                by_hour[hour] = by_hour[hour].plus(usage)
            assert found == (state.by_key(table), by_hour) == (read("key"), read("hour"))
            assert [list(figures) for figures in found] == [sorted(figures) for figures in found]
    assert count == 2


@IN_A_FILE
def test_files_are_closed_to_others_whatever_the_umask(setup):
    old = os.umask(0)
    try:
        ledger = setup.create(witness=setup.witness)
        setup.commit(ledger, 1)
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [*setup.folder.iterdir(), setup.witness]}
    ledger.close()
    assert {"ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.lock"} <= set(modes)
    assert set(modes.values()) == {0o600}


@IN_A_FILE
def test_a_folder_or_file_open_to_others_is_refused(setup):
    setup.folder.chmod(0o755)
    with pytest.raises(LedgerError, match="chmod -R go-rwx"):
        setup.create()
    assert list(setup.folder.iterdir()) == []
    setup.folder.chmod(0o700)
    setup.create().close()
    for place, mode in ((setup.path, 0o644), (setup.folder, 0o755)):
        place.chmod(mode)
        with pytest.raises(LedgerError, match="chmod -R go-rwx"):
            setup.open()
        place.chmod(mode & 0o700)


def test_a_ledger_is_made_once_and_named_where_it_is_missing(setup):
    name = re.escape(addresses.name_of(setup.address))
    for attempt in (setup.open, setup.verify, setup.back_up, setup.adopt):
        with pytest.raises(LedgerMissing, match=name):
            attempt()
    (setup.folder / "ledger.sqlite.part").write_bytes(b"half a ledger, left by a crash")
    setup.create().close()
    with pytest.raises(LedgerError, match=name):
        setup.create()
    setup.open().close()


def test_threads_take_turns(setup):
    with setup.create() as ledger, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ledger.commit(setup.step(1, f"key {n % 3}"), b"sealed"), range(40)))
        assert ledger.account.tokens == 40
        assert sum(usage.tokens for usage in ledger.by_key().values()) == 40
    assert setup.verify([setup.key]).intact


def test_a_forked_child_may_not_write(setup):
    setup.create().close()
    program = (
        "import os; from paclm.ledger.address import Holding; from paclm.ledger.ledger import Ledger\n"
        f"ledger = {setup.opening}\n"
        "if os.fork() == 0: ledger.commit([], None)\n"
        "os.wait(); ledger.close()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "LedgerStopped" in done.stderr
    assert setup.resume().head.seq == 1


def test_a_closed_ledger_refuses_and_closing_twice_is_fine(setup):
    ledger = setup.create()
    ledger.close()
    ledger.close()
    for call in (lambda: ledger.commit(setup.step(), b""), ledger.by_hour):
        with pytest.raises(LedgerStopped):
            call()


def test_neither_key_nor_belief_shows_or_can_be_copied(setup):
    with setup.with_steps(1) as ledger:
        shown = f"{ledger!r} {ledger.keys!r} {ledger.state!r}"
        for hidden in ("sealed 1", setup.key.hex(), repr(setup.key)[2:20]):
            assert hidden not in shown
        for held in (ledger, ledger.keys):
            for attempt in (pickle.dumps, copy.deepcopy):
                with pytest.raises(UnsoundState):
                    attempt(held)


@IN_A_FILE
def test_growth_per_step_is_bounded_and_does_not_hold_beliefs(setup):
    belief = os.urandom(1052)
    with setup.create(sealed_belief=belief) as ledger:
        for _ in range(20):
            ledger.commit(setup.step(), os.urandom(1052))
    before = setup.path.stat().st_size
    with setup.open() as ledger:
        for _ in range(200):
            ledger.commit(setup.step(), os.urandom(1052))
    assert (setup.path.stat().st_size - before) / 200 < 900


def test_a_short_key_an_infinite_budget_and_entries_that_are_no_counts_are_refused(setup):
    with pytest.raises(InvalidInput, match="32"):
        setup.create(mac_key=b"short")
    for name in ("per_token", "total"):
        with pytest.raises(InvalidInput):
            setup.create(settings=replace(setup.settings, **{name: float("inf")}))
    assert not addresses.exists(setup.address)
    for bad in ({"tokens": -1}, {"units": 1.5}, {"public_tokens": True}, {"key": "x" * 201}):
        with pytest.raises(InvalidInput):
            Usage(**({"key": "alice"} | bad))


@IN_A_FILE
@pytest.mark.parametrize("is_early", [True, False])
def test_sums_asked_for_during_a_commit_count_its_row_once(setup, monkeypatch, is_early):
    ledger = setup.with_steps(2)
    real = sqlite_store.add_sums

    def look(*arguments):  # as a signal handler might, before or after the sums are written
        for call in (ledger.by_key, lambda: real(*arguments))[:: 1 if is_early else -1]:
            call()

    with ledger:
        monkeypatch.setattr(sqlite_store, "add_sums", look)
        ledger.commit(setup.step(), b"sealed")
        monkeypatch.undo()
        ledger.commit(setup.step(), b"sealed")
        assert sum(usage.units for usage in ledger.by_key().values()) == ledger.account.spent_units
