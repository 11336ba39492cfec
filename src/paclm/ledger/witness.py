"""A second file, best on another disk, that knows how far the ledger had come.

Files can be put back to an older day and look whole; the witness then knows better. It holds head, running totals,
settings and the sealed belief of the newest commit, so that a backup plus the witness lose nothing. Two slots take
turns, and count them: a write torn by a crash spoils one, and the other is at most one commit old. What a crash cannot
have left (both spoiled, turns that do not follow one another) is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paclm.errors import (
    LedgerBusy,
    LedgerError,
    LedgerFull,
    LedgerRolledBack,
    LedgerTampered,
    LedgerUnwritable,
    WitnessMissing,
)
from paclm.ledger.chain import Head, Keys
from paclm.ledger.database import sync_folder
from paclm.ledger.events import canonical

_MAGIC = b"paclm witness 1\n"
_SLOT_BYTES = 65536
NAME_IT = "Name this ledger's own: PACLM_WITNESS=PATH or --witness PATH."
"""What to do where no witness, or a wrong one, was named."""


@dataclass(frozen=True, slots=True)
class Testimony:
    """What a witness knows."""

    witness: str
    ledger: str
    head: Head
    state: Mapping[str, Any]
    settings: Mapping[str, Any]
    sealed_belief: bytes
    key: str
    """The name of the key that signed, or will sign: MACs by any key at hand are right, and only one is in force."""
    is_repeated: bool = False
    """The same head is to be written into the other slot next: no belief under another key may stay there."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A whole slot, as read."""

    number: int
    payload: bytes
    mac: bytes
    testimony: Testimony
    turn: int
    """How many were written before; 0 also for those of earlier versions, which did not count."""


