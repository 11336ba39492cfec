"""Opens ledger, secret and belief of a workspace, and holds them for one caller at a time.

The secret is drawn by a row of the ledger, which only one process can write; secret.json is a copy.

ledger            secret.json   on opening
none              none          create the ledger, then draw the secret
none              any           refuse: deleting a ledger must not restore the budget
without a secret  none          draw a secret if no private token was released yet; refuse otherwise
without a secret  any           take it into the ledger: the workspace is of an earlier version
with a secret     none          write the copy
with a secret     the same      restore the belief of the last commit, bit for bit
with a secret     another       refuse: belief and charges belong to the ledger's secret
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paclm.config import MechanismConfig, ReleaseName, format_budget, in_toml
from paclm.curator.master_key import MasterKeys, keys_at_hand, load_keys, settle_own_key
from paclm.curator.preflight import (
    budgets_of,
    check_first_token,
    check_same_worlds,
    check_trained_as_set,
    worlds_digest,
)
from paclm.curator.redacted import Redacted, redact_traceback
from paclm.curator.sealed import SealedFile, Sealing, decode, encode
from paclm.curator.secret import Secret, prior_belief, seal_belief, unseal_belief
from paclm.errors import CuratorError, LedgerWrongKey, UnsoundState, WitnessMissing, WorkspaceError
from paclm.ledger.address import Holding, exists, on_one_server, without_password
from paclm.ledger.address import name_of as address_name
from paclm.ledger.events import Extended, Usage
from paclm.ledger.ledger import Ledger
from paclm.ledger.reading import read_row
from paclm.ledger.store import Address
from paclm.ledger.verify import newest_contents, sealed_secret
from paclm.privacy.belief import FloatArray
from paclm.worlds.layout import CURATOR_FOLDER, SETTINGS_FILE
from paclm.worlds.registry import note_place, remember_ledger
from paclm.worlds.settings import ledger_config, write_settings
from paclm.worlds.storage import refuse_if_shared
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
    cautions: Sequence[str] = ()
    """What the operator should know about this opening."""
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


def named_witness(witness: Address | None) -> Address | None:
    """The witness that the caller names, else the one of PACLM_WITNESS."""
    return witness or os.environ.get(WITNESS_VARIABLE) or None


def open_custody(
    workspace: Workspace, witness: Address | None = None, *, take_over: bool = False, release: ReleaseName | None = None
) -> Custody:
    """Take the right to write and restore ledger, secret and belief; create them on first use.

    `release`: instead of the one in [mechanism].
    """
    config = budgets_of(workspace)
    if release is not None:
        config = replace(config, release=release)
    digest = worlds_digest(workspace)
    for own in sorted(workspace.curator_path.iterdir()):
        if own.is_symlink() or own.is_file():
            with suppress(FileNotFoundError):  # the part of a file that another process has just completed
                refuse_if_shared(own)
    file = SealedFile(workspace.curator_path)
    keep_address(workspace.path)
    has_secret = file.exists()  # read first: another process on first use creates the ledger before the secret
    if exists(workspace.ledger_address):
        ledger, keys, retired = open_ledger(workspace, witness, take_over=take_over)
    elif has_secret:
        raise CuratorError(
            f"{file.path} holds a secret, but its ledger is missing, so what was spent is unknown. If the ledger is in "
            "a database, name its address in PACLM_LEDGER or in [ledger] of paclm.toml. Otherwise restore "
            "ledger.sqlite from a backup and adopt it, or make a new workspace."
        )
    else:
        _refuse_other_address(workspace.path)
        check_first_token(config)
        check_trained_as_set(workspace)
        keys, retired = load_keys(workspace.curator_path, may_create=True), []
        ledger = _create_ledger(workspace, config, keys, digest, witness)
    try:
        remember_ledger(workspace.manifest.id, ledger.ledger_id)
        check_same_worlds(ledger.workspace, digest, tokens=ledger.state.tokens, workspace=workspace)
        secret = _restore_secret(file, ledger, keys, retired, digest)
        cautions = [*_lower_total(ledger, config), *_judge_witness(workspace, witness)]
        ledger.change_settings(config)
        settle_own_key(workspace.curator_path, keys)
        note_place(workspace.manifest.id, workspace.path)
        return Custody(ledger, secret, keys, _restore_belief(ledger, keys, retired, digest), digest, cautions)
    except BaseException:
        ledger.close()
        raise


def _judge_witness(workspace: Workspace, witness: Address | None) -> list[str]:
    """Say so where the witness would be rolled back together with the ledger."""
    if not on_one_server(workspace.ledger_address, witness):
        return []
    return [
        "Ledger and witness are databases of one server: a backup of that server that is restored, or a replica that "
        "is promoted, rolls back both, and nothing notices. Keep the witness on another server, or in a file."
    ]


def refuse_new_worlds(workspace: Workspace) -> None:
    """Refuse to replace worlds that a secret was drawn from: a belief about other worlds protects nothing."""
    if exists(workspace.ledger_address) or SealedFile(workspace.curator_path).exists():
        raise WorkspaceError(
            f"{workspace.path} has served tokens, and its secret and ledger are bound to its worlds: new adapters "
            "would make them unusable. For other worlds, make another workspace; budgets over the same records add up."
        )


def keep_address(folder: Path) -> None:
    """Write the ledger's address into paclm.toml, without its password, where only PACLM_LEDGER has it.

    A copy of the workspace made from here on then finds the same ledger, or is refused by it; without the address it
    would make a ledger of its own, with a second secret and a second budget.
    """
    url, kept = ledger_config(folder).url, ledger_config(folder, by_environment=False).url
    if not url or kept or SealedFile(folder / CURATOR_FOLDER).exists():  # with a secret it is refused anyway
        return
    if not (address := without_password(url)):
        return
    try:
        write_settings(folder / SETTINGS_FILE, "ledger", {"url": address})
    except OSError as error:
        raise WorkspaceError(
            f"{folder / SETTINGS_FILE} cannot be written ({error.strerror}). A copy of this workspace without "
            f"PACLM_LEDGER would make a second ledger: write url = {in_toml(address)} into [ledger] there."
        ) from None


def _refuse_other_address(folder: Path) -> None:
    """No new ledger where PACLM_LEDGER leads away from the address in paclm.toml: there may be one already."""
    url, kept = ledger_config(folder).url, ledger_config(folder, by_environment=False).url
    if url and kept and without_password(url) != without_password(kept):
        raise WorkspaceError(
            f"PACLM_LEDGER names a place without a ledger, and url of [ledger] in {folder / SETTINGS_FILE} another "
            "place. A second ledger would have a second budget. Correct one of them; to move a ledger: paclm ledger "
            "move."
        )


def _lower_total(ledger: Ledger, config: MechanismConfig) -> list[str]:
    """Say so where paclm.toml lowers a total that was extended: the file of a standby may be older than that."""
    in_force = read_row(ledger.store, ledger.state.settings_seq)
    if config.total >= ledger.settings.total or in_force.kind != Extended.kind:
        return []
    return [
        f"The total was lowered to {format_budget(config.total)} nats by paclm.toml, from the "
        f"{format_budget(ledger.settings.total)} in force. If that was not meant, this file is older than the last "
        "paclm ledger extend: copy the newest one here, and "
        + ("open it again." if ledger.state.spent_units else "extend again.")
    ]


def holding_of(workspace: Workspace, *, take_over: bool = False) -> Holding:
    """How this workspace takes the right to write its ledger."""
    return Holding(workspace.curator_path, workspace.settings.ledger.stale_seconds, take_over)


def open_ledger(
    workspace: Workspace, witness: Address | None = None, *, take_over: bool = False
) -> tuple[Ledger, MasterKeys, list[MasterKeys]]:
    """The ledger, the key in force and the retired keys. Does not read the secret."""
    address, holding = workspace.ledger_address, holding_of(workspace, take_over=take_over)
    sealings = sealings_of(address, workspace.curator_path)

    def attempt(keys: MasterKeys) -> tuple[Ledger, MasterKeys, list[MasterKeys]]:
        retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
        return _open_ledger(address, keys, retired, witness, holding), keys, retired

    current, *following = keys_at_hand(workspace.curator_path)
    if take_over:  # before a server that works is stopped
        check_fit(workspace, witness, [current, *following])
    try:
        return attempt(current)
    except LedgerWrongKey:
        if not following:
            raise
    return attempt(following[0])


def check_fit(workspace: Workspace, witness: Address | None, keys: Sequence[MasterKeys] = ()) -> None:
    """Refuse to take over, or to wait for, what this host could not serve: another key, other worlds, no witness."""
    address = workspace.ledger_address
    keys = keys or keys_at_hand(workspace.curator_path)
    contents, name = newest_contents(address, folder=workspace.curator_path), address_name(address)
    stored = {} if contents.sealed_secret is None else decode(contents.sealed_secret, f"in {name}")
    if stored and stored.keys().isdisjoint(key.id for key in keys):
        raise LedgerWrongKey(
            f"The ledger in {name} is signed with the key {contents.key}, but the key given is {keys[0].name}. It "
            "was not taken over: give the key in force."
        )
    check_same_worlds(
        contents.opened.workspace, worlds_digest(workspace), tokens=contents.state.tokens, workspace=workspace
    )
    if contents.state.witness is not None and witness is None:
        raise WitnessMissing(
            f"The ledger in {name} has a witness ({contents.state.witness}), and none was named. It was not "
            "taken over: name it with PACLM_WITNESS or --witness."
        )


def sealings_of(address: Address, folder: Path) -> dict[str, Sealing]:
    """The sealings in the ledger and in the copy in this folder, by key id; the ledger's own come first."""
    stored = sealed_secret(address)
    return {**SealedFile(folder).read(), **({} if stored is None else decode(stored, f"in {address_name(address)}"))}


