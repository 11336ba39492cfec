"""The ledger: charge and belief in one transaction, on the disk before `commit` returns.

It holds neither the secret nor a belief in clear: the curator hands it sealed bytes. It refuses a second time what
the account should have refused already.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from paclm.config import MechanismConfig
from paclm.errors import LedgerError
from paclm.ledger import database
from paclm.ledger.attendance import meet_witness
from paclm.ledger.chain import Head, Keys
from paclm.ledger.events import Extended, Opened, SettingsChanged, Stepped, Usage
from paclm.ledger.lock import WriterLock
from paclm.ledger.state import Bounds, Price, State, bounds_at
from paclm.ledger.writer import Clock, Writer, hash_belief, lock_path, utc_now, write_first_row
from paclm.privacy.accounting import Account, units_down


class Ledger:
    """An open ledger, and the only one on its file. Make one with `create` or `open`; use it as a context manager."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._price = Price.of(writer.settings)

    @classmethod
    def create(
        cls,
        path: str | Path,
        mac_key: bytes,
        *,
        workspace: str,
        num_worlds: int,
        settings: MechanismConfig,
        sealed_belief: bytes,
        witness: str | Path | None = None,
        clock: Clock = utc_now,
    ) -> Ledger:
        """Make the ledger of a workspace and open it; the file is complete or absent, whatever happens meanwhile."""
        target, keys = Path(path).absolute(), Keys(mac_key)
        Price.of(settings)
        event = Opened(
            ledger=secrets.token_hex(16),
            workspace=workspace,
            num_worlds=num_worlds,
            settings=dataclasses.asdict(settings),
            total_units=units_down(settings.total),
            belief=hash_belief(sealed_belief),
        )
        target.parent.mkdir(mode=0o700, exist_ok=True)
        database.check_closed(target.parent)
        lock = WriterLock(lock_path(target))
        try:
            if target.exists():
                raise LedgerError(f"{target} is there already. A ledger is never made anew for the same secret.")
            part = target.with_name(target.name + ".part")
            for leftover in (part, part.with_name(part.name + "-journal")):
                leftover.unlink(missing_ok=True)
            write_first_row(part, event, sealed_belief, keys, clock)
            lock.forget()  # what it remembers, if anything, is a ledger that is gone
            os.replace(part, target)
            database.sync_folder(target.parent)
        finally:
            lock.release()
        return cls.open(target, mac_key, witness=witness, clock=clock)

    @classmethod
    def open(
        cls,
        path: str | Path,
        mac_key: bytes,
        *,
        old_keys: Sequence[bytes] = (),
        witness: str | Path | None = None,
        in_full: bool = True,
        clock: Clock = utc_now,
    ) -> Ledger:
        """Take the lock, check, and restore account and belief exactly as the last commit left them.

        `in_full` checks hash, link and MAC of every row (10 to 20 µs each); without it only the rows that account and
        belief rest on, however long the history. Sums are taken again by `verify`.
        A witness that is passed for the first time is made and recorded; from then on the ledger never opens without.
        """
        writer = Writer(Path(path), Keys(mac_key, old_keys), in_full=in_full, clock=clock)
        try:
            meet_witness(writer, None if witness is None else Path(witness).absolute())
            writer.settle()
            return cls(writer)
        except BaseException:
            writer.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._writer.path

    @property
    def account(self) -> Account:
        """Budget and private tokens so far."""
        return self._writer.state.account

    @property
    def state(self) -> State:
        """All running totals."""
        return self._writer.state

    @property
    def head(self) -> Head:
        """The newest row: its number and digest."""
        return self._writer.head

    @property
    def sealed_belief(self) -> bytes:
        """The belief after the last commit, sealed by the curator for row `state.belief_seq`."""
        return self._writer.sealed_belief

    @property
    def settings(self) -> MechanismConfig:
        """The mechanism's settings in force."""
        return self._writer.settings

    @property
    def ledger_id(self) -> str:
        """Random name of this ledger, given when it was made."""
        return self._writer.opened.ledger

    @property
    def workspace(self) -> str:
        """Digest of the workspace that this ledger belongs to."""
        return self._writer.opened.workspace

    @property
    def num_worlds(self) -> int:
        """m."""
        return self._writer.opened.num_worlds

    @property
    def bounds(self) -> Bounds:
        """The guarantee: at the committed total, never at the spend."""
        return self.state.bounds(self.num_worlds)

    def bounds_for(self, total: float) -> Bounds:
        """The guarantee that an extension to this total would leave: what to show before asking."""
        return bounds_at(max(units_down(total), self.state.committed_units), self.num_worlds)

    def by_key(self) -> dict[str, Usage]:
        """What was spent by each key. A key's own spend bounds nothing: all share one belief."""
        with self._writer.one_at_a_time:
            return self._writer.sums.by_key()

    def by_hour(self) -> dict[str, Usage]:
        """What was spent in each hour (UTC) that had tokens, oldest first."""
        with self._writer.one_at_a_time:
            return self._writer.sums.by_hour()

    def commit(self, entries: Iterable[Usage], sealed_belief: bytes | None) -> None:
        """Record one engine step. When this returns, charge and belief are on the disk and tokens may leave.

        Pass None when the belief did not move. A step that overspends or costs less than is due raises and writes
        nothing; a failure of the disk stops the ledger.
        """
        step = tuple(entries)
        self._writer.refuse_if_stopped()
        self._price.check(step)
        self._writer.append(Stepped(step, None if sealed_belief is None else hash_belief(sealed_belief)), sealed_belief)

    def reseal(self, sealed_belief: bytes) -> None:
        """Store the same belief under another seal, in both slots of the witness too; charges nothing."""
        self.commit((), sealed_belief)

    def change_settings(self, settings: MechanismConfig) -> bool:
        """Other settings from now on; False when they are the same. A larger total is refused: see `extend`."""
        if settings == self.settings:
            return False
        price = Price.of(settings)
        old, new = dataclasses.asdict(self.settings), dataclasses.asdict(settings)
        self._writer.append(SettingsChanged(old, new, units_down(settings.total)))
        self._price = price
        return True

    def extend(self, total: float, *, confirmed_by: str) -> None:
        """Commit to a larger total, and so to a weaker guarantee, once a person has seen both bounds."""
        self._writer.append(
            Extended(
                settings=dataclasses.asdict(dataclasses.replace(self.settings, total=total)),
                old_total_units=self.state.total_units,
                new_total_units=units_down(total),
                old_bounds=dataclasses.asdict(self.bounds),
                new_bounds=dataclasses.asdict(self.bounds_for(total)),
                confirmed_by=confirmed_by,
            )
        )

    def rotate_key(self, new_key: bytes, sealed_belief: bytes | None = None) -> None:
        """Sign with a new key from now on, and store the belief sealed anew if its key changes too.

        Keep the old key: the rows before are checked with it.
        """
        writer = self._writer
        with writer.one_at_a_time:
            keys = writer.keys.rotated_to(new_key)
            if keys.current == writer.keys.current:
                raise LedgerError("The new ledger key is the old one. Make another: 32 random bytes.")
            writer.rotate(keys, sealed_belief)

    def close(self) -> None:
        """Close the file and let the next writer in."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, row {self.head.seq})"
