"""Ledgers for tests: made in a closed folder, with a clock that moves only when told to."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paclm.config import MechanismConfig
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import adopt_restored, backup
from paclm.privacy.accounting import units_up

KEY = bytes(range(32))
NEW_KEY = bytes(range(1, 33))
PER_TOKEN, TOTAL = 2.0**-20, 2.0**-10
PRICE = units_up(PER_TOKEN)
SETTINGS = MechanismConfig(per_token=PER_TOKEN, total=TOTAL)


class Setup:
    """The files of one ledger, and what tests do with it."""

    key, new_key, settings, price = KEY, NEW_KEY, SETTINGS, PRICE

    def __init__(self, folder):
        self.folder = folder / "curator"
        self.folder.mkdir(mode=0o700)
        self.path = self.folder / "ledger.sqlite"
        self.lock = self.folder / "ledger.lock"
        self.witness = folder / "elsewhere.witness"
        self.backup = folder / "copy.sqlite"
        self.new_keys = {"mac_key": NEW_KEY, "old_keys": [KEY]}
        self.now = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)

    def create(self, **changes):
        arguments = {
            "workspace": "digest of a workspace",
            "num_worlds": 128,
            "settings": SETTINGS,
            "sealed_belief": b"sealed 0",
            "clock": self.clock,
        }
        return Ledger.create(self.path, KEY, **(arguments | changes))

    def open(self, **changes):
        return Ledger.open(self.path, changes.pop("mac_key", KEY), **({"clock": self.clock} | changes))

    def clock(self):
        return self.now

    def wait(self, **span):
        self.now += timedelta(**span)

    @staticmethod
    def step(tokens=4, key="alice", dissent=1, public=0):
        return [Usage(key, tokens, dissent, tokens, tokens * PRICE, public)]

    def with_steps(self, count, **changes):
        ledger = self.create(**changes)
        self.commit(ledger, *range(1, count + 1))
        return ledger

    def commit(self, ledger, *numbers):
        """Steps whose sealed beliefs have these numbers."""
        for n in numbers:
            ledger.commit(self.step(), b"sealed %d" % n)

    def resume(self, *numbers, **options):
        """Open, commit these steps and close; the closed ledger still shows its state."""
        with self.open(**options) as ledger:
            self.commit(ledger, *numbers)
        return ledger

    def adopt(self, **options):
        return adopt_restored(self.path, options.pop("mac_key", KEY), confirmed_by="ada", **options)

    def copy(self, name="before.sqlite"):
        """A copy of the closed ledger made by hand, without the mark of a backup."""
        return Path(shutil.copy(self.path, self.folder.parent / name))

    def roll_back_to(self, copy):
        """Replace the ledger's files by a copy, as an operator might by hand."""
        for file in self.folder.glob("ledger.sqlite*"):
            file.unlink()
        shutil.copy(copy, self.path)
        self.path.chmod(0o600)

    def lose_steps(self, steps):
        """Two steps with a witness, a backup, more steps, and a rollback to the backup; returns the lost account."""
        self.with_steps(2, witness=self.witness).close()
        backup(self.path, self.backup)
        account = self.resume(*range(3, steps + 3), witness=self.witness).account
        self.newest = self.copy("newest.sqlite")
        self.roll_back_to(self.backup)
        return account


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)
