"""A second file, best on another disk, that records the ledger's head: a rolled-back ledger is refused on open.

The witness holds head, running totals, settings and the sealed belief of the newest commit, so that a backup plus the
witness lose nothing. Its two slots are numbered and written in turn: a write torn by a crash spoils one, and the other
is at most one commit old. What no crash can leave (both spoiled, turns that do not follow) is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paclm.errors import (
    LedgerBusy,
    LedgerFull,
    LedgerRolledBack,
    LedgerTampered,
    LedgerUnwritable,
    WitnessMissing,
)
from paclm.ledger.events import Head, KeyRotated, LedgerKeys, WitnessChanged, canonical, reseals
from paclm.ledger.head_notes import TwoSlots
from paclm.ledger.reading import read_row
from paclm.ledger.sqlite_file import sync_folder
from paclm.ledger.state import parse_row

if TYPE_CHECKING:
    from paclm.ledger.ledger import Ledger

_MAGIC = b"paclm witness 1\n"
_SLOT_BYTES = 65536
_NAME_IT = "Name this ledger's own: PACLM_WITNESS=PATH or --witness PATH."
_IF_LOST = "if it is lost for good, declare so with paclm ledger replace-witness."


@dataclass(frozen=True, slots=True)
class Testimony:
    """What a witness records of a ledger."""

    witness: str
    ledger: str
    head: Head
    state: Mapping[str, Any]
    settings: Mapping[str, Any]
    sealed_belief: bytes
    key: str
    """The name of the key that signs it. Older keys at hand make valid MACs too, and only one key is in force."""
    is_repeated: bool = False
    """The same head is written into the other slot next, so that no belief under an old seal stays there."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A whole slot, as read."""

    number: int
    payload: bytes
    mac: bytes
    testimony: Testimony
    turn: int
    """How many writes came before."""


