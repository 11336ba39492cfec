"""Rotate the master key: reseal secret and belief, sign the ledger with the new key, stay readable throughout.

    1  write the new key to disk (curator/key.new; otherwise the operator has it)
    2  secret.json: the secret under both keys; under the new one also the old key, which the ledger still needs
    3  ledger: row "key-rotated", the resealed belief and secret, in one transaction; the new key is now in force
    4  secret.json: the secret under the new key alone
    5  rename curator/key.new to curator/key

A crash before 3 leaves the old key in force, a crash after it the new one; the next opening finishes the rest.
An adversary with the old key and an old copy of the workspace knows the secret; no rotation undoes that.
"""

from __future__ import annotations

from pathlib import Path

from paclm.curator.custody import named_witness, open_custody
from paclm.curator.master_key import (
    NEW_KEY_FILE,
    MasterKeys,
    keeps_own_key,
    key_variable,
    new_key,
    read_key,
    settle_own_key,
    write_key,
)
from paclm.curator.redacted import Redacted, redact_traceback
from paclm.curator.sealed import SealedFile, Sealing, decode, encode
from paclm.curator.secret import seal_belief
from paclm.errors import CuratorError
from paclm.ledger.ledger import Ledger
from paclm.worlds.workspace import Workspace


def rotate_key(workspace: Workspace, master: Redacted[bytes] | None = None, witness: str | Path | None = None) -> str:
    """Put a new master key in force and return its name. Takes the lock, so the server must be stopped.

    `witness`: as for `Curator.open`, else PACLM_WITNESS.

    A key in curator/key is replaced there, by a fresh one unless `master` is given. A key kept elsewhere must be given
    as `master`; set it in the environment once this has returned.
    """
    if master is None and not keeps_own_key():
        raise CuratorError(
            f"The key comes from {key_variable()}, where paclm cannot write a new one. Make one, "
            "pass it as `master`, and set it there afterwards."
        )
    master = master or new_key()
    new, folder = MasterKeys.derived(master), workspace.curator_path
    custody = open_custody(workspace, named_witness(witness))
    try:
        old, file = custody.keys, SealedFile(folder)
        if new.id == old.id:
            raise CuratorError(f"The new key is already in force ({old.name}). Make another: openssl rand -hex 32")
        if keeps_own_key():
            _keep(folder / NEW_KEY_FILE, master, new.name)
        before = decode(custody.ledger.sealed_secret or b"", f"in {custody.ledger.name}")[old.id]
        retired = [*before.retired_keys(old), old]
        after = Sealing.make(custody.secret, new, custody.digest, custody.ledger.ledger_id, retired)
        file.write({old.id: before, new.id: after})
        _sign_with(custody.ledger, new, seal_belief(custody.belief, new, custody.digest), encode({new.id: after}))
        file.write({new.id: after})
        settle_own_key(folder, new)
    finally:
        custody.ledger.close()
    return new.name


def _keep(path: Path, master: Redacted[bytes], name: str) -> None:
    """Write the new key and read it back: a ledger signed with a key that is not on disk would be lost."""
    write_key(path, master)
    try:
        kept = MasterKeys.derived(read_key(path)).name
        if kept != name:
            raise CuratorError(
                f"{path} was written with the key {name} but reads back as {kept}. The key in force was not changed. "
                "Check the disk, or keep the key elsewhere."
            )
    except CuratorError:
        path.unlink(missing_ok=True)
        raise


@redact_traceback
def _sign_with(ledger: Ledger, keys: MasterKeys, sealed_belief: bytes, sealed_secret: bytes) -> None:
    ledger.rotate_key(keys.mac.reveal(), sealed_belief, sealed_secret)
