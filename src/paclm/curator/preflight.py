"""What may be served: budgets with which a guarantee means something, and worlds that are still the same."""

from __future__ import annotations

import math

from paclm.config import SMALLEST_PER_TOKEN, MechanismConfig, format_budget, in_shell
from paclm.errors import CuratorError, InvalidInput, WorkspaceError
from paclm.privacy.bounds import format_bound, success_bound
from paclm.worlds.layout import SETTINGS_FILE, WORLDS_FILE
from paclm.worlds.registry import ledgers_noted
from paclm.worlds.workspace import Workspace

_LARGEST_TOTAL = 8.0
"""Nats that 63 bits of 2^-60 hold."""


def budgets_of(workspace: Workspace) -> MechanismConfig:
    """The settings to serve under; without budgets, an error that says what to write."""
    if workspace.config is None:
        raise InvalidInput(
            f"{workspace.path / SETTINGS_FILE} sets no budget, and nobody spends privacy by accident. For a target "
            f"of your own: paclm plan --mia 51% --tokens 1M --write {in_shell(workspace.path)}. Or write both under "
            '[mechanism], for example: per_token = "2^-32" and total = "2^-10".'
        )
    check_budgets(workspace.config, workspace.num_worlds)
    return workspace.config


def check_budgets(config: MechanismConfig, num_worlds: int) -> None:
    """Refuse budgets that promise nothing, or that cannot be charged."""
    if math.isinf(config.per_token) or math.isinf(config.total):
        raise InvalidInput(
            "per_token and total must be finite to generate or serve: inf means no noise at all, for studies only. "
            "Change [mechanism] of paclm.toml; `paclm plan` finds values."
        )
    if config.per_token < SMALLEST_PER_TOKEN:  # asked here, not of every row: older ledgers have smaller ones on record
        raise InvalidInput(
            f"per_token must be at least 2^-60 nats, the smallest charge there is, not {config.per_token!r}. Change "
            "[mechanism] of paclm.toml; `paclm plan` finds values."
        )
    largest = min(_LARGEST_TOTAL, math.log(num_worlds))
    if config.total >= largest:
        raise InvalidInput(
            f"total = {format_budget(config.total)} nats promises nothing: {largest:.4g} nats name the realized world "
            f"among {num_worlds}. Lower it in [mechanism] of paclm.toml; `paclm plan` finds a value."
        )


def check_first_token(config: MechanismConfig) -> None:
    """Refuse to commit to a budget that buys nothing. A live one may be lowered so far: that ends private serving."""
    if config.per_token > config.total:
        raise InvalidInput(
            f"Not one token fits: per_token = {format_budget(config.per_token)} is more than "
            f"total = {format_budget(config.total)} nats. Change [mechanism] of paclm.toml; `paclm plan` finds values."
        )


def cautions(committed: float) -> list[str]:
    """What the owner should know about a committed total that is legal and weak; lowering `total` does not undo it."""
    if committed < math.log(2):
        return []
    return [
        f"The committed total, {format_budget(committed)} nats, is at least ln 2 = 0.693: the bound on membership "
        f"attacks is {format_bound(success_bound(committed, 1 / 2))}, so nothing is promised about single records."
    ]


def check_trained_as_set(workspace: Workspace) -> None:
    """Refuse to bind secret and ledger to worlds that were trained otherwise than the settings say by now."""
    if changes := workspace.training_changes():
        raise WorkspaceError(
            f"[training] of {workspace.path / SETTINGS_FILE} was changed after the worlds were trained: {changes}. "
            "Once a token has left, these worlds stay for good. Train them again: "
            f"paclm train {in_shell(workspace.path)} --again; or change the settings back."
        )


def training_cautions(workspace: Workspace) -> list[str]:
    """That [training] no longer says how these worlds were trained. The guarantee does not depend on it."""
    changes = workspace.training_changes()
    if not changes:
        return []
    return [
        f"[training] was changed after the worlds were trained ({changes}), and they are served as they were trained. "
        "Change it back; to train with it, make another workspace: this one's ledger belongs to these worlds."
    ]


def deployment_cautions(workspace: Workspace, ledger: str, tokens: int) -> list[str]:
    """That this workspace had another ledger before, as long as nothing was served under the new one."""
    gone = [note for note in ledgers_noted(workspace.manifest.id) if note.ledger != ledger]
    if tokens or not gone:
        return []
    return [
        f"A ledger for these worlds was made on {gone[-1].made} and is gone from here. If tokens left under it, this "
        "is a second deployment over the same records, with a total of its own. If it was removed by mistake, put it "
        "back before you serve."
    ]


def worlds_digest(workspace: Workspace) -> str:
    """What ledger and secret are bound to: corpus, membership and base model, and the adapters of all worlds."""
    if WORLDS_FILE not in workspace.manifest.adapters:
        command = f"paclm train {in_shell(workspace.path)}"
        raise WorkspaceError(f"{workspace.path} has no trained worlds yet. Train them: {command}")
    return f"{workspace.manifest.digest}-{workspace.manifest.adapters[WORLDS_FILE]['sha256']}"


def check_same_worlds(bound_to: str, digest: str, *, tokens: int, workspace: Workspace) -> None:
    """Refuse worlds that are not those the secret was drawn from."""
    if bound_to == digest:
        return
    same_records = bound_to.split("-")[0] == digest.split("-")[0]
    what = "the adapters were trained again" if same_records else "its records, worlds or base model are others"
    remedy = (
        "Restore what it was, or make a new workspace."
        if tokens
        else f"No token has left yet, so you may start anew: empty {workspace.curator_path}."
    )
    raise CuratorError(
        f"The secret and ledger of {workspace.path} belong to something else: {what}. A belief about other worlds "
        f"protects nobody. {remedy}"
    )
