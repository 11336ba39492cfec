"""What happened to the budget, as frozen events, and the signed rows that store them. Knows no file.

Evolution: a kind is never removed, a field never changes its meaning, a new meaning is a new kind. A field added later
has a default: what its absence meant. An event is complete: every figure can be recomputed from the rows alone, without
paclm's settings or the workspace.

Each row holds the digest of the row before and a MAC by the ledger's key. The digest shows edits, gaps and swaps, also
without a key; the MAC shows rows made without the key. Only a witness shows that the newest rows are missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add, attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn, final, get_args

from paclm.errors import InvalidInput, LedgerWrongKey, UnsoundState

GENESIS = bytes(32)
"""The digest before the first row."""
MIN_KEY_BYTES = 32
Settings = Mapping[str, Any]
"""The fields of a `MechanismConfig`, as stored."""


class BadRow(Exception):
    """What is wrong with a row; the message continues a sentence that begins with the row's number."""


COUNTS = ("tokens", "dissent_tokens", "charged_tokens", "units", "public_tokens")
_counts_of = attrgetter(*COUNTS)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and charges of one API key (or session tag), in one engine step or summed."""

    key: str
    """The name of the key, or the tag."""
    tokens: int = 0
    """Private tokens: released from votes."""
    dissent_tokens: int = 0
    """Private tokens on which the worlds dissented."""
    charged_tokens: int = 0
    """Private tokens with a charge above 0."""
    units: int = 0
    """The charge, in units of 2^-60 nat."""
    public_tokens: int = 0
    """Tokens of the public model alone: they leak nothing and cost nothing."""

    def __post_init__(self) -> None:
        for name, value in zip(COUNTS, _counts_of(self), strict=True):
            if type(value) is not int or value < 0:
                raise InvalidInput(f"{name} of a ledger entry must be an integer ≥ 0, not {value!r}.")
        if not isinstance(self.key, str) or len(self.key) > 200:
            raise InvalidInput(f"The key of a ledger entry must be a text of at most 200 characters, not {self.key!r}.")

    def plus(self, more: Usage) -> Usage:
        """The sum of both, under this key."""
        return Usage(self.key, *map(add, _counts_of(self), _counts_of(more)))


@dataclass(frozen=True, slots=True)
class Opened:
    """The first row: the workspace, its settings and the total committed before the first token."""

    kind: ClassVar[str] = "opened"
    ledger: str
    """Random name of this ledger."""
    workspace: str
    """Digest of the worlds and the base model that the budget belongs to."""
    num_worlds: int
    settings: Settings
    total_units: int
    belief: str
    """SHA-256 of the sealed belief stored with this row; the same in every event with this field."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One engine step: tokens and charges by key."""

    kind: ClassVar[str] = "stepped"
    entries: tuple[Usage, ...]
    belief: str | None
    """None: the belief did not move."""


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Other settings from this row on; the total is at most the committed one."""

    kind: ClassVar[str] = "settings-changed"
    old: Settings
    new: Settings
    total_units: int


@dataclass(frozen=True, slots=True)
class Extended:
    """A larger total, and with it a weaker guarantee, confirmed by a person."""

    kind: ClassVar[str] = "extended"
    settings: Settings
    old_total_units: int
    new_total_units: int
    old_bounds: Mapping[str, float]
    new_bounds: Mapping[str, float]
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class KeyRotated:
    """Rows from this one on carry the MAC of a new key, which the old key endorses."""

    kind: ClassVar[str] = "key-rotated"
    old_key: str
    new_key: str
    endorsement: str
    """HMAC by the old key over the new key's name and the digest of the row before."""
    belief: str | None
    """The same belief under its new seal, when the sealing key changed too."""
    secret: str | None = None
    """SHA-256 of the secret under its new seal, when the sealing key changed too."""


