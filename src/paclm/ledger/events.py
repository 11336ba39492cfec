"""What happened to the budget, as frozen records. Knows no file and no key.

Rules of evolution: a kind is never removed, a field never changes its meaning, a new meaning is a new kind. An event
says everything about itself: whoever holds the rows can recompute every figure without paclm's settings or workspace.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paclm.errors import InvalidInput

Settings = Mapping[str, Any]
"""The fields of a `MechanismConfig`, as stored."""


class BadRow(Exception):
    """What is wrong with a row: the rest of a sentence that begins with the row's number."""


COUNTS = ("tokens", "dissent_tokens", "charged_tokens", "units", "public_tokens")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one API key (or session tag) had: in one engine step, or added up."""

    key: str
    """The name of the key, or the tag."""
    tokens: int = 0
    """Private tokens: released from votes."""
    dissent_tokens: int = 0
    """Those on which the worlds differed."""
    charged_tokens: int = 0
    """Those that cost anything."""
    units: int = 0
    """What they cost, in units of 2^-60 nat."""
    public_tokens: int = 0
    """Tokens of the public model alone; they say nothing about the secret and cost nothing."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInput(f"{name} of a ledger entry must be an integer ≥ 0, not {value!r}.")
        if not isinstance(self.key, str) or len(self.key) > 200:
            raise InvalidInput(f"The key of a ledger entry must be a text of at most 200 characters, not {self.key!r}.")


@dataclass(frozen=True, slots=True)
class Opened:
    """The first row: whose ledger this is and what was committed before the first token."""

    kind: ClassVar[str] = "opened"
    ledger: str
    """Random name of this ledger."""
    workspace: str
    """Digest of the workspace: the worlds and the base model that the budget belongs to."""
    num_worlds: int
    settings: Settings
    total_units: int
    belief: str
    """SHA-256 of the sealed belief that was stored with this row; so in every event that has it."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One engine step: what each key had in it."""

    kind: ClassVar[str] = "stepped"
    entries: tuple[Usage, ...]
    belief: str | None
    """None: the belief did not move."""


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Other settings from here on; the total may only have become smaller."""

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
    """Rows from this one on carry the MAC of a new key; the old key vouches for it."""

    kind: ClassVar[str] = "key-rotated"
    old_key: str
    new_key: str
    endorsement: str
    """HMAC by the old key over the new key's name and the digest of the row before."""
    belief: str | None
    """The belief sealed anew, when its key changed too."""


@dataclass(frozen=True, slots=True)
class WitnessChanged:
    """From here on another witness, or none, knows the head of this ledger."""

    kind: ClassVar[str] = "witness-changed"
    old: str | None
    new: str | None
    confirmed_by: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The file came back from a backup. Charges all that can have been spent since; never gives anything back.

    `proof` is `current` (a witness shows that no row is missing), `witness` (rows are missing, and the witness kept
    account and belief: `state`, `settings`, `belief`) or `none` (nobody knows: the whole budget counts as spent).
    """

    kind: ClassVar[str] = "restored"
    proof: str
    last_seq: int
    """The last row that the restored file had."""
    lost_until: int
    """The last row known to be lost; `last_seq` when none is known."""
    total_units: int
    """At least the total that was ever committed, as far as the operator knows."""
    state: Mapping[str, Any] | None
    settings: Settings | None
    belief: str | None
    confirmed_by: str


Event = Opened | Stepped | SettingsChanged | Extended | KeyRotated | WitnessChanged | Restored

KINDS: dict[str, type[Event]] = {
    cls.kind: cls for cls in (Opened, Stepped, SettingsChanged, Extended, KeyRotated, WitnessChanged, Restored)
}
_FIELDS = {cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in (*KINDS.values(), Usage)}


def reseals(event: Event) -> bool:
    """Whether an event is about the seal of a belief that did not move: none under another key may stay anywhere."""
    return isinstance(event, KeyRotated) or (
        isinstance(event, Stepped) and not event.entries and event.belief is not None
    )


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """JSON in the one way that is hashed: keys sorted, no spaces, ASCII, no NaN."""
    return _ENCODER.encode(value)


def to_fields(event: Event) -> dict[str, Any]:
    """An event as plain values."""
    fields = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    if isinstance(event, Stepped):
        fields["entries"] = [
            {name: value for name in _FIELDS[Usage] if (value := getattr(entry, name)) or name == "key"}
            for entry in event.entries  # counts of zero are left out: many rows of many keys
        ]
    return fields


def from_fields(kind: str, fields: Mapping[str, Any]) -> Event:
    """The event that `to_fields` described; an unknown kind, a missing or an unknown field is refused."""
    if kind not in KINDS:
        raise BadRow(f"has the unknown kind {kind!r}")
    cls = KINDS[kind]
    if set(fields) != set(_FIELDS[cls]):
        raise BadRow(f"has the fields {sorted(fields)} where {kind} has {sorted(_FIELDS[cls])}")
    if cls is Stepped:
        try:
            fields = {**fields, "entries": tuple(Usage(**entry) for entry in fields["entries"])}
        except (TypeError, InvalidInput):
            raise BadRow("has an entry that is none") from None
    return cls(**fields)
