"""The ledger in its ordinary life: charge, belief, settings, figures, permissions, the lock."""

from __future__ import annotations

import copy
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from paclm.config import MechanismConfig
from paclm.errors import (
    BudgetExceeded,
    InvalidInput,
    LedgerBusy,
    LedgerError,
    LedgerMissing,
    LedgerNotDurable,
    LedgerStopped,
    UnsoundState,
)
from paclm.ledger import sqlite_file, state, store
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.verify import verify
from paclm.privacy.accounting import UNITS_PER_NAT
from paclm.privacy.bounds import success_bound


def test_account_and_belief_come_back_exactly(books):
    with books.create() as ledger:
        ledger.commit(
            [Usage("alice", 3, 1, 3, 3 * books.price), Usage("bob", 2, 0, 2, 2 * books.price, 7)], b"sealed 1"
        )
        account, head = ledger.account, ledger.head
    for in_full in (True, False):
        with books.open(in_full=in_full) as ledger:
            assert ledger.account == account
            assert (account.tokens, account.dissent_tokens, account.spent_units) == (5, 1, 5 * books.price)
            assert ledger.head == head
            assert ledger.sealed_belief == b"sealed 1"
            assert ledger.state.public_tokens == 7
            assert ledger.settings == books.settings


def test_a_step_without_a_new_belief_keeps_the_old_one(books):
    with books.with_steps(2) as ledger:
        ledger.commit(books.step(dissent=0), None)
    with books.open() as ledger:
        assert ledger.sealed_belief == b"sealed 2"
        assert (ledger.head.seq, ledger.state.belief_seq) == (4, 3)


def test_every_commit_is_in_the_file_when_it_returns(books):
    with books.create() as ledger:
        for n in range(1, 6):
            ledger.commit(books.step(), b"sealed %d" % n)
            other = sqlite3.connect(f"file:{books.path}?mode=ro", uri=True)
            assert other.execute("SELECT max(seq) FROM events").fetchone() == (n + 1,)
            assert other.execute("SELECT sealed FROM belief").fetchone() == (b"sealed %d" % n,)
            other.close()


def test_durable_settings_are_read_back_from_sqlite(books):
    with books.create() as ledger:
        read = {
            name: ledger.store.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
        }
        assert read == {"journal_mode": "wal", "synchronous": 2}


@pytest.mark.parametrize("name", ["journal_mode", "synchronous"])
def test_a_database_that_will_not_be_durable_is_refused(books, monkeypatch, name):
    books.create().close()

    class Stubborn(sqlite3.Connection):
        """Takes the setting and answers with another one, as SQLite does where it cannot comply."""

        def execute(self, sql, *arguments):
            if sql == f"PRAGMA {name}":
                sql = "SELECT 'delete'" if name == "journal_mode" else "SELECT 1"
            return super().execute(sql, *arguments)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite_file.sqlite3, "connect", lambda *a, **k: real(*a, **k, factory=Stubborn))
    with pytest.raises(LedgerNotDurable, match=name):
        books.open()


def test_overspending_is_refused_here_too_and_writes_nothing(books):
    most = books.settings.total / books.settings.per_token
    with books.create() as ledger:
        ledger.commit(books.step(int(most) - 1), b"sealed 1")
        with pytest.raises(BudgetExceeded):
            ledger.commit(books.step(2), b"sealed 2")
        assert ledger.sealed_belief == b"sealed 1"
        ledger.commit(books.step(1), b"sealed 3")  # the refusal did not stop the ledger
        assert ledger.account.remaining_units == 0
    assert verify(books.path, [books.key]).intact


@pytest.mark.parametrize(
    "usage",
    [
        Usage("a", 4, 1, 4, 4 * 2**40 - 1),  # a unit short
        Usage("a", 4, 1, 3, 3 * 2**40),  # one token for nothing
        Usage("a", 2, 3, 2, 9 * 2**40),  # more disputes than tokens
    ],
)
def test_a_step_that_costs_less_than_is_due_is_refused(books, usage):
    with books.create() as ledger:
        assert books.price == 2**40
        with pytest.raises(UnsoundState):
            ledger.commit([usage], b"sealed 1")
        assert ledger.head.seq == 1


