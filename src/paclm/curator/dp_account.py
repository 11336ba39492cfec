"""What the promise `corpus` amounts to now: all DP trainings over these records, composed.

Computed from the logs each time, never from a card: a later training, here or in another workspace over the same
records, weakens what an earlier adapter promised. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paclm.config import in_shell
from paclm.curator.promises import is_corpus_promised, trainings_elsewhere
from paclm.errors import WorkspaceError
from paclm.ledger.dp_log import DpLog, mechanism_of
from paclm.privacy.dp import DpGuarantee, DpMechanism, guarantee
from paclm.worlds.layout import dp_log_path
from paclm.worlds.manifest import Manifest
from paclm.worlds.workspace import Workspace


def unit_name(manifest: Manifest) -> str:
    """The unit whose presence is hidden."""
    group_by = manifest.arguments.get("group_by")
    return "record" if group_by is None else f"all records of one {group_by}"


def all_trainings(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Every DP training ever begun over these records, by run: of this workspace, and of others on this machine."""
    return {**trainings_elsewhere(workspace), **DpLog(dp_log_path(workspace.path)).trainings()}


def composed_guarantee(workspace: Workspace, delta: float, *more: DpMechanism) -> DpGuarantee:
    """What all trainings so far promise together, and these `more`."""
    return guarantee([*map(mechanism_of, all_trainings(workspace).values()), *more], delta)


def promise_figures(workspace: Workspace) -> dict[str, Any]:
    """The figures of the promise `corpus`, for every place that shows them."""
    own = list(DpLog(dp_log_path(workspace.path)).trainings().values())
    if not own:
        raise WorkspaceError(
            f"{workspace.path} has no adapter for the promise corpus. Train it: "
            f"paclm train {in_shell(workspace.path)} --what dp:8"
        )
    found = composed_guarantee(workspace, float(own[-1]["delta"]))
    return {
        "promise": "corpus",
        **asdict(found),
        "unit": unit_name(workspace.manifest),
        "trainings": len(all_trainings(workspace)),
        "is_promised": is_corpus_promised(workspace),
    }