@dataclass(frozen=True, slots=True)
class SecretSealed:
    """The sealed secret stored with this row belongs to this ledger."""

    kind: ClassVar[str] = "secret-sealed"
    secret: str
    """SHA-256 of what is stored."""
    origin: str
    """`drawn` with this row, before the first token; `file`: taken over from the file of an earlier version; or
    `resealed`: the same secret under another key."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The ledger continues in another place; where this row is the newest, nothing opens it any more."""

    kind: ClassVar[str] = "moved"
    source: str
    target: str
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """The ledger was moved, and continues here: written at the target alone, once the source has its `Moved`."""

    kind: ClassVar[str] = "arrived"
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class WitnessChanged:
    """From this row on another witness, or none, records the head of this ledger."""

    kind: ClassVar[str] = "witness-changed"
    old: str | None
    new: str | None
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The file was restored from a backup. Charges all that can have been spent since; never lowers the spend.

    `proof` is `current` (the witness shows that no row is missing), `witness` (rows are missing; `state`, `settings`
    and `belief` come from the witness) or `none` (unknown: the whole budget counts as spent).
    """

    kind: ClassVar[str] = "restored"
    proof: str
    last_seq: int
    """The last row that the restored file had."""
    lost_until: int
    """The last row known to be lost; `last_seq` when none is known."""
    total_units: int
    """The largest total ever committed, as far as the operator knows."""
    state: Mapping[str, Any] | None
    settings: Settings | None
    belief: str | None
    confirmed_by: str


Event = (
    Opened
    | Stepped
    | SettingsChanged
    | Extended
    | KeyRotated
    | SecretSealed
    | Moved
    | Arrived
    | WitnessChanged
    | Restored
)

KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in get_args(Event)}
_LATER = {
    cls: {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    for cls in KINDS.values()
}
"""Fields that older rows lack."""
_FIELDS = {cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in (*KINDS.values(), Usage)}


def reseals(event: Event) -> bool:
    """Whether an event only replaces the seal of the belief: no copy under the old key may stay anywhere."""
    return isinstance(event, KeyRotated) or (
        isinstance(event, Stepped) and not event.entries and event.belief is not None
    )


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """JSON in the form that is hashed: keys sorted, no spaces, ASCII, no NaN."""
    return _ENCODER.encode(value)


def to_fields(event: Event) -> dict[str, Any]:
    """An event as plain values."""
    fields = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    if isinstance(event, Stepped):
        fields["entries"] = [
            {name: value for name in _FIELDS[Usage] if (value := getattr(entry, name)) or name == "key"}
            for entry in event.entries  # counts of zero are left out to keep rows short
        ]
    return fields


def from_fields(kind: str, fields: Mapping[str, Any]) -> Event:
    """The event that `to_fields` described; an unknown kind, a missing or an unknown field is refused."""
    if kind not in KINDS:
        raise BadRow(f"has the unknown kind {kind!r}")
    cls = KINDS[kind]
    if not set(_FIELDS[cls]) - _LATER[cls] <= set(fields) <= set(_FIELDS[cls]):
        raise BadRow(f"has the fields {sorted(fields)} where {kind} has {sorted(_FIELDS[cls])}")
    if cls is Stepped:
        try:
            fields = {**fields, "entries": tuple(Usage(**entry) for entry in fields["entries"])}
        except (TypeError, InvalidInput):
            raise BadRow("has an invalid entry") from None
    return cls(**fields)


@final
class LedgerKeys:
    """The key that signs new rows, and the older ones that signed before a rotation. Not in repr, never pickled."""

    __slots__ = ("_by_name", "current")

    def __init__(self, current: bytes, old: Iterable[bytes] = ()) -> None:
        self._by_name: dict[str, bytes] = {}
        for key in (current, *old):
            if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
                raise InvalidInput(f"A ledger key must be at least {MIN_KEY_BYTES} random bytes.")
            self._by_name.setdefault(key_name(key), key)
        self.current = key_name(current)

    def rotated_to(self, new: bytes) -> LedgerKeys:
        """The same keys and a new one, which signs."""
        return LedgerKeys(new, self._by_name.values())

    def signing_as(self, name: str) -> LedgerKeys:
        """The same keys, of which the one of this name signs."""
        return LedgerKeys(self._by_name[name], self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def mac(self, name: str, message: bytes) -> bytes:
        """HMAC-SHA256 by the key of that name."""
        if name not in self._by_name:
            raise LedgerWrongKey(
                f"The ledger is signed with the key {name}; the keys given are {', '.join(self._by_name)}. Use the key "
                "file of this workspace, and keep the old keys beside the new one after a rotation."
            )
        return hmac.digest(self._by_name[name], message, "sha256")

    def __repr__(self) -> str:
        return f"LedgerKeys(current={self.current!r})"

    def __reduce__(self) -> NoReturn:
        raise UnsoundState("Ledger keys cannot be pickled or copied: they stay in the process that holds them.")


def key_name(key: bytes) -> str:
    """A public name for a key, from which the key cannot be found."""
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


_ROW_TYPES = (int, str, str, str, str, bytes, bytes, bytes)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest row."""

    seq: int
    digest: bytes


