"""The adapters these methods may run on: disjoint shards only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paclm.config import TrainingConfig
from paclm.errors import InvalidInput
from paclm.privacy.belief import BoolArray
from paclm.worlds.layout import adapters_file

if TYPE_CHECKING:
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.training_refinements import Refinements
    from paclm.study.lab import Lab
    from paclm.worlds.workspace import Workspace


def check_disjoint(membership: BoolArray, what: str = "these adapters") -> BoolArray:
    """Return the membership (records, shards) if every record is in exactly one shard; refuse it otherwise.

    One record then moves one shard model, which is all that these accountants count. On worlds it moves half of them.
    """
    shared = np.asarray(membership).sum(axis=1)
    if membership.ndim != 2 or membership.shape[1] < 2 or (shared != 1).any():
        most = int(shared.max()) if shared.size else 0
        raise InvalidInput(
            f"A record of {what} is in {most} of {membership.shape[-1]} parts. PMixED, InvisibleInk, AdaPMixED, SubMix "
            "and GNMax account for one record moving one model, and are void otherwise: train disjoint shards with "
            "`paclm train WORKSPACE --what shards:N`, never use worlds."
        )
    return membership


def load_shards(workspace: Workspace, num_shards: int) -> AdapterStack:
    """The adapters of a workspace's disjoint shards, after checking that they are disjoint."""
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.training_job import membership_of

    name = f"shards-{num_shards}"
    path = workspace.adapters_path / adapters_file(name)
    if not path.is_file():
        raise InvalidInput(f"There is no {path.name}. Train it first: paclm train WORKSPACE --what shards:{num_shards}")
    with np.load(workspace.adapters_path / f"{name}.npz", allow_pickle=False) as archive:
        membership = check_disjoint(archive["membership"], name)
    if not np.array_equal(membership, membership_of(workspace, f"shards:{num_shards}")):
        raise InvalidInput(f"{name}.npz is not the division that this workspace's seed gives. Train the shards again.")
    stack = AdapterStack.load(path)
    if stack.num_worlds != num_shards:
        raise InvalidInput(f"{path.name} holds {stack.num_worlds} adapters, not {num_shards}. Train the shards again.")
    return stack


def ensure_shards(
    lab: Lab, num_shards: int, training: TrainingConfig, refinements: Refinements | None = None
) -> AdapterStack:
    """The shard models of a workspace, trained with these settings if there are none yet."""
    from paclm.engine.training_job import prepare_training

    if adapters_file(f"shards-{num_shards}") not in lab.workspace.manifest.adapters:
        lab.release_engine()
        own = lab.workspace.settings
        job = prepare_training(replace(lab.workspace, settings=replace(own, training=training)), f"shards:{num_shards}")
        lab.workspace = replace(lab.run_job(replace(job, refinements=refinements)), settings=own)
    return load_shards(lab.workspace, num_shards)


def authors_refinements(lab: Lab, training: TrainingConfig, positions: int) -> Refinements:
    """Dropout, warm-up and decay as PMixED's authors have them, and the best epoch by a validation on public text.

    Without public text the last epoch is kept: held-out records are scored, so they may choose nothing.
    """
    from paclm.engine.training_order import make_blocks
    from paclm.engine.training_refinements import Refinements

    texts = [passage.tokens for passage in lab.public_passages(positions)]
    validation = make_blocks(texts, lab.window, training.max_record_tokens) if texts else None
    return Refinements(dropout=0.1, warmup_steps=500, decays=True, validation=validation)
