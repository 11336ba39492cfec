"""A witness in a file, best on another disk.

Its two slots are numbered and written in turn: a write torn by a crash spoils one, and the other is at most one commit
old. What no crash can leave (both spoiled, turns that do not follow) is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import replace
from pathlib import Path

from paclm.errors import LedgerBusy, LedgerFull, LedgerRolledBack, LedgerTampered, LedgerUnwritable, WitnessMissing
from paclm.ledger.events import LedgerKeys
from paclm.ledger.head_notes import TwoSlots
from paclm.ledger.sqlite_file import refuse_link, sync_folder
from paclm.ledger.testimony import IF_LOST, Signed, Testimony, Witness

_MAGIC = b"paclm witness 1\n"
_SLOT_BYTES = 65536


class FileWitness(Witness):
    """An open witness file, held by one process."""

    def __init__(self, path: Path, keys: LedgerKeys) -> None:
        super().__init__(str(path), keys)
        refuse_link(path)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WitnessMissing(
                f"The witness {path} cannot be opened ({error.strerror}). Mount its disk, or name the right file "
                f"(PACLM_WITNESS or --witness); {IF_LOST} A host that takes a ledger over from another one needs a "
                "witness that both reach: one in a database on a third (PACLM_WITNESS=postgresql://…)."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise LedgerBusy(
                f"The witness {path} is in use by another process, which serves this ledger or a copy of it: two would "
                "each release against a belief that lacks the other's tokens. Stop that process; a witness file cannot "
                "be taken over while it runs."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise LedgerUnwritable(
                f"The witness {path} cannot be locked ({error.strerror}). Keep it on a file system with locks."
            ) from None
        size = os.fstat(self._descriptor).st_size // 2
        self._slots = TwoSlots(path, self._descriptor, 0, size, is_synced=True)
        self._seen = [_used_part(slot) for slot in self._slots.read()]

    @classmethod
    def create(cls, path: Path, keys: LedgerKeys, testimony: Testimony) -> FileWitness:
        """Make a witness with its first testimony; the file is complete or absent, with room for larger beliefs."""
        refuse_link(path)
        if path.exists():
            raise LedgerRolledBack(
                f"{path} already exists. A new witness starts empty; pass an existing one when opening instead."
            )
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
        witness.name, witness._slots.path = str(path), path
        return witness

    def read(self, ledger: str) -> Testimony:
        """The newest whole testimony; refused where the other slot does not precede it."""
        slots = self._slots.read()
        self._seen = [_used_part(slot) for slot in slots]
        contents = {number: content for number, slot in enumerate(slots) if (content := _unpack(slot)) is not None}
        if not contents:
            raise LedgerTampered(
                f"The witness {self.name} holds no whole testimony: both slots are damaged, and a crash can damage "
                f"only one. Restore the newest witness; {IF_LOST}"
            )
        whole = {number: Signed.parse(*content, self.name) for number, content in contents.items()}
        number, newest = max(whole.items(), key=lambda slot: (slot[1].turn, slot[1].testimony.head.seq))
        self.check(newest, ledger)
        other = 1 - number
        if other in whole and not self._precedes(whole[other], newest):
            raise LedgerTampered(
                f"The two slots of the witness {self.name} do not belong together: one of them was copied, rolled "
                f"back or forged. Restore the newest witness; {IF_LOST}"
            )
        is_first = newest.turn == 0 and not slots[other].strip(b"\0")
        self.has_torn_slot = len(whole) < 2 and not is_first
        self._slots.next_slot, self._slots.next_turn = other, newest.turn + 1
        return newest.testimony

    def _precedes(self, slot: Signed, newest: Signed) -> bool:
        """Whether a whole slot is the write before the newest one."""
        older, newer = slot.testimony, newest.testimony
        return (
            slot.turn == newest.turn - 1
            and older.head.seq <= newer.head.seq
            and older.ledger == newer.ledger
            and slot.has_mac_by(self.keys)
        )

    def write(self, testimony: Testimony) -> None:
        """Record a newer head durably in the older slot; refused where another process wrote the witness meanwhile."""
        signed, size = Signed.sign(testimony, self._slots.next_turn, self.keys), self._slots.size
        content = _pack(signed.payload, signed.mac)
        if len(content) > size:
            raise LedgerFull(f"The witness {self.name} has room for {size} bytes, not {len(content)}.")
        if any(os.pread(self._descriptor, len(seen), n * size) != seen for n, seen in enumerate(self._seen)):
            raise LedgerRolledBack(
                f"The witness {self.name} was written by another copy of this ledger, which is in use too. Stop both, "
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
