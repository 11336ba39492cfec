"""Ledgers for tests: made in a closed folder, with a clock that stands still unless it is moved."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paclm.config import MechanismConfig
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.recovery import backup
from paclm.privacy.accounting import Account, units_up

KEY = bytes(range(32))
PER_TOKEN, TOTAL = 2.0**-20, 2.0**-10
PRICE = units_up(PER_TOKEN)
SETTINGS = MechanismConfig(per_token=PER_TOKEN, total=TOTAL)


class Books:
    """One ledger's places, and what tests do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "curator"
        self.folder.mkdir(mode=0o700)
        self.path = self.folder / "ledger.sqlite"
        self.witness = folder / "elsewhere.witness"
        self.backup = folder / "copy.sqlite"
        self.key = KEY
        self.settings = SETTINGS
        self.price = PRICE
        self.now = datetime(2026, 11, 20, 8, 30, tzinfo=UTC)

    def create(self, **changes) -> Ledger:
        arguments = {
            "workspace": "digest of a workspace",
            "num_worlds": 128,
            "settings": SETTINGS,
            "sealed_belief": b"sealed 0",
            "clock": self.clock,
        }
        return Ledger.create(self.path, KEY, **(arguments | changes))

    def open(self, **changes) -> Ledger:
        return Ledger.open(self.path, changes.pop("mac_key", KEY), **({"clock": self.clock} | changes))

    def clock(self) -> datetime:
        return self.now

    def wait(self, **span) -> None:
        self.now += timedelta(**span)

    @staticmethod
    def step(tokens: int = 4, key: str = "alice", dissent: int = 1, public: int = 0) -> list[Usage]:
        return [Usage(key, tokens, dissent, tokens, tokens * PRICE, public)]

    def put_back(self, copy: Path) -> None:
        """The ledger's files as somebody leaves them who restores a copy by hand."""
        for file in self.folder.glob("ledger.sqlite*"):
            file.unlink()
        shutil.copy(copy, self.path)
        self.path.chmod(0o600)

    def fall_back(self, steps: int) -> Account:
        """Two steps that a witness sees, a backup, more steps, and the backup put back; returns what is lost so."""
        self.with_steps(2, witness=self.witness).close()
        backup(self.path, self.backup)
        with self.open(witness=self.witness) as ledger:
            for n in range(3, steps + 3):
                ledger.commit(self.step(), b"sealed %d" % n)
            account = ledger.account
        self.newest = Path(shutil.copy(self.path, self.folder.parent / "newest.sqlite"))
        self.put_back(self.backup)
        return account

    def with_steps(self, count: int, **changes) -> Ledger:
        ledger = self.create(**changes)
        for n in range(1, count + 1):
            ledger.commit(self.step(), b"sealed %d" % n)
        return ledger


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)
