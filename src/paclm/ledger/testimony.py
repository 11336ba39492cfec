"""What a witness elsewhere records of a ledger, signed by the ledger's key: head, totals, settings, sealed belief.

A backup plus the newest testimony lose nothing. Where it is kept is the witness's own matter: a file or a database.
"""

from __future__ import annotations

import hmac
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paclm.errors import LedgerTampered, WitnessMissing
from paclm.ledger.events import Head, LedgerKeys, canonical

NAME_IT = "Name this ledger's own: PACLM_WITNESS=PATH or --witness PATH."
IF_LOST = "if it is lost for good, declare so with paclm ledger replace-witness."


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
    """The same head is written into a file's other slot next, so that no belief under an old seal stays there."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A testimony as it is kept."""

    payload: bytes
    mac: bytes
    testimony: Testimony
    turn: int
    """How many writes came before."""

    @classmethod
    def sign(cls, testimony: Testimony, turn: int, keys: LedgerKeys) -> Signed:
        """Sign a testimony as the write with this number."""
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
                "turn": turn,
            }
        ).encode()
        return cls(payload, keys.mac(testimony.key, payload), testimony, turn)

    @classmethod
    def parse(cls, payload: bytes, mac: bytes, witness: str) -> Signed:
        """Read what a witness holds; the MAC is not checked."""
        try:
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
            return cls(payload, mac, testimony, int(fields["turn"]))
        except (ValueError, KeyError, TypeError):
            raise LedgerTampered(f"The witness {witness} holds a testimony that paclm did not write.") from None

    def has_mac_by(self, keys: LedgerKeys) -> bool:
        """Whether one of these keys, the one that it names, signed it."""
        return hmac.compare_digest(keys.mac(self.testimony.key, self.payload), self.mac)


class Witness(ABC):
    """An open witness. `write` returns when the testimony is durable."""

    has_torn_slot = False
    """As last read: one slot is not whole. After a crash the ledger then has a row more; else it is damage."""

    def __init__(self, name: str, keys: LedgerKeys) -> None:
        self.name = name
        self.keys = keys

    @abstractmethod
    def read(self, ledger: str) -> Testimony:
        """The newest testimony about this ledger; checked."""

    @abstractmethod
    def write(self, testimony: Testimony) -> None:
        """Record a newer head durably; refused where another process wrote the witness since it was read."""

    @abstractmethod
    def write_twice(self, testimony: Testimony) -> None:
        """Record a head so that no belief under an old seal is left to be read."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def check(self, newest: Signed, ledger: str) -> None:
        """Refuse another ledger's testimony, before its MAC is checked, and one that the ledger's key did not sign."""
        if newest.testimony.ledger != ledger:
            raise WitnessMissing(
                f"The witness {self.name} belongs to another ledger ({newest.testimony.ledger[:8]}…; this one is "
                f"{ledger[:8]}…). {NAME_IT}"
            )
        if not newest.has_mac_by(self.keys):
            raise LedgerTampered(f"The witness {self.name} carries a MAC that the ledger's key did not make.")