def digest_of(seq: int, at: str, kind: str, body: str, key: str, previous: bytes) -> bytes:
    """SHA-256 over a row's fields; the lengths in front make the encoding unambiguous."""
    text = f"{seq} {len(at)} {len(kind)} {len(key)} {at}{kind}{key}{body}"
    return hashlib.sha256(previous + text.encode()).digest()


def make_row(head: Head, seq: int, at: str, event: Event, after: Mapping[str, Any], keys: LedgerKeys) -> Row:
    """The next row of the chain, signed; `after` holds the running totals after the event."""
    body = canonical({"event": to_fields(event), "after": after})
    digest = digest_of(seq, at, event.kind, body, keys.current, head.digest)
    return Row(seq, at, event.kind, body, keys.current, head.digest, digest, keys.mac(keys.current, digest))


def check_row(row: Row, keys: LedgerKeys | None) -> None:
    """Check a row by itself: its types, its digest, and its MAC when keys are given."""
    if tuple(map(type, row)) != _ROW_TYPES:  # SQLite reads what is missing from a page as NULL, despite NOT NULL
        raise BadRow("lacks a field, or has one of another type: the file was cut off or overwritten")
    if len(row.previous) != 32 or digest_of(*row[:6]) != row.digest:
        raise BadRow("was edited: its digest does not match its fields")
    if keys is not None and not hmac.compare_digest(keys.mac(row.key, row.digest), row.mac):
        raise BadRow("carries a MAC that the ledger's key did not make")


def endorse(keys: LedgerKeys, old_key: str, new_key: str, previous: bytes) -> str:
    """The old key's MAC over a new key's name, valid at one place in one chain."""
    return keys.mac(old_key, b"rotate\n" + new_key.encode() + previous).hex()


class Checkpoint(NamedTuple):
    """Signed: a holder of the key checked, or wrote, every row up to this one."""

    seq: int
    digest: bytes
    key: str
    mac: bytes

    @classmethod
    def sign(cls, ledger: str, head: Head, keys: LedgerKeys) -> Checkpoint:
        """A checkpoint at a row that was checked with all rows before it."""
        return cls(head.seq, head.digest, keys.current, keys.mac(keys.current, _checkpoint(ledger, head)))

    @property
    def is_whole(self) -> bool:
        """Whether its fields have their types: SQLite reads what is missing from a page as NULL."""
        return tuple(map(type, self)) == (int, bytes, str, bytes)

    def is_signed(self, ledger: str, keys: LedgerKeys) -> bool:
        """Whether the key in force signed it. An older key may be known to others."""
        if not self.is_whole:
            return False
        expected = keys.mac(keys.current, _checkpoint(ledger, Head(self.seq, self.digest)))
        return self.key == keys.current and hmac.compare_digest(expected, self.mac)


def _checkpoint(ledger: str, head: Head) -> bytes:
    return f"paclm ledger checkpoint\n{ledger} {head.seq}\n".encode() + head.digest
