"""What the promise `corpus` amounts to now: all DP trainings over these records, composed.

The logs decide, not the card: a later training, here or in another workspace over the same records, weakens what an
earlier adapter promised. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paclm.config import in_shell
from paclm.curator.promises import is_corpus_promised, trainings_elsewhere
from paclm.curator.streams import PromiseFigures
from paclm.errors import LedgerError, WorkspaceError
from paclm.ledger.dp_log import DpLog, mechanism_of
from paclm.privacy.dp import DpGuarantee, guarantee
from paclm.worlds.layout import ADAPTERS_FOLDER, DP_FILE, dp_log_path
from paclm.worlds.manifest import load_manifest
from paclm.worlds.registry import trainings_noted
from paclm.worlds.storage import hash_file
from paclm.worlds.workspace import Workspace


def all_trainings(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Every DP training ever begun over these records, by run: of this workspace, and of others on this machine."""
    return {**trainings_elsewhere(workspace), **DpLog(dp_log_path(workspace.path)).trainings()}


def promise_figures(workspace: Workspace) -> PromiseFigures:
    """What all trainings promise together: as logged with the last adapter, or composed again if that lacks one."""
    log = DpLog(dp_log_path(workspace.path))
    own = list(log.trainings().values())
    if not own:
        raise WorkspaceError(
            f"{workspace.path} has no adapter for the promise corpus. Train it: "
            f"paclm train {in_shell(workspace.path)} --what dp:8"
        )
    trainings = all_trainings(workspace)
    logged = [event for event in log.events() if set(event.get("runs", [])) == set(trainings)]
    if logged:
        composed = DpGuarantee(**logged[-1]["composed"])
    else:
        composed = guarantee([mechanism_of(each) for each in trainings.values()], float(own[-1]["delta"]))
    return PromiseFigures(
        promise="corpus",
        epsilon=composed.epsilon,
        delta=composed.delta,
        unit=workspace.manifest.unit_name,
        mia_bound=composed.mia_bound,
        tpr_at_fpr_0_1_percent=composed.tpr_at_fpr_0_1_percent,
        tpr_at_fpr_1_percent=composed.tpr_at_fpr_1_percent,
        trainings=len(trainings),
        is_promised=is_corpus_promised(workspace),
    )


@dataclass(frozen=True, slots=True)
class DpReport:
    """Whether the log of DP trainings is whole, and the DP adapter one of them."""

    num_events: int
    problem: str | None

    @property
    def intact(self) -> bool:
        return self.problem is None


def verify_dp(folder: Path) -> DpReport:
    """Check the chain of the log, that no noted training is missing from it, and that the adapter is in it."""
    log, file = DpLog(dp_log_path(folder)), folder / ADAPTERS_FOLDER / DP_FILE
    try:
        num_events, trainings, trained = len(log.events()), log.trainings(), log.trained()
    except LedgerError as error:
        return DpReport(0, str(error))
    problem = None
    lost = [run for run in trainings_noted(load_manifest(folder).id) if run not in trainings]
    if lost:
        problem = (
            f"{log.path} lacks {len(lost)} DP trainings that were begun on this machine ({', '.join(lost[:3])}): it "
            "was rolled back or replaced. They count nevertheless. Restore it from a newer backup."
        )
    elif file.exists() and trained.get(hash_file(file)) not in trainings:
        problem = (
            f"{file} was saved by no DP training in {log.path}, so nothing is known about its privacy. Finish a "
            "training that was stopped with --resume, or restore both from one backup."
        )
    return DpReport(num_events, problem)
