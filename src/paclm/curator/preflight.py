"""Checks before serving: budgets that promise something, unchanged worlds, verified models. Knows no secret."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from paclm.config import SMALLEST_PER_TOKEN, MechanismConfig, format_budget, in_shell
from paclm.curator.streams import Tokenizer
from paclm.curator.vote_source import VoteSource
from paclm.errors import CuratorError, EngineError, InvalidInput, WorkspaceError
from paclm.ledger.ledger import Ledger
from paclm.privacy.bounds import format_bound, success_bound
from paclm.worlds.layout import SETTINGS_FILE, WORLDS_FILE
from paclm.worlds.registry import ledgers_noted
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.engine.workers import WorkerGroup

_LARGEST_TOTAL = 8.0
"""Nats that 63 bits of 2^-60 hold."""


def budgets_of(workspace: Workspace) -> MechanismConfig:
    """The settings to serve under. Raises if they set no budget."""
    if workspace.config is None:
        raise InvalidInput(
            f"{workspace.path / SETTINGS_FILE} sets no budget, and there is no default. Choose one for a target: "
            f"paclm plan --mia 51% --tokens 1M --write {in_shell(workspace.path)}. Or set both under [mechanism], "
            'for example: per_token = "2^-32" and total = "2^-10".'
        )
    check_budgets(workspace.config, workspace.num_worlds)
    return workspace.config


def check_budgets(config: MechanismConfig, num_worlds: int) -> None:
    """Refuse budgets that promise nothing or cannot be charged."""
    if math.isinf(config.per_token) or math.isinf(config.total):
        raise InvalidInput(
            "per_token and total must be finite to generate or serve: inf means no noise at all, for studies only. "
            "Change [mechanism] of paclm.toml; `paclm plan` finds values."
        )
    if config.per_token < SMALLEST_PER_TOKEN:  # not checked in rows: older ledgers recorded smaller ones
        raise InvalidInput(
            f"per_token must be at least 2^-60 nats, the smallest charge, not {config.per_token!r}. Change "
            "[mechanism] of paclm.toml; `paclm plan` finds values."
        )
    largest = min(_LARGEST_TOTAL, math.log(num_worlds))
    if config.total >= largest:
        raise InvalidInput(
            f"total = {format_budget(config.total)} nats promises nothing: {largest:.4g} nats identify the realized "
            f"world among {num_worlds}. Lower it in [mechanism] of paclm.toml; `paclm plan` finds a value."
        )


def check_first_token(config: MechanismConfig) -> None:
    """Refuse to commit to a total below one token. Lowering a live total so far is allowed: it ends private serving."""
    if config.per_token > config.total:
        raise InvalidInput(
            f"No token fits: per_token = {format_budget(config.per_token)} is more than "
            f"total = {format_budget(config.total)} nats. Change [mechanism] of paclm.toml; `paclm plan` finds values."
        )


def cautions(committed: float) -> list[str]:
    """Warn about a committed total that is legal but weak; lowering `total` later does not undo it."""
    if committed < math.log(2):
        return []
    return [
        f"The committed total, {format_budget(committed)} nats, is at least ln 2 = 0.693: the bound on membership "
        f"attacks is {format_bound(success_bound(committed, 1 / 2))}, which promises nothing about single records."
    ]


def check_trained_as_set(workspace: Workspace) -> None:
    """Refuse to bind secret and ledger to worlds that were trained with other settings than the current ones."""
    if changes := workspace.training_changes():
        raise WorkspaceError(
            f"[training] of {workspace.path / SETTINGS_FILE} was changed after the worlds were trained: {changes}. "
            "Once a token is released, the worlds cannot be replaced. Train them again: "
            f"paclm train {in_shell(workspace.path)} --again; or change the settings back."
        )


def training_cautions(workspace: Workspace) -> list[str]:
    """Warn that worlds were trained elsewhere, or that [training] is not how they were trained, which is harmless."""
    if imported := workspace.manifest.imported:
        return [
            f"The worlds were trained elsewhere and imported on {imported[:10]}. The guarantee holds if each was "
            "trained on its own records alone and all of them alike: the operator vouched for that, and paclm cannot "
            "check it."
        ]
    changes = workspace.training_changes()
    if not changes:
        return []
    return [
        f"[training] was changed after the worlds were trained ({changes}); they are served as they were trained. "
        "Change it back, or make another workspace to train with it: this ledger belongs to these worlds."
    ]


def deployment_cautions(workspace: Workspace, ledger: str, tokens: int) -> list[str]:
    """Warn that this workspace had another ledger before, as long as nothing was served under the new one."""
    gone = [note for note in ledgers_noted(workspace.manifest.id) if note.ledger != ledger]
    if tokens or not gone:
        return []
    return [
        f"An earlier ledger for these worlds, made on {gone[-1].made}, is missing. If tokens were released under it, "
        "this is a second deployment over the same records, with a total of its own. If it was removed by mistake, "
        "restore it before you serve."
    ]


def worlds_digest(workspace: Workspace) -> str:
    """What ledger and secret are bound to: corpus, membership, base model and the adapters of all worlds."""
    if WORLDS_FILE not in workspace.manifest.adapters:
        command = f"paclm train {in_shell(workspace.path)}"
        raise WorkspaceError(f"{workspace.path} has no trained worlds yet. Train them: {command}")
    return f"{workspace.manifest.digest}-{workspace.manifest.adapters[WORLDS_FILE]['sha256']}"


def check_same_worlds(bound_to: str, digest: str, *, tokens: int, workspace: Workspace) -> None:
    """Refuse worlds that are not those the secret was drawn from."""
    if bound_to == digest:
        return
    same_records = bound_to.split("-")[0] == digest.split("-")[0]
    what = "the adapters were trained again" if same_records else "records, worlds or base model were changed"
    remedy = (
        "Restore the original files, or make a new workspace."
        if tokens
        else f"No token was released yet, so you may start over: delete all but dp.jsonl in {workspace.curator_path}."
    )
    raise CuratorError(
        f"The secret and ledger of {workspace.path} belong to other worlds: {what}. A belief about other worlds "
        f"protects nothing. {remedy}"
    )


def load_engine(workspace: Workspace, workers: WorkerGroup | None = None) -> VoteSource:
    """Load the worlds, right after hashing their files in full, before the ledger is taken; `load_models` compares."""
    from paclm.engine.determinism import check_repeatable
    from paclm.engine.loading import open_engine

    checked = Workspace.open(workspace.path, verify_in_full=True)
    engine = open_engine(checked, budgets_of(checked).support_size, workers=workers)
    check_repeatable(engine)
    return engine


def load_models(
    path: str | Path,
    ledger: Ledger,
    engine: VoteSource | None,
    tokenizer: Tokenizer | None,
    workers: WorkerGroup | None = None,
) -> tuple[VoteSource, Tokenizer]:
    """Load engine and tokenizer right after hashing their files in full; a given engine is only compared. Workers, if
    any, start now, and prove what they hold.

    Called with the ledger's lock held. The worlds must be those that the ledger is bound to.
    """
    from paclm.engine.base_model import base_of, load_tokenizer
    from paclm.engine.determinism import check_repeatable
    from paclm.engine.loading import open_engine

    workspace, config = Workspace.open(path, verify_in_full=True), ledger.settings
    check_same_worlds(ledger.workspace, worlds_digest(workspace), tokens=ledger.state.tokens, workspace=workspace)
    engine = engine or open_engine(workspace, config.support_size, workers=workers)
    found = (engine.num_worlds, engine.support_size)
    if found != (workspace.num_worlds, config.support_size):
        raise EngineError(
            f"The engine has {found[0]} worlds and a support of {found[1]}; the workspace has {workspace.num_worlds} "
            f"and {config.support_size}. Open it with paclm.engine.loading.open_engine."
        )
    check_repeatable(engine)
    return engine, tokenizer or load_tokenizer(base_of(workspace))