@redact_traceback
def _open_ledger(
    address: Address, keys: MasterKeys, retired: Sequence[MasterKeys], witness: Address | None, holding: Holding
) -> Ledger:
    old = [key.mac.reveal() for key in retired]
    return Ledger.open(address, keys.mac.reveal(), old_keys=old, witness=witness, holding=holding)


@redact_traceback
def _create_ledger(
    workspace: Workspace, config: MechanismConfig, keys: MasterKeys, digest: str, witness: Address | None
) -> Ledger:
    return Ledger.create(
        workspace.ledger_address,
        keys.mac.reveal(),
        workspace=digest,
        num_worlds=workspace.num_worlds,
        settings=config,
        sealed_belief=seal_belief(prior_belief(workspace.num_worlds), keys, digest),
        witness=witness,
        holding=holding_of(workspace),
    )


def _restore_secret(
    file: SealedFile, ledger: Ledger, keys: MasterKeys, retired: list[MasterKeys], digest: str
) -> Secret:
    copies = file.read()
    copy = _unsealed(copies, file.path, ledger, [keys, *retired], digest) if copies else None
    stored = None if ledger.sealed_secret is None else decode(ledger.sealed_secret, f"in {ledger.name}")
    if stored is not None:
        secret = _unsealed(stored, ledger.name, ledger, [keys, *retired], digest)
        if copy is not None and not copy.is_same(secret):
            raise CuratorError(
                f"{file.path} holds another secret than the ledger in {ledger.name}, whose belief and charges belong "
                "to its own: this host may not serve it. Move the file away if this workspace belongs to that ledger."
            )
    elif copy is not None:
        secret = copy
    elif ledger.state.tokens or ledger.state.belief_is_lost:
        raise CuratorError(
            f"The ledger has {ledger.state.tokens:,} private tokens, but the sealed secret {file.path} is missing. "
            "A new secret would not match the belief. Restore the file, or make a new workspace."
        )
    else:
        secret = Secret.draw(ledger.num_worlds)
    sealing = {keys.id: Sealing.make(secret, keys, digest, ledger.ledger_id, retired)}
    if stored is None or stored.keys() != {keys.id}:
        origin = "resealed" if stored is not None else "drawn" if copy is None else "file"
        ledger.seal_secret(encode(sealing), origin)
        stored = sealing
    if copies.keys() != {keys.id}:
        file.write(stored)
    return secret


def _unsealed(
    sealings: Mapping[str, Sealing], where: object, ledger: Ledger, keys: Sequence[MasterKeys], digest: str
) -> Secret:
    """The secret in one of the sealings, by the first key that has one."""
    known = [key for key in keys if key.id in sealings]
    if not known:
        raise CuratorError(
            f"The secret {where} was sealed with another key than the one given, {keys[0].name}. "
            "Give the key in force, or restore the file that belongs to this key."
        )
    sealing = sealings[known[0].id]
    if sealing.ledger != ledger.ledger_id:
        raise CuratorError(
            f"The secret {where} belongs to the ledger {sealing.ledger[:8]}…, and this ledger is "
            f"{ledger.ledger_id[:8]}…. Restore the file that was made with this ledger."
        )
    return Secret.unsealed(sealing.secret, known[0], digest, ledger.ledger_id, ledger.num_worlds)


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
