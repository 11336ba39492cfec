"""The promise `corpus`: an adapter trained with DP-SGD answers. Ordinary decoding; nothing is charged.

Whatever is done with the adapter is post-processing of its training, so there is no secret, no belief and no ledger of
tokens here, the coins may be chosen by the caller, and log-probabilities may leave. What must be right comes before
the first token: the adapter is the one that the log of DP trainings names, and no token left under `half`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paclm.config import in_shell
from paclm.curator.dp_account import promise_figures
from paclm.curator.plain_decoder import PlainDecoder, check_plain
from paclm.curator.promises import claim_corpus
from paclm.curator.streams import PromiseFigures, Tokenizer
from paclm.curator.vote_source import VoteSource
from paclm.errors import CuratorError, LedgerError, WorkspaceError
from paclm.ledger.dp_log import DpLog
from paclm.privacy.dp import default_delta
from paclm.worlds.layout import DP_FILE, dp_log_path
from paclm.worlds.manifest import verify_adapters, verify_base
from paclm.worlds.workspace import Workspace

if TYPE_CHECKING:  # torch is loaded with the models, not on import
    from paclm.ledger.postgres_hold import Hold


class DpDecoder(PlainDecoder):
    """Streams of the DP adapter. Open it with `DpDecoder.open`, use it as a context manager."""

    def __init__(self, workspace: Workspace, engine: VoteSource, tokenizer: Tokenizer) -> None:
        super().__init__(engine, tokenizer, workspace.settings.voting)
        self._workspace = workspace
        self.figures = promise_figures(workspace)
        """What was promised when it was last asked (`promise_figures`)."""
        self._hold: Hold | None = None

    @classmethod
    def open(
        cls,
        workspace: Workspace | str | Path,
        *,
        mix_promises: bool = False,
        engine: VoteSource | None = None,
        tokenizer: Tokenizer | None = None,
        hold: Hold | None = None,
    ) -> DpDecoder:
        """Check the adapter against the log, load it, and record that `corpus` is served.

        Refuses if tokens left under `half`, unless `mix_promises`: nothing is then promised about the corpus. `engine`:
        one that is loaded already; the caller vouches that it has this adapter. `hold`: of a database in which a server
        keeps API keys and replies; let go at the end. Needs no budget.
        """
        opened = Workspace.open(workspace.path if isinstance(workspace, Workspace) else workspace)
        check_dp_adapter(opened)
        decoder = cls(opened, *load_dp_models(opened, engine, tokenizer))
        epoch = None if hold is None else hold.epoch
        decoder.cautions += claim_corpus(opened, mix_promises=mix_promises, epoch=epoch)  # last: it can serve
        for sentence in decoder.cautions:
            warnings.warn(sentence, stacklevel=2)
        decoder._hold = hold
        return decoder

    @property
    def epoch(self) -> int | None:
        return None if self._hold is None else self._hold.epoch

    def when_lost(self, call: Callable[[LedgerError], None]) -> None:
        """Call this, from another thread and once, if another process takes over."""
        if self._hold is not None:
            self._hold.watch(call)

    def promise_figures(self) -> PromiseFigures:
        """What is promised now. Reads the logs: another training, or tokens under `half`, may have come since."""
        self.figures = promise_figures(self._workspace)
        return self.figures

    def _close(self) -> None:
        """Let go of the database, too."""
        try:
            super()._close()
        finally:
            if self._hold is not None:
                self._hold.release()

    def __repr__(self) -> str:
        return f"<DpDecoder with ε = {self.figures['epsilon']:.4g}, {self.num_active} streams>"


def check_dp_adapter(workspace: Workspace) -> None:
    """Refuse an adapter that is missing, changed, or not the one of a DP training in the log. Quick: no model."""
    entry, log = workspace.manifest.adapters.get(DP_FILE), DpLog(dp_log_path(workspace.path))
    command = f"paclm train {in_shell(workspace.path)} --what"
    if entry is None:
        num_units, missing = workspace.num_units, f"{workspace.path} has no adapter for the promise corpus"
        *_, begun = (None, *log.trainings().values())
        if begun is None:
            raise WorkspaceError(f"{missing}. Train it: {command} dp:8")
        delta = "" if begun["delta"] == default_delta(num_units) else f" --delta {begun['delta']!r}"
        same = f"dp:{begun['epsilon']:g}{delta}"
        if not (workspace.adapters_path / ".training-dp").is_dir():
            raise WorkspaceError(
                f"{missing}: what was trained is gone, and counts. Restore it from a backup, or train another, which "
                f"adds to ε: {command} {same} --again"
            )
        raise WorkspaceError(
            f"{missing}: its training was stopped. To continue it, at no further cost: {command} {same} --resume"
        )
    run = log.trained().get(entry["sha256"])
    if run is None or run not in log.trainings():
        raise CuratorError(
            f"{workspace.adapters_path / DP_FILE} is not in the log of DP trainings, {log.path}, so nothing is known "
            "about its privacy. Restore both from one backup. Training again adds to ε, and counts the earlier "
            f"training only if it is noted on this machine: {command} dp:8 --again"
        )


def load_dp_models(
    workspace: Workspace, engine: VoteSource | None = None, tokenizer: Tokenizer | None = None
) -> tuple[VoteSource, Tokenizer]:
    """Load engine and tokenizer right after hashing base model and DP adapter in full; reads no other adapter."""
    from paclm.engine.adapters import AdapterStack
    from paclm.engine.base_model import base_of, load_tokenizer
    from paclm.engine.loading import open_engine

    manifest, support_size = workspace.manifest, workspace.settings.voting.support_size
    verify_base(manifest, in_full=True)
    verify_adapters(workspace.path, replace(manifest, adapters={DP_FILE: manifest.adapters[DP_FILE]}), in_full=True)
    if engine is None:
        stack = AdapterStack.load(workspace.adapters_path / DP_FILE)
        engine = open_engine(workspace, support_size, stack=stack.as_public())
    check_plain(engine, support_size)
    return engine, tokenizer or load_tokenizer(base_of(workspace))