def test_under_dissent_only_disputed_tokens_are_due(books):
    with books.create(settings=replace(books.settings, charge="dissent")) as ledger:
        ledger.commit([Usage("a", 9, 2, 2, 2 * books.price)], b"sealed 1")
        with pytest.raises(UnsoundState):
            ledger.commit([Usage("a", 9, 2, 1, books.price)], b"sealed 2")


def test_a_release_that_never_reads_the_secret_costs_nothing(books):
    with books.create(settings=replace(books.settings, release="plurality")) as ledger:
        ledger.commit([Usage("a", 9, 2, 0, 0)], None)
        assert ledger.account.spent_units == 0


def test_totals_past_the_integers_of_sqlite_are_kept_exactly(books):
    settings = MechanismConfig(per_token=3.0, total=30.0)
    with books.create(settings=settings) as ledger:
        for n in range(10):
            ledger.commit([Usage("a", 1, 1, 1, 3 * UNITS_PER_NAT)], b"%d" % n)
    with books.open() as ledger:
        assert ledger.account.spent_units == 30 * UNITS_PER_NAT > 2**63
        assert ledger.by_key()["a"].units == 30 * UNITS_PER_NAT


@pytest.mark.parametrize("change", [{"per_token": float("inf")}, {"total": float("inf")}])
def test_a_budget_without_end_is_refused(books, change):
    with pytest.raises(InvalidInput):
        books.create(settings=replace(books.settings, **change))
    assert not books.path.exists()