class Witness:
    """An open witness file, held by one process. `write` returns when the testimony is on the disk."""

    def __init__(self, path: Path, keys: LedgerKeys) -> None:
        self.path = path
        self.keys = keys
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WitnessMissing(
                f"The witness {path} cannot be opened ({error.strerror}). Mount its disk, or name the right file "
                f"(PACLM_WITNESS or --witness); {_IF_LOST}"
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise LedgerBusy(
                f"The witness {path} is in use by another process, which serves another copy of this ledger: two would "
                "each release against a belief that lacks the other's tokens. Stop that process."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(
                f"The witness {path} cannot be locked ({error.strerror}). Keep it on a file system with locks."
            ) from None
        size = os.fstat(self._descriptor).st_size // 2
        self._slots = TwoSlots(path, self._descriptor, 0, size, is_synced=True)
        self.has_torn_slot = False
        """As last read: one slot is not whole. After a crash the ledger then has a row more; else it is damage."""
        self._seen = [_used_part(slot) for slot in self._slots.read()]

    @classmethod
    def create(cls, path: Path, keys: LedgerKeys, testimony: Testimony) -> Witness:
        """Make a witness with its first testimony; the file is complete or absent, with room for larger beliefs."""
        part = path.with_name(path.name + ".part")
        slot = max(_SLOT_BYTES, 8 * len(testimony.sealed_belief))
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.pwrite(descriptor, bytes(2 * slot), 0)  # full size from the start: later writes change no metadata
            finally:
                os.close(descriptor)
            witness = cls(part, keys)
            witness.write(testimony)
            os.rename(part, path)
            sync_folder(path.parent)
        except OSError as error:
            raise WitnessMissing(f"The witness {path} cannot be made ({error.strerror}).") from None
        witness.path = witness._slots.path = path
        return witness

    def read(self, ledger: str) -> Testimony:
        """The newest whole testimony. Another ledger's witness is refused before its MAC is checked."""
        slots = self._slots.read()
        self._seen = [_used_part(slot) for slot in slots]
        found = [(n, *content) for n, slot in enumerate(slots) if (content := _unpack(slot)) is not None]
        if not found:
            raise LedgerTampered(
                f"The witness {self.path} holds no whole testimony: both slots are damaged, and a crash can damage "
                f"only one. Restore the newest witness; {_IF_LOST}"
            )
        try:
            whole = [_Slot(n, payload, mac, *_parse(payload)) for n, payload, mac in found]
        except (ValueError, KeyError, TypeError):
            raise LedgerTampered(f"The witness {self.path} holds a testimony that paclm did not write.") from None
        newest = max(whole, key=lambda slot: (slot.turn, slot.testimony.head.seq))
        testimony = newest.testimony
        if testimony.ledger != ledger:
            raise WitnessMissing(
                f"The witness {self.path} belongs to another ledger ({testimony.ledger[:8]}…; this one is "
                f"{ledger[:8]}…). {_NAME_IT}"
            )
        if not self._has_own_mac(newest):
            raise LedgerTampered(f"The witness {self.path} carries a MAC that the ledger's key did not make.")
        other = 1 - newest.number
        for slot in whole:
            if slot.number == other and not self._precedes(slot, newest):
                raise LedgerTampered(
                    f"The two slots of the witness {self.path} do not belong together: one of them was copied, rolled "
                    f"back or forged. Restore the newest witness; {_IF_LOST}"
                )
        is_first = newest.turn == 0 and not slots[other].strip(b"\0")
        self.has_torn_slot = len(whole) < 2 and not is_first
        self._slots.next_slot, self._slots.next_turn = other, newest.turn + 1
        return testimony

    def _has_own_mac(self, slot: _Slot) -> bool:
        return hmac.compare_digest(self.keys.mac(slot.testimony.key, slot.payload), slot.mac)

    def _precedes(self, slot: _Slot, newest: _Slot) -> bool:
        """Whether a whole slot is the write before the newest one."""
        older, newer = slot.testimony, newest.testimony
        return (
            slot.turn == newest.turn - 1
            and older.head.seq <= newer.head.seq
            and older.ledger == newer.ledger
            and self._has_own_mac(slot)
        )

    def write(self, testimony: Testimony) -> None:
        """Record a newer head durably in the older slot; refused where another process wrote the witness meanwhile."""
        payload = canonical(
            {
                "witness": testimony.witness,
                "ledger": testimony.ledger,
                "key": testimony.key,
                "seq": testimony.head.seq,
                "digest": testimony.head.digest.hex(),
                "state": dict(testimony.state),
                "settings": dict(testimony.settings),
                "belief": testimony.sealed_belief.hex(),
                "is_repeated": testimony.is_repeated,
                "turn": self._slots.next_turn,
            }
        ).encode()
        content, size = _pack(payload, self.keys.mac(testimony.key, payload)), self._slots.size
        if len(content) > size:
            raise LedgerFull(f"The witness {self.path} has room for {size} bytes, not {len(content)}.")
        if any(os.pread(self._descriptor, len(seen), n * size) != seen for n, seen in enumerate(self._seen)):
            raise LedgerRolledBack(
                f"The witness {self.path} was written by another copy of this ledger, which is in use too. Stop both, "
                "and continue with the copy that the witness records: two histories of one secret cannot be merged."
            )
        written = self._slots.next_slot
        self._slots.write(content)
        self._seen[written] = content

    def write_twice(self, testimony: Testimony) -> None:
        """Record a head in both slots; the first is marked, so that opening repeats a second that a crash lost."""
        self.write(replace(testimony, is_repeated=True))
        self.write(testimony)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _pack(payload: bytes, mac: bytes) -> bytes:
    body = _MAGIC + len(payload).to_bytes(4, "big") + payload + mac
    return body + hashlib.sha256(body).digest()


def _unpack(slot: bytes) -> tuple[bytes, bytes] | None:
    start = len(_MAGIC) + 4
    if slot[: len(_MAGIC)] != _MAGIC:
        return None
    end = start + int.from_bytes(slot[len(_MAGIC) : start], "big")
    if hashlib.sha256(slot[: end + 32]).digest() != slot[end + 32 : end + 64]:
        return None
    return slot[start:end], slot[end : end + 32]


def _used_part(slot: bytes) -> bytes:
    """The part of a slot that any other write to it would change."""
    content = _unpack(slot)
    return slot if content is None else _pack(*content)


def _parse(payload: bytes) -> tuple[Testimony, int]:
    """A testimony and its turn."""
    fields = json.loads(payload)
    testimony = Testimony(
        str(fields["witness"]),
        str(fields["ledger"]),
        Head(int(fields["seq"]), bytes.fromhex(fields["digest"])),
        fields["state"],
        fields["settings"],
        bytes.fromhex(fields["belief"]),
        str(fields["key"]),
        bool(fields["is_repeated"]),
    )
    return testimony, int(fields["turn"])


def check_witness(ledger: Ledger, path: Path | None) -> None:
    """Check the ledger's head against the witness on open, and keep the witness for later commits.

    A witness that is named for the first time is made and recorded.
    """
    recorded = ledger.state.witness
    if path is None:
        if recorded is not None:
            raise WitnessMissing(
                f"{ledger.name} has a witness ({recorded}), and none was named. Without it a rolled-back file cannot "
                "be recognized. Name it: PACLM_WITNESS=PATH or --witness PATH. If it is lost for good, declare so with "
                "paclm ledger replace-witness."
            )
        ledger.check_note()
        return
    if recorded is None and not path.exists():
        ledger.check_note()
        attach_witness(ledger, path, "first use")
        return
    witness = Witness(path, ledger.keys)
    try:
        testimony = witness.read(ledger.ledger_id)
        check_name(testimony, path, recorded)
        check_signer(ledger, testimony, ledger.keys.current)
        is_ahead = is_one_row_ahead(ledger, testimony)
        check_torn_slot(ledger, witness, testimony)
        ledger.check_note()
    except BaseException:
        witness.close()
        raise
    ledger.witness = witness
    if recorded is None:  # a crash came between making the witness and recording it
        ledger.append(WitnessChanged(None, testimony.witness, "first use"))
    elif is_ahead and reseals(parse_row(read_row(ledger.store, ledger.head.seq))[0]):
        witness.write_twice(ledger.testimony(recorded))
    elif is_ahead or testimony.is_repeated:  # a crash came before the write, or between the two of `write_twice`
        witness.write(ledger.testimony(recorded))


def attach_witness(ledger: Ledger, path: Path, confirmed_by: str) -> None:
    """Make a witness and record it in place of the one on record, if any."""
    name = secrets.token_hex(8)
    ledger.witness = Witness.create(path, ledger.keys, ledger.testimony(name))
    ledger.append(WitnessChanged(ledger.state.witness, name, confirmed_by))


def check_name(testimony: Testimony, path: Path, recorded: str | None) -> None:
    """Refuse a witness that was replaced: its head is older than the ledger's."""
    if recorded is not None and testimony.witness != recorded:
        raise WitnessMissing(
            f"{path} is the witness {testimony.witness} of this ledger, and {recorded} is on record: it was replaced. "
            f"{_NAME_IT}"
        )


def check_torn_slot(ledger: Ledger, witness: Witness, testimony: Testimony) -> None:
    """Refuse a torn slot whose row may be missing: a crash tears a slot only after the row is in the ledger."""
    if not witness.has_torn_slot or testimony.is_repeated or ledger.head.seq > testimony.head.seq:
        return
    raise LedgerRolledBack(
        f"One of the two slots of the witness {witness.path} is not whole, the other records row "
        f"{testimony.head.seq}, and {ledger.name} ends at row {ledger.head.seq}. A write cut off by a crash leaves the "
        "ledger one row ahead of the whole slot: either the ledger was rolled back, or the witness was damaged. "
        "Restore the newest files. If the ledger's file is the newest, declare so with paclm ledger replace-witness; "
        "if it came from a backup, adopt it without the witness."
    )


def check_signer(ledger: Ledger, testimony: Testimony, in_force: str) -> None:
    """Refuse a testimony by a rotated key, which others may know.

    One by the key before is accepted where a crash came between the row that rotated it and its witness.
    """
    if testimony.key == in_force:
        return
    newest = read_row(ledger.store, ledger.head.seq)
    event, before = parse_row(newest)[0], Head(newest.seq - 1, newest.previous)
    if not isinstance(event, KeyRotated) or (event.old_key, before) != (testimony.key, testimony.head):
        raise LedgerTampered(
            f"The witness of {ledger.name} is signed with the key {testimony.key}, which was rotated; {in_force} is in "
            f"force. It can have been forged with the old key. Name the newest witness; {_IF_LOST}"
        )


def is_one_row_ahead(ledger: Ledger, testimony: Testimony) -> bool:
    """Whether the ledger has one row more than its witness, as after a crash. Refused unless 0 or 1 of one history."""
    if ledger.head.seq < testimony.head.seq:
        raise LedgerRolledBack(
            f"{ledger.name} ends at row {ledger.head.seq}, and its witness has seen row {testimony.head.seq}: the file "
            "was rolled back, and later charges are missing. Restore the newest file, or adopt this one with paclm "
            "ledger adopt, which takes account and belief from the witness."
        )
    found = ledger.store.row(testimony.head.seq)
    if found is None or found.digest != testimony.head.digest:
        raise LedgerRolledBack(
            f"Row {testimony.head.seq} of {ledger.name} is not the one its witness has seen: another copy of this "
            "ledger was in use, or a crash cut paclm ledger adopt off. In that case adopt this file again; otherwise "
            "restore the file that the witness records: two histories of one secret cannot be merged."
        )
    ahead = ledger.store.count_rows(after=testimony.head.seq)
    if ahead > 1:
        raise LedgerRolledBack(
            f"The witness of {ledger.name} is {ahead} rows behind it, and a crash leaves it one behind: the witness "
            "itself was rolled back. If the ledger's file is the newest, declare so with paclm ledger replace-witness."
        )
    return ahead == 1
