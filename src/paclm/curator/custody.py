"""Opens ledger, secret and belief of a workspace, and holds them for one caller at a time.

ledger   secret file   on opening
no       no            create the ledger, then draw the secret
yes      no            draw a secret if no private token was released yet; refuse otherwise
no       yes           refuse: deleting a ledger must not restore the budget
yes      yes           restore the belief of the last commit, bit for bit
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paclm.config import MechanismConfig
from paclm.curator.master_key import MasterKeys, keys_at_hand, load_keys, settle_own_key
from paclm.curator.preflight import (
    budgets_of,
    check_first_token,
    check_same_worlds,
    check_trained_as_set,
    worlds_digest,
)
from paclm.curator.redacted import Redacted, redact_traceback
from paclm.curator.sealed import SealedFile, Sealing
from paclm.curator.secret import Secret, prior_belief, seal_belief, unseal_belief
from paclm.errors import CuratorError, LedgerWrongKey, UnsoundState
from paclm.ledger.events import Usage
from paclm.ledger.ledger import Ledger
from paclm.privacy.belief import FloatArray
from paclm.worlds.registry import note_place, remember_ledger
from paclm.worlds.workspace import Workspace

WITNESS_VARIABLE = "PACLM_WITNESS"


@dataclass(slots=True)
class Custody:
    """What one process holds while it serves: the ledger with its lock, the secret, the keys and the belief."""

    ledger: Ledger
    secret: Secret
    keys: MasterKeys
    belief: Redacted[FloatArray]
    digest: str
    commit_seconds: float = 0.0
    """Duration of the last commit."""
    _began_from: Redacted[FloatArray] | None = None

    def begin(self) -> Redacted[FloatArray]:
        """The belief that a step starts from; `commit` refuses to replace any other."""
        self._began_from = self.belief
        return self.belief

    def commit(self, entries: Iterable[Usage], belief: Redacted[FloatArray]) -> None:
        """Make charges and belief durable together. A token may leave only after this returns."""
        if self._began_from is not self.belief:
            raise UnsoundState("The belief changed during a step: this commit would overwrite another one's belief.")
        started = time.perf_counter()
        sealed = None if belief is self.belief else seal_belief(belief, self.keys, self.digest)
        self.ledger.commit(entries, sealed)
        self.belief = belief
        self.commit_seconds = time.perf_counter() - started


def named_witness(witness: str | Path | None) -> Path | None:
    """The witness that the caller names, else the one of PACLM_WITNESS."""
    named = witness or os.environ.get(WITNESS_VARIABLE)
    return Path(named) if named else None


def open_custody(workspace: Workspace, witness: Path | None = None) -> Custody:
    """Take the lock and restore ledger, secret and belief; create them on first use."""
    config = budgets_of(workspace)
    digest = worlds_digest(workspace)
    file = SealedFile(workspace.curator_path)
    has_secret = file.exists()  # read first: another process on first use creates the ledger before the secret
    if workspace.ledger_path.exists():
        ledger, keys, retired = open_ledger(workspace, witness)
    elif has_secret:
        raise CuratorError(
            f"{file.path} holds a secret, but its ledger is missing, so what was spent is unknown. Restore "
            "ledger.sqlite from a backup and adopt it, or make a new workspace."
        )
    else:
        check_first_token(config)
        check_trained_as_set(workspace)
        keys, retired = load_keys(workspace.curator_path, may_create=True), []
        ledger = _create_ledger(workspace, config, keys, digest, witness)
        remember_ledger(workspace.manifest.id, ledger.ledger_id)
    try:
        check_same_worlds(ledger.workspace, digest, tokens=ledger.state.tokens, workspace=workspace)
        ledger.change_settings(config)
        secret = _restore_secret(file, ledger, keys, retired, digest)
        settle_own_key(workspace.curator_path, keys)
        note_place(workspace.manifest.id, workspace.path)
        return Custody(ledger, secret, keys, _restore_belief(ledger, keys, retired, digest), digest)
    except BaseException:
        ledger.close()
        raise


def open_ledger(workspace: Workspace, witness: Path | None = None) -> tuple[Ledger, MasterKeys, list[MasterKeys]]:
    """The ledger, the key in force and the retired keys. Does not read the secret."""
    sealings = SealedFile(workspace.curator_path).read()

    def attempt(keys: MasterKeys) -> tuple[Ledger, MasterKeys, list[MasterKeys]]:
        retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
        return _open_ledger(workspace.ledger_path, keys, retired, witness), keys, retired

    current, *following = keys_at_hand(workspace.curator_path)
    try:
        return attempt(current)
    except LedgerWrongKey:
        if not following:
            raise
    return attempt(following[0])


@redact_traceback
def _open_ledger(path: Path, keys: MasterKeys, retired: Sequence[MasterKeys], witness: Path | None) -> Ledger:
    return Ledger.open(path, keys.mac.reveal(), old_keys=[old.mac.reveal() for old in retired], witness=witness)


@redact_traceback
def _create_ledger(
    workspace: Workspace, config: MechanismConfig, keys: MasterKeys, digest: str, witness: Path | None
) -> Ledger:
    return Ledger.create(
        workspace.ledger_path,
        keys.mac.reveal(),
        workspace=digest,
        num_worlds=workspace.num_worlds,
        settings=config,
        sealed_belief=seal_belief(prior_belief(workspace.num_worlds), keys, digest),
        witness=witness,
    )


def _restore_secret(
    file: SealedFile, ledger: Ledger, keys: MasterKeys, retired: list[MasterKeys], digest: str
) -> Secret:
    sealings = file.read()
    if not sealings:
        if ledger.state.tokens or ledger.state.belief_is_lost:
            raise CuratorError(
                f"The ledger has {ledger.state.tokens:,} private tokens, but the sealed secret {file.path} is missing. "
                "A new secret would not match the belief. Restore the file, or make a new workspace."
            )
        secret = Secret.draw(ledger.num_worlds)
    elif keys.id in sealings:
        sealing = sealings[keys.id]
        if sealing.ledger != ledger.ledger_id:
            raise CuratorError(
                f"The secret {file.path} belongs to the ledger {sealing.ledger[:8]}…, and this ledger is "
                f"{ledger.ledger_id[:8]}…. Restore the file that was made with this ledger."
            )
        secret = Secret.unsealed(sealing.secret, keys, digest, ledger.ledger_id, ledger.num_worlds)
    else:
        raise CuratorError(
            f"The secret {file.path} was sealed with the key {', '.join(sealings)}, but the key given is {keys.id}. "
            "Give the key in force, or restore the file that belongs to this key."
        )
    if sealings.keys() != {keys.id}:
        file.write({keys.id: Sealing.make(secret, keys, digest, ledger.ledger_id, retired)})
    return secret


def _restore_belief(ledger: Ledger, keys: MasterKeys, retired: list[MasterKeys], digest: str) -> Redacted[FloatArray]:
    for key in (keys, *reversed(retired)):
        belief = unseal_belief(ledger.sealed_belief, key, digest, ledger.num_worlds)
        if belief is not None:
            if key is not keys:  # a copy from before a rotation, or a rotation that was interrupted
                ledger.reseal(seal_belief(belief, keys, digest))
            return belief
    raise CuratorError(
        "The sealed belief in the ledger cannot be opened with the key in force: it was changed, or belongs to other "
        "worlds. Restore the curator folder from a backup and adopt it."
    )
