"""The secret and the retired keys, sealed under the key in force: in the ledger, and as a copy in curator/secret.json.

The ledger decides: a host whose copy holds another secret is refused. The copy shows that a secret was drawn where the
ledger is gone, and opens a backup from before a key rotation. During a rotation it holds two sealings of the same
secret, one under each key, so that it stays readable whenever a crash happens.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paclm.curator.master_key import PACKED_SIZE, MasterKeys
from paclm.curator.redacted import Redacted
from paclm.curator.secret import FORMAT, Secret
from paclm.errors import CuratorError
from paclm.worlds.storage import refuse_if_shared, write_private

SECRET_FILE = "secret.json"
_RETIRED = b"paclm retired keys 1"


@dataclass(frozen=True, slots=True)
class Sealing:
    """The secret and the retired keys, under one key."""

    secret: bytes
    retired: bytes
    ledger: str
    """The id of the ledger, in clear for error messages; the seal binds the same id."""

    @classmethod
    def make(
        cls, secret: Secret, keys: MasterKeys, digest: str, ledger: str, retired: Sequence[MasterKeys] = ()
    ) -> Sealing:
        """Seal secret and retired keys under these keys."""
        packed = Redacted(b"".join(old.packed().reveal() for old in retired))
        return cls(secret.sealed(keys, digest, ledger), keys.seal(packed.reveal(), _RETIRED), ledger)

    def retired_keys(self, keys: MasterKeys) -> list[MasterKeys]:
        """The retired keys, newest last."""
        packed = keys.unseal(self.retired, _RETIRED)
        if packed is None or len(packed.reveal()) % PACKED_SIZE:
            raise CuratorError(
                "The retired keys beside the sealed secret cannot be opened: the file was changed. Restore it from a "
                "backup."
            )
        count = len(packed.reveal()) // PACKED_SIZE
        parts = (Redacted(packed.reveal()[i * PACKED_SIZE : (i + 1) * PACKED_SIZE]) for i in range(count))
        return [MasterKeys.unpacked(part) for part in parts]


class SealedFile:
    """The file, by key id: one sealing, or two during a key rotation."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SECRET_FILE

    def exists(self) -> bool:
        """Whether a secret was drawn. A link counts, also one that leads nowhere: `read` refuses it."""
        return os.path.lexists(self.path)

    def write(self, sealings: Mapping[str, Sealing]) -> None:
        """Write durably and atomically."""
        write_private(self.path, encode(sealings))

    def read(self) -> dict[str, Sealing]:
        """The sealings by key id; empty if there is no file."""
        if not self.exists():
            return {}
        refuse_if_shared(self.path)
        try:
            content = self.path.read_bytes()
        except OSError:
            content = b""
        return decode(content, str(self.path))


def encode(sealings: Mapping[str, Sealing]) -> bytes:
    """Sealings by key id, as stored."""
    encoded = {
        name: {"ledger": s.ledger, "secret": _text(s.secret), "retired": _text(s.retired)}
        for name, s in sealings.items()
    }
    return (json.dumps({"format": FORMAT, "sealings": encoded}, indent=2) + "\n").encode()


def decode(content: bytes, where: str) -> dict[str, Sealing]:
    """The sealings by key id that `encode` wrote."""
    try:
        values: Any = json.loads(content)
        if values["format"] != FORMAT:
            raise ValueError
        return {
            str(name): Sealing(_bytes(parts["secret"]), _bytes(parts["retired"]), str(parts["ledger"]))
            for name, parts in values["sealings"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CuratorError(
            f"The sealed secret {where} cannot be read. Restore it from a backup; without it nothing can be served."
        ) from None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
