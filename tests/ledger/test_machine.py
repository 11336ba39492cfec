"""Any sequence of charges, crashes, restarts, extensions, changed settings and restored files.

The machine counts what was released; the ledger must never show less. A crash is an image of the files taken while the
ledger is open, and everything after it is lost.
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

from paclm.config import MechanismConfig
from paclm.errors import BudgetExceeded, InvalidInput, LedgerRolledBack, UnsoundState
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import adopt_restored, backup
from paclm.ledger.verify import verify
from paclm.privacy.accounting import units_down, units_up

KEY = bytes(range(32))
MEMORY = "/dev/shm"


class LedgerMachine(RuleBasedStateMachine):
    has_witness = False
    survives_a_crash = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.lock")

    def __init__(self):
        super().__init__()
        # Nothing here depends on a disk: use memory where there is such a folder.
        self._home = tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.home = Path(self._home.name)
        self.witness = self.home / "witness" if self.has_witness else None
        self.config = MechanismConfig(per_token=2.0**-12, total=2.0**-8)
        self.left = Usage("left")
        self.largest_total = self.config.total
        self.belief = b"belief 0"
        self.num_beliefs = 0
        self.lost = False
        self.copies = []
        self.path = self._folder("folder-0") / "ledger.sqlite"
        start = {"workspace": "w", "num_worlds": 8, "settings": self.config, "sealed_belief": self.belief}
        self.ledger = Ledger.create(self.path, KEY, witness=self.witness, **start)

    def _folder(self, name):
        folder = self.home / name
        folder.mkdir(mode=0o700)
        return folder

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
        self.ledger = Ledger.open(self.path, KEY, witness=self.witness)

    @rule()
    def crash(self):
        """Continue from the files as the dead process left them."""
        folder = self._folder(f"folder-{len(list(self.home.iterdir()))}")
        for name in self.survives_a_crash:
            shutil.copy(self.path.with_name(name), folder / name)
        self.ledger.close()
        self.path = folder / "ledger.sqlite"
        self.ledger = Ledger.open(self.path, KEY, witness=self.witness)

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
        backup(self.path, copy)
        self.copies.append(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def restore(self, data):
        """Restore an old copy: refused as it is, adopted with or without the witness."""
        copy = data.draw(st.sampled_from(self.copies))
        self.ledger.close()
        folder = self._folder(f"folder-{len(list(self.home.iterdir()))}")
        shutil.copy(copy, folder / "ledger.sqlite")
        self.path = folder / "ledger.sqlite"
        with pytest.raises(LedgerRolledBack):
            Ledger.open(self.path, KEY, witness=self.witness)
        event = adopt_restored(
            self.path, KEY, confirmed_by="machine", witness=self.witness, largest_total=self.largest_total
        )
        self.ledger = Ledger.open(self.path, KEY, witness=self.witness)
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
        report = verify(self.path, [KEY])
        assert report.intact, report.problem

    def teardown(self):
        self.ledger.close()
        self._home.cleanup()


class WitnessedMachine(LedgerMachine):
    """The same with a witness: nothing is ever lost."""

    has_witness = True


class ForgetfulMachine(LedgerMachine):
    """A crash that loses the log, as one without syncs can: the machine must notice."""

    survives_a_crash = ("ledger.sqlite",)


def test_the_machine_notices_commits_that_a_crash_lost():
    quick = hypothesis_settings(max_examples=25, stateful_step_count=20, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ForgetfulMachine, settings=quick)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = hypothesis_settings(max_examples=25, stateful_step_count=20)
TestWitnessedLedger = WitnessedMachine.TestCase
TestWitnessedLedger.settings = hypothesis_settings(max_examples=25, stateful_step_count=20)
