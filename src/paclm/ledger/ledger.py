"""The ledger: charge and belief in one transaction, on the disk before `commit` returns.

It holds neither the secret nor a belief in clear: the curator hands it sealed bytes. It checks prices a second time.
After any failure it refuses everything: what reached the disk is unknown until the ledger is opened again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NoReturn, Self

from paclm.config import MechanismConfig
from paclm.errors import (
    LedgerDamaged,
    LedgerError,
    LedgerRolledBack,
    LedgerStopped,
    LedgerTampered,
    UnsoundState,
)
from paclm.ledger import reading
from paclm.ledger.address import Holding, open_writer
from paclm.ledger.address import create as create_store
from paclm.ledger.events import (
    GENESIS,
    BadRow,
    Checkpoint,
    Event,
    Extended,
    Head,
    KeyRotated,
    LedgerKeys,
    Opened,
    SecretSealed,
    SettingsChanged,
    Stepped,
    Usage,
    endorse,
    make_row,
    reseals,
)
from paclm.ledger.state import (
    Bounds,
    Price,
    Sums,
    apply,
    bounds_at,
    new_settings,
    to_state_fields,
    usages,
)
from paclm.ledger.store import Address, Commit, Copy
from paclm.ledger.testimony import Testimony, Witness
from paclm.ledger.witness import check_witness
from paclm.privacy.accounting import Account, units_down

Clock = Callable[[], datetime]
_CLOSED = "it was closed."
CHECKPOINT_EVERY = 4096
"""Rows after which a checkpoint is signed: opening checks those since."""


def utc_now() -> datetime:
    """The time of a row: for people and for sums by time; nothing is decided by it."""
    return datetime.now(UTC)


class Ledger:
    """An open ledger, and the only one on its file. Make one with `create` or `open`; use it as a context manager."""

    def __init__(
        self,
        address: Address,
        keys: LedgerKeys,
        *,
        in_full: bool,
        accept_copy: bool = False,
        accept_moved: bool = False,
        clock: Clock = utc_now,
        holding: Holding | None = None,
    ) -> None:
        """Take the right to write and read the ledger, without checking the witness: `open` does that."""
        self.keys = keys
        self.witness: Witness | None = None
        self._clock = clock
        self._process = os.getpid()
        self._failure: str | None = None
        self._sums: Sums | None = None
        self._one_at_a_time = threading.RLock()
        self.store = open_writer(address, holding or Holding())
        self.name = self.store.name
        try:
            self._load(in_full, accept_copy, accept_moved)
        except BaseException:
            self.store.close()
            raise

    def _load(self, in_full: bool, accept_copy: bool, accept_moved: bool) -> None:
        kind = self.store.kind
        if kind == "copy" and not accept_copy:
            raise LedgerRolledBack(
                f"{self.name} is a backup copy: tokens may have been released after it was made. Adopt it with "
                "paclm ledger adopt, which charges all that can have been spent since."
            )
        if not (accept_moved and kind == "live"):
            reading.refuse_if_moved(self.store)
        if kind == "none":
            raise LedgerDamaged(f"{self.name} is not a ledger: it was overwritten or emptied. Restore a backup.")
        if in_full:
            self.store.check_pages()
        self.store.migrate(_stamp(self._clock))
        checked = 0
        if in_full:
            contents = reading.read_chain(self.store, self.keys)
        else:
            contents = reading.read_contents(self.store, self.keys)
            checked = reading.check_recent(self.store, self.keys, contents)
        if contents.key != self.keys.current and accept_copy:  # a copy from before the key was rotated
            self.keys = self.keys.signing_as(contents.key)
        elif contents.key != self.keys.current:
            raise LedgerError(f"The newest rows of {self.name} are signed with an old key. Pass the newest key first.")
        self.head, self.state = contents.head, contents.state
        self.sealed_belief = contents.sealed_belief
        """The belief after the last commit, sealed by the curator for row `state.belief_seq`."""
        self.settings = contents.settings
        self._price = Price.of(contents.settings)
        self.ledger_id = contents.opened.ledger
        self.workspace = contents.opened.workspace
        """Digest of the workspace that this ledger belongs to."""
        self.num_worlds = contents.opened.num_worlds
        self.sealed_secret = contents.sealed_secret
        """The secret, sealed by the curator; None before it is drawn."""
        self._last_checkpoint = self.head.seq - checked
        if checked >= CHECKPOINT_EVERY:
            self.store.set_checkpoint(self._checkpoint(self.head))

    def _checkpoint(self, head: Head) -> Checkpoint:
        self._last_checkpoint = head.seq
        return Checkpoint.sign(self.ledger_id, head, self.keys)

    @classmethod
    def create(
        cls,
        address: Address,
        mac_key: bytes,
        *,
        workspace: str,
        num_worlds: int,
        settings: MechanismConfig,
        sealed_belief: bytes,
        witness: Address | None = None,
        clock: Clock = utc_now,
        holding: Holding | None = None,
    ) -> Ledger:
        """Make the ledger of a workspace and open it."""
        Price.of(settings)
        event = Opened(
            ledger=secrets.token_hex(16),
            workspace=workspace,
            num_worlds=num_worlds,
            settings=dataclasses.asdict(settings),
            total_units=units_down(settings.total),
            belief=hash_sealed(sealed_belief),
        )
        after = to_state_fields(apply(None, 1, event))
        row = make_row(Head(0, GENESIS), 1, _stamp(clock), event, after, LedgerKeys(mac_key))
        create_store(address, Copy([row], (1, sealed_belief)), holding=holding)
        return cls.open(address, mac_key, witness=witness, clock=clock, holding=holding)

    @classmethod
    def open(
        cls,
        address: Address,
        mac_key: bytes,
        *,
        old_keys: Sequence[bytes] = (),
        witness: Address | None = None,
        clock: Clock = utc_now,
        holding: Holding | None = None,
    ) -> Ledger:
        """Take the right to write, check, and restore account and belief exactly as the last commit left them.

        Checks the rows that account, belief and secret rest on, and hash, link and MAC of every row since the last
        signed checkpoint (10 to 20 µs each); `verify` checks all. A witness that is passed for the first time is made
        and recorded; from then on the ledger does not open without it.
        """
        ledger = cls(address, LedgerKeys(mac_key, old_keys), in_full=False, clock=clock, holding=holding)
        try:
            check_witness(ledger, witness)
            ledger.settle()
            return ledger
        except BaseException:
            ledger.close()
            raise

    def check_note(self) -> None:
        """Refuse a file that lacks the row noted as the newest when the ledger was last in use in this folder."""
        reading.check_note(self.store, self.head.seq, self.store.note)

    def settle(self) -> None:
        """After all checks: note the head, and make the store ready for commits."""
        self.store.note_head(self.head)
        self.store.settle()

    @property
    def account(self) -> Account:
        """Budget and private tokens so far."""
        return self.state.account

    @property
    def bounds(self) -> Bounds:
        """The guarantee: at the committed total, never at the spend."""
        return bounds_at(self.state.committed_units, self.num_worlds)

    def bounds_for(self, total: float) -> Bounds:
        """The guarantee after an extension to this total: to be shown before it is confirmed."""
        return bounds_at(max(units_down(total), self.state.committed_units), self.num_worlds)

    def by_key(self) -> dict[str, Usage]:
        """What each key spent. A key's own spend bounds nothing: all share one belief."""
        with self._one_at_a_time:
            return dict(sorted(self._current_sums().by_key.items()))

    def by_hour(self) -> dict[str, Usage]:
        """What was spent in each hour (UTC) with tokens, oldest first."""
        with self._one_at_a_time:
            return dict(sorted(self._current_sums().by_hour.items()))

    def _current_sums(self) -> Sums:
        self._refuse_if_stopped()
        if self._sums is None:
            self._sums = Sums(self.store.usage_by("key"), self.store.usage_by("hour"))
        return self._sums

    def commit(self, entries: Iterable[Usage], sealed_belief: bytes | None) -> None:
        """Record one engine step. When this returns, charge and belief are on the disk and tokens may be released.

        Pass None when the belief did not move. A step that overspends or is charged below its price raises and writes
        nothing; a failure of the disk stops the ledger.
        """
        step = tuple(entries)
        self._refuse_if_stopped()
        self._price.check(step)
        self.append(Stepped(step, None if sealed_belief is None else hash_sealed(sealed_belief)), sealed_belief)

    def append(
        self,
        event: Event,
        sealed_belief: bytes | None = None,
        *,
        sealed_secret: bytes | None = None,
        seq: int | None = None,
        keys: LedgerKeys | None = None,
    ) -> None:
        """Write one event durably. When this returns, the row is on the disk and the witness records it.

        Other `keys` sign this row and all that follow.
        """
        with self._one_at_a_time:
            self._refuse_if_stopped()
            seq = self.head.seq + 1 if seq is None else seq
            try:
                after = apply(self.state, seq, event)
            except BadRow as problem:
                raise LedgerTampered(f"A new row for {self.name} {problem}. Nothing was written.") from None
            row = make_row(self.head, seq, _stamp(self._clock), event, to_state_fields(after), keys or self.keys)
            entries, sums = usages(self.state, after, event), self._sums
            belief = None if sealed_belief is None else (after.belief_seq, sealed_belief)
            head, is_due = Head(seq, row.digest), seq - self._last_checkpoint >= CHECKPOINT_EVERY
            checkpoint = Checkpoint.sign(self.ledger_id, head, keys or self.keys) if is_due or keys else None
            try:
                self.store.append(Commit(row, self.head.seq, entries, belief, sealed_secret, checkpoint))
                if keys is not None:
                    self._use_keys(keys)
                self.head, self.state = head, after
                if checkpoint is not None:
                    self._last_checkpoint = seq
                if sums is not None:
                    sums.add(row.at, entries)
                self._sums = sums  # sums first asked for during the commit include this row already: dropped
                if sealed_belief is not None:
                    self.sealed_belief = sealed_belief
                if sealed_secret is not None:
                    self.sealed_secret = sealed_secret
                if (settings := new_settings(event)) is not None:
                    self.settings = MechanismConfig(**settings)
                    self._price = Price.of(self.settings)
                if self.witness is not None and self.state.witness is not None:
                    testimony = self.testimony(self.state.witness)
                    if reseals(event):  # in both slots: the belief in the other is sealed with the old key
                        self.witness.write_twice(testimony)
                    else:
                        self.witness.write(testimony)
                self.store.note_head(self.head)
            except BaseException as failure:
                self._failure = str(failure) or type(failure).__name__
                raise

    def reseal(self, sealed_belief: bytes) -> None:
        """Store the same belief under another seal, in both slots of the witness too; charges nothing."""
        self.commit((), sealed_belief)

    def seal_secret(self, sealed_secret: bytes, origin: str) -> None:
        """Store the sealed secret of this ledger durably, as a row says; for `origin` see `SecretSealed`."""
        self.append(SecretSealed(hash_sealed(sealed_secret), origin), sealed_secret=sealed_secret)

    def change_settings(self, settings: MechanismConfig) -> bool:
        """Use other settings from now on; False when they are the same.

        A total above the committed one is refused: see `extend`. One that was lowered may be raised again up to it.
        """
        if settings == self.settings:
            return False
        Price.of(settings)
        old, new = dataclasses.asdict(self.settings), dataclasses.asdict(settings)
        self.append(SettingsChanged(old, new, units_down(settings.total)))
        return True

    def extend(self, total: float, *, confirmed_by: str) -> None:
        """Commit to a larger total, and so to a weaker guarantee, once a person has seen both bounds."""
        self.append(
            Extended(
                settings=dataclasses.asdict(dataclasses.replace(self.settings, total=total)),
                old_total_units=self.state.total_units,
                new_total_units=units_down(total),
                old_bounds=dataclasses.asdict(self.bounds),
                new_bounds=dataclasses.asdict(self.bounds_for(total)),
                confirmed_by=confirmed_by,
            )
        )

    def rotate_key(
        self, new_key: bytes, sealed_belief: bytes | None = None, sealed_secret: bytes | None = None
    ) -> None:
        """Sign with a new key from now on, and store belief and secret under their new seal, in one transaction.

        Keep the old key: the rows before are checked with it.
        """
        keys = self.keys.rotated_to(new_key)
        if keys.current == self.keys.current:
            raise LedgerError("The new ledger key is the old one. Make another: 32 random bytes.")
        self.rotate_to(keys, sealed_belief, sealed_secret)

    def rotate_to(
        self, keys: LedgerKeys, sealed_belief: bytes | None = None, sealed_secret: bytes | None = None
    ) -> None:
        """Sign with other keys from a row on in which the old key endorses the new one."""
        with self._one_at_a_time:
            old = self.keys.current
            endorsement = endorse(keys, old, keys.current, self.head.digest)
            belief, secret = (
                None if sealed is None else hash_sealed(sealed) for sealed in (sealed_belief, sealed_secret)
            )
            event = KeyRotated(old, keys.current, endorsement, belief, secret)
            self.append(event, sealed_belief, sealed_secret=sealed_secret, keys=keys)

    def _use_keys(self, keys: LedgerKeys) -> None:
        self.keys = keys
        if self.witness is not None:
            self.witness.keys = keys

    def testimony(self, witness: str) -> Testimony:
        """What a witness of that name should record now."""
        return Testimony(
            witness,
            self.ledger_id,
            self.head,
            to_state_fields(self.state),
            dataclasses.asdict(self.settings),
            self.sealed_belief,
            self.keys.current,
        )

    def _refuse_if_stopped(self) -> None:
        if self._failure is not None:
            raise LedgerStopped(f"This ledger stopped: {self._failure} Restart to continue from what is on the disk.")
        if os.getpid() != self._process:
            raise LedgerStopped("This ledger was opened before the process forked. One secret has one writer.")

    def close(self) -> None:
        """Close the files and release the lock; closing twice is fine."""
        with self._one_at_a_time:
            if self._failure == _CLOSED:
                return
            self._failure = _CLOSED
            if self.witness is not None:
                self.witness.close()
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ledger({self.name!r}, row {self.head.seq})"

    def __reduce__(self) -> NoReturn:
        raise UnsoundState("An open ledger cannot be pickled or copied: one secret has one writer.")


def hash_sealed(sealed: bytes) -> str:
    """The hash of a sealed belief or secret, as rows hold it."""
    return hashlib.sha256(sealed).hexdigest()


def _stamp(clock: Clock) -> str:
    return clock().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