class Witness:
    """An open witness file, held by one process. `write` returns when the testimony is on the disk."""

    def __init__(self, path: Path, keys: Keys) -> None:
        self.path = path
        self.keys = keys
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WitnessMissing(
                f"The witness {path} cannot be opened ({error.strerror}). Mount its disk, or name the right file "
                "(PACLM_WITNESS or --witness); if it is lost for good, declare so with paclm ledger replace-witness."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise LedgerBusy(
                f"The witness {path} is in use by another process, which serves another copy of this ledger: two would "
                "each release against a belief that misses the other's tokens. Stop that process."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(
                f"The witness {path} cannot be locked ({error.strerror}). Keep it on a file system with locks."
            ) from None
        self._slot_bytes = os.fstat(self._descriptor).st_size // 2
        self._next_slot = 0
        self._next_turn = 0
        self.has_torn_slot = False
        """As last read: one slot is not whole. By a crash, and then the ledger has a row more; or by damage."""
        self._seen = [_written(slot) for slot in self._slots()]

    @classmethod
    def create(cls, path: Path, keys: Keys, testimony: Testimony) -> Witness:
        """A new witness with its first testimony; complete or absent, with room for beliefs several times as large."""
        part = path.with_name(path.name + ".part")
        slot = max(_SLOT_BYTES, 8 * len(testimony.sealed_belief))
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
                os.pwrite(descriptor, bytes(2 * slot), 0)  # full size at once: later writes change no metadata
            finally:
                os.close(descriptor)
            witness = cls(part, keys)
            witness.write(testimony)
            os.rename(part, path)
            sync_folder(path.parent)
        except OSError as error:
            raise WitnessMissing(f"The witness {path} cannot be made ({error.strerror}).") from None
        witness.path = path
        return witness

    @staticmethod
    def new_name() -> str:
        """A random name for a witness."""
        return secrets.token_hex(8)

    def read(self, ledger: str) -> Testimony:
        """The newest whole testimony on this ledger; another ledger's witness is told apart before any key is asked."""
        slots = self._slots()
        self._seen = [_written(slot) for slot in slots]
        found = [(n, *content) for n, slot in enumerate(slots) if (content := _unpack(slot)) is not None]
        if not found:
            raise LedgerTampered(
                f"The witness {self.path} holds no whole testimony: both of its slots are damaged, where a write that "
                "a crash cut off spoils one. Put the newest one back; if it is lost for good, declare so with paclm "
                "ledger replace-witness."
            )
        try:
            whole = [_Slot(n, payload, mac, *_parsed(payload)) for n, payload, mac in found]
        except (ValueError, KeyError, TypeError):
            raise LedgerTampered(
                f"The witness {self.path} holds a testimony that paclm did not write: it cannot be read."
            ) from None
        newest = max(whole, key=lambda slot: (slot.turn, slot.testimony.head.seq))
        testimony = newest.testimony
        if testimony.ledger != ledger:
            raise WitnessMissing(
                f"The witness {self.path} belongs to another ledger ({testimony.ledger[:8]}…, and this one is "
                f"{ledger[:8]}…). {NAME_IT}"
            )
        if not hmac.compare_digest(self.keys.mac(testimony.key, newest.payload), newest.mac):
            raise LedgerTampered(f"The witness {self.path} carries a MAC that the ledger's key did not make.")
        other = 1 - newest.number
        self._check_turns(newest, [slot for slot in whole if slot.number == other])
        is_blank, is_first = not slots[other].strip(b"\0"), testimony.state.get("witness") != testimony.witness
        self.has_torn_slot = len(whole) < 2 and not (is_blank and is_first)
        self._next_slot, self._next_turn = other, newest.turn + 1
        return testimony

    def _check_turns(self, newest: _Slot, others: list[_Slot]) -> None:
        """What is whole was written whole, one turn after the other; a slot that was copied or put back was not."""
        for slot in others:
            older, newer = slot.testimony, newest.testimony
            follows = slot.turn == max(0, newest.turn - 1) and older.head.seq <= newer.head.seq
            if (
                not follows
                or older.ledger != newer.ledger
                or not hmac.compare_digest(self.keys.mac(older.key, slot.payload), slot.mac)
            ):
                raise LedgerTampered(
                    f"The two slots of the witness {self.path} do not belong together: one of them was copied, put "
                    "back or made by someone else. Put the newest witness back; if it is lost for good, declare so "
                    "with paclm ledger replace-witness."
                )

    def write(self, testimony: Testimony) -> None:
        """Record a newer head durably, over the older of the two slots; refused where another copy did so meanwhile."""
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
                "turn": self._next_turn,
            }
        ).encode()
        slot = _pack(payload, self.keys.mac(testimony.key, payload))
        if len(slot) > self._slot_bytes:
            raise LedgerFull(f"The witness {self.path} has room for {self._slot_bytes} bytes, not {len(slot)}.")
        if any(
            os.pread(self._descriptor, len(seen), n * self._slot_bytes) != seen for n, seen in enumerate(self._seen)
        ):
            raise LedgerRolledBack(
                f"The witness {self.path} was written by another copy of this ledger, which is in use too. Stop both, "
                "and go on with the one that the witness knows: two histories of one secret cannot be merged."
            )
        try:
            written = os.pwrite(self._descriptor, slot, self._next_slot * self._slot_bytes)
            _sync(self._descriptor)
        except OSError as error:
            raise LedgerError(f"The witness {self.path} cannot be written: {error.strerror}. Mend its disk.") from None
        if written != len(slot):
            raise LedgerFull(f"The witness {self.path} took {written} of {len(slot)} bytes. Make room on its disk.")
        self._seen[self._next_slot] = slot
        self._next_slot, self._next_turn = 1 - self._next_slot, self._next_turn + 1

    def write_twice(self, testimony: Testimony) -> None:
        """Record a head in both slots; where that is cut short between them, the first says so."""
        self.write(replace(testimony, is_repeated=True))
        self.write(testimony)

    def is_signed_with(self, key: str) -> bool:
        """Whether both slots are whole and by that key."""
        contents = [_unpack(slot) for slot in self._seen]
        return all(content is not None and _parsed(content[0])[0].key == key for content in contents)

    def _slots(self) -> list[bytes]:
        return [os.pread(self._descriptor, self._slot_bytes, n * self._slot_bytes) for n in (0, 1)]

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


def _written(slot: bytes) -> bytes:
    """As much of a slot as any other write to it would change."""
    content = _unpack(slot)
    return slot if content is None else _pack(*content)


def _parsed(payload: bytes) -> tuple[Testimony, int]:
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
        bool(fields.get("is_repeated", False)),
    )
    return testimony, int(fields.get("turn", 0))


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":  # fsync there stops at the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)
