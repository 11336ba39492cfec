"""Rows that vouch for one another: each holds the digest of the one before, and a MAC by the ledger's key.

The digest shows edits, gaps and swaps to anyone; the MAC shows rows that someone without the key has made. Neither
shows that the newest rows are missing: only a witness does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, final

from paclm.errors import InvalidInput, LedgerWrongKey, UnsoundState
from paclm.ledger.events import BadRow, Event, canonical, from_fields, to_fields
from paclm.ledger.state import State, from_state_fields, to_state_fields

GENESIS = bytes(32)
"""What stands for the digest before the first row."""
MIN_KEY_BYTES = 32


@final
class Keys:
    """The key that signs new rows, and older ones that signed rows before a rotation. Never shown, never pickled."""

    __slots__ = ("_by_name", "current")

    def __init__(self, current: bytes, old: Iterable[bytes] = ()) -> None:
        self._by_name: dict[str, bytes] = {}
        for key in (current, *old):
            if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
                raise InvalidInput(f"A ledger key must be at least {MIN_KEY_BYTES} random bytes.")
            self._by_name.setdefault(key_name(key), key)
        self.current = key_name(current)

    def rotated_to(self, new: bytes) -> Keys:
        """The same keys with a new one in front."""
        return Keys(new, self._by_name.values())

    def led_by(self, name: str) -> Keys:
        """The same keys with one of them in front."""
        return Keys(self._by_name[name], self._by_name.values())

    def mac(self, name: str, message: bytes) -> bytes:
        """HMAC-SHA256 by the key of that name."""
        if name not in self._by_name:
            raise LedgerWrongKey(
                f"The ledger is signed with the key {name}, and given was {', '.join(self._by_name)}. Use the key file "
                "of this workspace, and keep the old keys beside the new one after a rotation."
            )
        return hmac.digest(self._by_name[name], message, "sha256")

    def __repr__(self) -> str:
        return f"Keys(current={self.current!r})"

    def __reduce__(self) -> NoReturn:
        raise UnsoundState("Ledger keys cannot be pickled or copied: they stay in the process that holds them.")


def key_name(key: bytes) -> str:
    """A public name for a key: says which one it is, and nothing about it."""
    return hashlib.sha256(b"paclm ledger key\n" + key).hexdigest()[:16]


class Row(NamedTuple):
    """One row as stored."""

    seq: int
    at: str
    kind: str
    body: str
    key: str
    previous: bytes
    digest: bytes
    mac: bytes

    @property
    def has_types(self) -> bool:
        """Whether every field is of its type: SQLite reads what is missing from a page as NULL, also where none may be.

        Only a whole check of the file looks at that, and a ledger is not read whole at every opening.
        """
        return tuple(map(type, self)) == _TYPES

    @property
    def contents(self) -> tuple[Event, State]:
        """The event and the running totals after it."""
        try:
            body: dict[str, Any] = json.loads(self.body)
            return from_fields(self.kind, body["event"]), from_state_fields(body["after"])
        except (ValueError, KeyError, TypeError, RecursionError):  # a forged body may be nested without end
            raise BadRow("cannot be read") from None


_TYPES = (int, str, str, str, str, bytes, bytes, bytes)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest row."""

    seq: int
    digest: bytes


def digest_of(seq: int, at: str, kind: str, body: str, key: str, previous: bytes) -> bytes:
    """SHA-256 over everything a row says; the lengths in front leave one reading only."""
    text = f"{seq} {len(at)} {len(kind)} {len(key)} {at}{kind}{key}{body}"
    return hashlib.sha256(previous + text.encode()).digest()


def make_row(head: Head, seq: int, at: str, event: Event, after: State, keys: Keys) -> Row:
    """The next row of the chain, signed."""
    body = canonical({"event": to_fields(event), "after": to_state_fields(after)})
    digest = digest_of(seq, at, event.kind, body, keys.current, head.digest)
    return Row(seq, at, event.kind, body, keys.current, head.digest, digest, keys.mac(keys.current, digest))


def check_row(row: Row, keys: Keys | None) -> None:
    """A row by itself: its fields, its digest, and its MAC when a key is there."""
    if not row.has_types:
        raise BadRow("lacks a field, or has one of another type: the file was cut off or overwritten")
    if len(row.previous) != 32 or digest_of(*row[:6]) != row.digest:
        raise BadRow("was edited: its digest does not fit what it says")
    if keys is not None and not hmac.compare_digest(keys.mac(row.key, row.digest), row.mac):
        raise BadRow("carries a MAC that the ledger's key did not make")


def endorse(keys: Keys, old_key: str, new_key: str, previous: bytes) -> str:
    """The old key's word for a new one, at one place in one chain."""
    return keys.mac(old_key, b"rotate\n" + new_key.encode() + previous).hex()
