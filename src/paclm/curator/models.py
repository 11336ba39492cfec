"""The models that a curator serves: those that its ledger is about, hashed in full before they are loaded.

Called with the lock held. Knows nothing of the secret.
"""

from __future__ import annotations

from pathlib import Path

from paclm.curator.custody import Custody
from paclm.curator.preflight import check_same_worlds, worlds_digest
from paclm.curator.text import Tokenizer
from paclm.curator.vote_source import VoteSource
from paclm.errors import EngineError
from paclm.worlds.workspace import Workspace


def load_models(
    path: str | Path, custody: Custody, engine: VoteSource | None, tokenizer: Tokenizer | None
) -> tuple[VoteSource, Tokenizer]:
    """Engine and tokenizer, loaded right after their files were hashed; an engine that is given is only compared."""
    from paclm.engine.base import base_of, load_tokenizer
    from paclm.engine.determinism import check_repeatable
    from paclm.engine.loading import open_engine

    workspace, config = _verified(path, custody), custody.ledger.settings
    engine = engine or open_engine(workspace, config.support_size)
    found = (engine.num_worlds, engine.support_size)
    if found != (workspace.num_worlds, config.support_size):
        raise EngineError(
            f"The engine has {found[0]} worlds and a support of {found[1]}; the workspace has {workspace.num_worlds} "
            f"and {config.support_size}. Open it with paclm.engine.loading.open_engine."
        )
    check_repeatable(engine)
    return engine, tokenizer or load_tokenizer(base_of(workspace))


def _verified(path: str | Path, custody: Custody) -> Workspace:
    """The workspace as it is now, hashed in full; it must be the one that the ledger is about."""
    workspace = Workspace.open(path, verify_in_full=True)
    tokens = custody.ledger.state.tokens
    check_same_worlds(custody.digest, worlds_digest(workspace), tokens=tokens, workspace=workspace)
    return workspace
