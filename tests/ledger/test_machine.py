"""Any sequence of charges, crashes, restarts, extensions, changed settings and restored files.

The machine counts what was released; the ledger must never show less. In a file, a crash is an image of the files taken
while the ledger is open; in a database, the process's connections end in the middle.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ledger.stores import PostgresSetup, SqliteSetup, crash
from paclm.config import MechanismConfig
from paclm.errors import BudgetExceeded, InvalidInput, LedgerRolledBack, UnsoundState
from paclm.ledger.events import Usage
from paclm.privacy.accounting import nats_down, units_down, units_up

MEMORY = "/dev/shm"


class LedgerMachine(RuleBasedStateMachine):
    """The rules; each store says where its ledger is, and what a crash leaves of it."""

    has_witness = False

    def __init__(self):
        super().__init__()
        # Nothing here depends on a disk: use memory where there is such a folder.
        self._home = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.home = Path(self._home.name)
        self.setup = self.place("folder-0")
        self.witness = self.home / "witness" if self.has_witness else None
        self.config = MechanismConfig(per_token=2.0**-12, total=2.0**-8)
        self.left = Usage("left")
        self.largest_total = self.config.total
        self.belief = b"belief 0"
        self.num_beliefs = 0
        self.lost = False
        self.copies = []
        start = {"num_worlds": 8, "settings": self.config, "sealed_belief": self.belief}
        self.ledger = self.setup.create(witness=self.witness, **start)

    def place(self, name):
        """An empty place for a ledger, with a folder of its own."""
        raise NotImplementedError

    def leave_crashed(self):
        """End the ledger in use as a crash does, and continue with what that leaves."""
        raise NotImplementedError

    @rule(tokens=st.integers(0, 3), dissent=st.integers(0, 3), key=st.sampled_from("ab"), public=st.integers(0, 2))
    def charge(self, tokens, dissent, key, public):
        dissent = min(dissent, tokens)
        charged = dissent if self.config.charge == "dissent" else tokens
        usage = Usage(key, tokens, dissent, charged, charged * units_up(self.config.per_token), public)
        affordable = self.ledger.account.affords(usage.units)
        moved = b"belief %d" % (self.num_beliefs + 1) if dissent else None
        try:
            self.ledger.commit([usage], moved)
        except (BudgetExceeded, UnsoundState):
            assert not affordable or self.lost
            return
        assert affordable
        assert not (self.lost and usage.units)
        self.left = self.left.plus(usage)
        if moved:
            self.num_beliefs += 1
            self.belief = moved

    @rule()
    def exhaust(self):
        price = units_up(self.config.per_token)
        tokens = self.ledger.account.remaining_units // price
        if tokens > 1 and not self.lost:
            usage = Usage("a", tokens - 1, tokens - 1, tokens - 1, (tokens - 1) * price)
            self.ledger.commit([usage], self.belief)
            self.left = self.left.plus(usage)

    @rule()
    def restart(self):
        self.ledger.close()
        self.ledger = self.setup.open(witness=self.witness)

    @rule()
    def crash(self):
        """Continue from what the dead process left."""
        self.leave_crashed()
        self.ledger = self.setup.open(witness=self.witness)

    @rule(
        per_token=st.sampled_from([2.0**-12, 2.0**-13, 3.0 * 2**-14]),
        charge=st.sampled_from(["every-token", "dissent"]),
    )
    def change_settings(self, per_token, charge):
        config = replace(self.config, per_token=per_token, charge=charge)
        if self.lost and config != self.ledger.settings and units_down(config.total) < self.ledger.account.spent_units:
            with pytest.raises(InvalidInput, match="spent"):  # adopted at a larger total than the copy has
                self.ledger.change_settings(config)
            return
        self.config = config
        self.ledger.change_settings(self.config)

    @rule(share=st.sampled_from([0.5, 0.9]))
    def lower_total(self, share):
        config = replace(self.config, total=self.config.total * share)
        if units_down(config.total) < self.ledger.account.spent_units:
            with pytest.raises(InvalidInput):
                self.ledger.change_settings(config)
            return
        bounds, had_spent = self.ledger.bounds, self.ledger.account.spent_units > 0
        self.ledger.change_settings(config)
        self.config = config
        assert self.ledger.bounds == bounds or not had_spent

    @rule()
    def raise_total_to_the_committed(self):
        committed = nats_down(self.ledger.state.committed_units)
        config = replace(self.config, total=committed)
        if config == self.ledger.settings:
            return
        bounds = self.ledger.bounds
        self.ledger.change_settings(config)
        self.config = config
        assert self.ledger.bounds == bounds

    @precondition(lambda self: not self.lost and self.config.total < 2.0)
    @rule()
    def extend(self):
        self.config = replace(self.config, total=self.config.total * 1.5)
        self.largest_total = max(self.largest_total, self.config.total)
        self.ledger.extend(self.config.total, confirmed_by="machine")

    @rule()
    def back_up(self):
        """Keep a copy for later, made while the ledger is in use."""
        copy = self.home / f"copy-{len(self.copies)}.sqlite"
        self.setup.back_up(copy)
        self.copies.append(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def restore(self, data):
        """Restore an old copy: refused as it is, adopted with or without the witness."""
        copy = data.draw(st.sampled_from(self.copies))
        self.ledger.close()
        self.setup = self.place(f"folder-{len(list(self.home.iterdir()))}")
        self.setup.put(copy)
        with pytest.raises(LedgerRolledBack):
            self.setup.open(witness=self.witness)
        event = self.setup.adopt(witness=self.witness, largest_total=self.largest_total)
        self.ledger = self.setup.open(witness=self.witness)
        self.config = self.ledger.settings
        if event.proof == "none":
            self.lost = True
            assert self.ledger.account.remaining_units == 0

    @invariant()
    def ledger_shows_at_least_what_was_released(self):
        account = self.ledger.account
        assert account.spent_units >= self.left.units
        assert account.spent_units <= account.total_units <= self.ledger.state.committed_units
        if not self.lost:
            assert (account.spent_units, account.tokens) == (self.left.units, self.left.tokens)
            assert account.dissent_tokens == self.left.dissent_tokens
            assert self.ledger.state.public_tokens == self.left.public_tokens
            assert self.ledger.sealed_belief == self.belief

    @invariant()
    def figures_add_up(self):
        sums = self.ledger.by_key().values()
        assert sum(usage.units for usage in sums) == self.ledger.account.spent_units
        assert sum(usage.tokens for usage in sums) == self.ledger.account.tokens

    @invariant()
    def every_row_verifies(self):
        report = self.setup.verify([self.setup.key])
        assert report.intact, report.problem

    def teardown(self):
        self.ledger.close()
        self._home.cleanup()


class FileMachine(LedgerMachine):
    survives_a_crash = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.lock")

    def place(self, name):
        (self.home / name).mkdir()
        return SqliteSetup(self.home / name)

    def leave_crashed(self):
        before, self.setup = self.setup, self.place(f"folder-{len(list(self.home.iterdir()))}")
        for name in self.survives_a_crash:
            shutil.copy(before.folder / name, self.setup.folder / name)
        self.ledger.close()


class ForgetfulMachine(FileMachine):
    """A crash that loses the log, as one without syncs can: the machine must notice."""

    survives_a_crash = ("ledger.sqlite",)


class DatabaseMachine(LedgerMachine):
    def __init__(self, server, url):
        self.server, self.url = server, url
        super().__init__()

    def place(self, name):
        (self.home / name).mkdir()
        place = PostgresSetup(self.home / name, self.server, self.url)
        place.remove()
        return place

    def leave_crashed(self):
        self.before_the_crash = self.setup.copy()
        crash(self.ledger)
        self.setup.holding = self.setup.holding._replace(take_over=True)


class ForgetfulDatabase(DatabaseMachine):
    """A crash after which the server has lost the newest commits, as without syncs."""

    def leave_crashed(self):
        before = getattr(self, "before_the_crash", None)
        super().leave_crashed()
        if before is not None:
            self.setup.put(before)
            self.setup.lock.unlink()


MACHINES = {"sqlite": FileMachine, "postgres": DatabaseMachine}
FORGETFUL = {"sqlite": ForgetfulMachine, "postgres": ForgetfulDatabase}


@pytest.fixture(params=MACHINES)
def store(request):
    """The name of a store, and what its machines need."""
    needs = [request.getfixturevalue(name) for name in ("postgres", "database")] if request.param == "postgres" else []
    return request.param, needs


def run(machine, store, examples, **options):
    options = {"max_examples": examples, "stateful_step_count": 20} | options
    run_state_machine_as_test(lambda: machine(*store[1]), settings=hypothesis_settings(**options))


def test_the_machine_notices_commits_that_a_crash_lost(store):
    with pytest.raises(AssertionError):
        run(FORGETFUL[store[0]], store, 25, phases=[Phase.generate])


@pytest.mark.parametrize("with_witness", [False, True], ids=["alone", "with witness"])
def test_any_sequence(store, with_witness):
    """With a witness nothing is ever lost."""
    machine = type("Machine", (MACHINES[store[0]],), {"has_witness": with_witness})
    run(machine, store, 25 if store[0] == "sqlite" else 6)
