"""What the promise `corpus` amounts to now: all DP trainings over these records, composed.

The logs decide, not the card: a later training, here or in another workspace over the same records, weakens what an
earlier adapter promised. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paclm.config import in_shell
from paclm.curator.promises import is_corpus_promised, trainings_elsewhere
from paclm.errors import LedgerError, WorkspaceError
from paclm.ledger.dp_log import DpLog, mechanism_of
from paclm.privacy.dp import guarantee
from paclm.worlds.layout import ADAPTERS_FOLDER, DP_FILE, dp_log_path
from paclm.worlds.manifest import Manifest, load_manifest
from paclm.worlds.registry import trainings_noted
from paclm.worlds.storage import hash_file
from paclm.worlds.workspace import Workspace


def unit_name(manifest: Manifest) -> str:
    """The unit whose presence is hidden."""
    group_by = manifest.arguments.get("group_by")
    return "record" if group_by is None else f"all records of one {group_by}"


def all_trainings(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Every DP training ever begun over these records, by run: of this workspace, and of others on this machine."""
    return {**trainings_elsewhere(workspace), **DpLog(dp_log_path(workspace.path)).trainings()}


def promise_figures(workspace: Workspace) -> dict[str, Any]:
    """The figures of the promise `corpus`, composed again only if the card of the adapter lacks a training."""
    own = list(DpLog(dp_log_path(workspace.path)).trainings().values())
    if not own:
        raise WorkspaceError(
            f"{workspace.path} has no adapter for the promise corpus. Train it: "
            f"paclm train {in_shell(workspace.path)} --what dp:8"
        )
    trainings = all_trainings(workspace)
    card = workspace.manifest.adapters.get(DP_FILE, {}).get("dp", {})
    if set(card.get("runs", [])) == set(trainings):
        found = card["composed"]
    else:
        found = asdict(guarantee([mechanism_of(each) for each in trainings.values()], float(own[-1]["delta"])))
    return {
        "promise": "corpus",
        **found,
        "unit": unit_name(workspace.manifest),
        "trainings": len(trainings),
        "is_promised": is_corpus_promised(workspace),
    }


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