def test_settings_change_from_now_on_and_are_recorded(books):
    with books.with_steps(1) as ledger:
        assert not ledger.change_settings(books.settings)
        assert ledger.change_settings(replace(books.settings, per_token=2**-21, charge="dissent", support_size=50))
        ledger.commit([Usage("a", 4, 1, 1, books.price // 2)], b"sealed 2")
    with books.open() as ledger:
        assert ledger.settings.charge == "dissent"
        assert ledger.sealed_belief == b"sealed 2"
    assert verify(books.path, [books.key]).intact


def test_a_larger_total_is_never_a_setting(books):
    with books.with_steps(1) as ledger:
        with pytest.raises(InvalidInput, match="paclm ledger extend"):
            ledger.change_settings(replace(books.settings, total=2**-9))
        assert ledger.head.seq == 2


def test_a_total_below_the_spend_is_refused(books):
    with books.with_steps(2) as ledger, pytest.raises(InvalidInput, match="spent"):
        ledger.change_settings(replace(books.settings, total=2.0**-18))


def test_lowering_the_total_after_the_first_charge_does_not_lower_the_bound(books):
    """Whoever lowers it has seen outputs: a bound at the spend is no guarantee."""
    with books.create() as ledger:
        ledger.change_settings(replace(books.settings, total=2.0**-11))
        assert ledger.bounds.mia == success_bound(2.0**-11, 1 / 2)  # nothing had left: a new commitment
        ledger.commit(books.step(), b"sealed 1")
        ledger.change_settings(replace(books.settings, total=2.0**-15))
        assert ledger.account.total_nats == 2.0**-15
        assert ledger.bounds.mia == success_bound(2.0**-11, 1 / 2)
        assert ledger.bounds.world_id == success_bound(2.0**-11, 1 / 128)


def test_extending_weakens_the_bound_and_says_who_confirmed(books):
    with books.with_steps(1) as ledger:
        expected = ledger.bounds_for(2.0**-8)
        ledger.extend(2.0**-8, confirmed_by="ada")
        assert ledger.bounds == expected
        assert ledger.bounds.mia == success_bound(2.0**-8, 1 / 2)
        assert ledger.settings.total == 2.0**-8
        with pytest.raises(InvalidInput):
            ledger.extend(2.0**-9, confirmed_by="ada")
    with books.open() as ledger:
        assert ledger.account.total_nats == 2.0**-8
        body = ledger.store.db.execute("SELECT body FROM events WHERE kind = 'extended'").fetchone()[0]
    assert '"confirmed_by":"ada"' in body


def test_figures_by_day_key_and_hour(books):
    with books.create() as ledger:
        ledger.commit(books.step(4, "alice"), b"1")
        books.wait(hours=2)
        ledger.commit(books.step(2, "bob", public=5), b"2")
        books.wait(days=1)
        ledger.commit([*books.step(1, "alice"), *books.step(3, "alice")], b"3")
        days = state.by_day(ledger.store.usage())
        assert {day: usage.tokens for day, usage in days.items()} == {"2026-11-20": 6, "2026-11-21": 4}
        assert ledger.by_key()["alice"] == Usage("alice", 8, 3, 8, 8 * books.price, 0)
        assert ledger.by_key()["bob"].public_tokens == 5
        assert {hour: usage.units for hour, usage in ledger.by_hour().items()} == {
            "2026-11-20T08": 4 * books.price,
            "2026-11-20T10": 2 * books.price,
            "2026-11-21T10": 4 * books.price,
        }


def test_figures_are_read_from_the_file_once_and_kept_with_every_row(books):
    books.with_steps(2).close()
    with books.open() as ledger:
        statements = []
        ledger.store.db.set_trace_callback(statements.append)
        for hours in (1, 30, -48):  # also with a clock that was put back
            books.wait(hours=hours)
            ledger.commit([*books.step(2, "bob", public=3), *books.step(1, "alice")], b"sealed")
            found = ledger.by_key(), ledger.by_hour()
            ledger.store.db.set_trace_callback(None)
            table = ledger.store.usage()
            ledger.store.db.set_trace_callback(statements.append)
            assert found == (state.by_key(table), state.by_hour(table))
            assert [list(figures) for figures in found] == [sorted(figures) for figures in found]
    assert sum("FROM usage ORDER BY" in statement for statement in statements) == 1


def test_figures_do_not_count_a_row_that_was_not_written(books):
    with books.with_steps(1) as ledger:
        before = ledger.by_key()
        with pytest.raises(UnsoundState):
            ledger.commit([Usage("alice", 4, 1, 4, 3 * books.price)], b"sealed")
        assert ledger.by_key() == before


def test_files_are_closed_to_others_whatever_the_umask(books):
    old = os.umask(0)
    try:
        ledger = books.create(witness=books.witness)
        ledger.commit(books.step(), b"sealed 1")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [*books.folder.iterdir(), books.witness]}
    ledger.close()
    assert {"ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.lock"} <= set(modes)
    assert set(modes.values()) == {0o600}


@pytest.mark.parametrize("name", ["", "ledger.sqlite"])
def test_a_folder_or_file_open_to_others_is_refused(books, name):
    books.create().close()
    (books.folder / name).chmod(0o755 if not name else 0o644)
    with pytest.raises(LedgerError, match="chmod -R go-rwx"):
        books.open()


def test_a_ledger_is_not_made_in_a_folder_open_to_others(books):
    books.folder.chmod(0o755)
    with pytest.raises(LedgerError, match="chmod -R go-rwx"):
        books.create()
    assert list(books.folder.iterdir()) == []


def test_a_second_writer_is_refused_with_the_pid_of_the_first(books):
    with books.create():
        with pytest.raises(LedgerBusy, match=r"in this process"):
            books.open()
        program = (
            f"import sys; from paclm.ledger.ledger import Ledger\nLedger.open({str(books.path)!r}, bytes(range(32)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        said = done.stderr.splitlines()[-1]
        assert "LedgerBusy" in said
        assert f"process {os.getpid()}" in said
    books.open().close()


def test_a_lock_file_left_by_a_dead_process_holds_nothing(books):
    books.create().close()
    (books.folder / "ledger.lock").write_text("999999\n")
    books.open().close()


def test_a_ledger_is_never_made_twice(books):
    books.create().close()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        books.create()


def test_what_a_crash_left_of_a_creation_is_no_obstacle(books):
    (books.folder / "ledger.sqlite.part").write_bytes(b"half a ledger")
    books.create().close()
    books.open().close()


def test_a_missing_ledger_is_named(books):
    with pytest.raises(LedgerMissing, match=r"ledger\.sqlite"):
        books.open()


def test_threads_take_turns(books):
    with books.create() as ledger, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ledger.commit(books.step(1, f"key {n % 3}"), b"sealed"), range(40)))
        assert ledger.account.tokens == 40
        assert sum(usage.tokens for usage in ledger.by_key().values()) == 40
    assert verify(books.path, [books.key]).intact


def test_a_forked_child_may_not_write(books):
    books.create().close()
    program = (
        "import os; from paclm.ledger.ledger import Ledger\n"
        f"ledger = Ledger.open({str(books.path)!r}, bytes(range(32)))\n"
        "if os.fork() == 0: ledger.commit([], None)\n"
        "os.wait()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "LedgerStopped" in done.stderr
    with books.open() as ledger:
        assert ledger.head.seq == 1


def test_a_closed_ledger_refuses_and_closing_twice_is_fine(books):
    ledger = books.create()
    ledger.close()
    ledger.close()
    for call in (lambda: ledger.commit(books.step(), b""), ledger.by_hour):
        with pytest.raises(LedgerStopped):
            call()


def test_neither_key_nor_belief_shows(books):
    with books.with_steps(1) as ledger:
        shown = f"{ledger!r} {ledger.keys!r} {ledger.state!r}"
        assert "sealed 1" not in shown
        assert books.key.hex() not in shown
        assert repr(books.key)[2:20] not in shown


def test_neither_an_open_ledger_nor_its_keys_can_be_copied(books):
    with books.create() as ledger:
        for held in (ledger, ledger.keys):
            for attempt in (pickle.dumps, copy.deepcopy):
                with pytest.raises(UnsoundState):
                    attempt(held)


def test_growth_per_step_is_bounded_and_does_not_hold_beliefs(books):
    belief = os.urandom(1052)
    with books.create(sealed_belief=belief) as ledger:
        for _ in range(20):
            ledger.commit(books.step(), os.urandom(1052))
    before = books.path.stat().st_size
    with books.open() as ledger:
        for _ in range(200):
            ledger.commit(books.step(), os.urandom(1052))
    assert (books.path.stat().st_size - before) / 200 < 900


@pytest.mark.parametrize("bad", [{"tokens": -1}, {"units": 1.5}, {"public_tokens": True}, {"key": "x" * 201}])
def test_an_entry_that_is_no_count_is_refused(bad):
    with pytest.raises(InvalidInput):
        Usage(**({"key": "alice"} | bad))


def test_a_short_key_is_refused(books):
    with pytest.raises(InvalidInput, match="32"):
        Ledger.create(books.path, b"short", workspace="w", num_worlds=2, settings=books.settings, sealed_belief=b"")


def test_figures_asked_for_in_mid_commit_are_not_counted_twice(books, monkeypatch):
    ledger = books.with_steps(2)
    real = store.add_sums

    def look(*arguments):
        real(*arguments)
        ledger.by_key()  # a signal handler, say: the row is written and not yet committed

    with ledger:
        monkeypatch.setattr(store, "add_sums", look)
        ledger.commit(books.step(), b"sealed")
        monkeypatch.undo()
        ledger.commit(books.step(), b"sealed")
        assert sum(usage.units for usage in ledger.by_key().values()) == ledger.account.spent_units
