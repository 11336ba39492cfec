"""Which promise the records are served under: `half` or `corpus`, and both only where the operator accepts it.

Tokens under `half` say nothing false about which half was used once a DP adapter was served too, but they void (ε, δ):
whether a record is in the corpus is then no longer hidden. So each promise is refused where the other one was served,
from this workspace or from another one of this machine over the same records, deleted ones included. With
`mix_promises` both are served, the log keeps that for good, and nothing is promised about the corpus.

Check and record happen under two locks: the ledger's, which a curator holds while it serves `half`, and the one of
this user's notes. Of a `half` and a `corpus` that start at the same time, one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paclm.config import PromiseName
from paclm.curator.sealed import SealedFile
from paclm.errors import LedgerBusy, LedgerError, PromiseConflict
from paclm.ledger.dp_log import DpLog
from paclm.ledger.head_notes import lock_path
from paclm.ledger.lock import WriterLock
from paclm.ledger.verify import is_backup, newest_contents
from paclm.worlds.layout import CURATOR_FOLDER, dp_log_path, ledger_path
from paclm.worlds.registry import (
    find_workspaces,
    is_release_noted,
    is_serving_noted,
    ledgers_noted,
    lock_notes,
    remember_release,
    remember_serving,
    trainings_noted,
)
from paclm.worlds.storage import try_lock
from paclm.worlds.workspace import Workspace

NOTHING_PROMISED = "Nothing is promised about the corpus"
_UNKNOWN = (
    "This machine has no folder for notes, so it is not known whether other workspaces over the same records served "
    "the promise half, or will. Set PACLM_STATE_DIR to a folder that can be written."
)


def refuse_half(workspace: Workspace) -> None:
    """Refuse to serve `half` where `corpus` was served, early and without locks; `claim_half` decides."""
    _accept("half", workspace, _servings_of_corpus(workspace), mix_promises=False)


def claim_half(workspace: Workspace, *, mix_promises: bool = False) -> list[str]:
    """Refuse to serve `half` where `corpus` was served. Called with the ledger's lock held; returns cautions."""
    note_releases(workspace)
    with lock_notes():
        return _accept("half", workspace, _servings_of_corpus(workspace), mix_promises)


def claim_corpus(workspace: Workspace, *, mix_promises: bool = False) -> list[str]:
    """Refuse to serve `corpus` where tokens left under `half`; else record that it is served. Returns cautions."""
    with lock_notes() as has_notes, _ledger_lock(workspace) as is_free:
        found = [] if is_free else [f"{workspace.path} is in use by a process that serves it"]
        found += _curators_elsewhere(workspace)
        cautions = _accept("corpus", workspace, [*found, *_releases_of_half(workspace)], mix_promises)
        DpLog(dp_log_path(workspace.path)).append("served")
        remember_serving(workspace.manifest.id)
    return cautions if has_notes else [*cautions, _UNKNOWN]


def note_releases(workspace: Workspace) -> None:
    """Note on this machine whether tokens left under `half`: an older copy of the ledger would not tell."""
    if _has_released_half(workspace.manifest.id, workspace.path):
        with lock_notes():
            remember_release(workspace.manifest.id)


def is_corpus_promised(workspace: Workspace) -> bool:
    """Whether (ε, δ) holds: promises were never mixed, and no token left under `half`. Reads the files of both."""
    return not DpLog(dp_log_path(workspace.path)).has("mixed") and not _releases_of_half(workspace)


def trainings_elsewhere(workspace: Workspace) -> dict[str, dict[str, Any]]:
    """DP trainings over these records that are not in this workspace's log, by run; those of lost logs included.

    Raises if one of them has another unit of privacy: a group is many records to a training by records, and a record
    changes its group to a training by groups, so the two do not compose.
    """
    log = DpLog(dp_log_path(workspace.path))
    found = {**log.known(), **trainings_noted(workspace.manifest.id)}
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        found |= trainings_noted(other.identifier)
        if not other.is_gone:
            found |= DpLog(dp_log_path(other.path)).known()
    own = log.trainings()
    unit = workspace.manifest.unit_name
    if others := {str(details["unit"]) for details in found.values() if details.get("unit", unit) != unit}:
        raise PromiseConflict(
            f"There was a DP training over these records whose unit is another one: {', '.join(sorted(others))}. Here "
            f"it is: {unit}. Such trainings do not compose. Use the workspace of that training, or make one with "
            "the same --group-by. For a person with k records, a training by records promises only about k times its "
            "ε; nothing better can be promised for these records any more."
        )
    return {run: details for run, details in found.items() if run not in own}


def _accept(promise: PromiseName, workspace: Workspace, found: list[str], mix_promises: bool) -> list[str]:
    """Refuse, or record that the operator accepts both promises; once accepted, always accepted."""
    log = DpLog(dp_log_path(workspace.path))
    mixed = [event for event in log.events() if event["kind"] == "mixed"]
    is_mixed = any(event.get("accepted") != "elsewhere" for event in mixed)
    if mixed and not found:
        found = [f"{log.path} says so"]
    if not found:
        return []
    other = "half" if promise == "corpus" else "corpus"
    reason = f"The promise {other} was served from these records: {'; '.join(found)}"
    if not is_mixed and not mix_promises:
        raise PromiseConflict(
            f"{reason}. Served under both promises, nothing is promised about whether a record is in the corpus. Serve "
            f"the promise {other} only, or accept that with --mix-promises (mix_promises=True); it cannot be undone."
        )
    if not is_mixed:
        log.append("mixed", accepted=promise)
        for sighting in find_workspaces(workspace.sketch, workspace.manifest.id):  # for where they are moved to
            if not sighting.is_gone and (its := DpLog(dp_log_path(sighting.path))).path.exists():
                its.append("mixed", accepted="elsewhere")
    return [f"{NOTHING_PROMISED}: it is served under both promises, half and corpus."]


def _releases_of_half(workspace: Workspace) -> list[str]:
    """Where tokens left, or may have left, under `half`."""
    found = []
    if _has_released_half(workspace.manifest.id, workspace.path):
        found.append(str(workspace.path))
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        is_noted = bool(ledgers_noted(other.identifier))
        if is_noted if other.is_gone else _has_released_half(other.identifier, other.path):
            found.append(str(other))
    return found


def _curators_elsewhere(workspace: Workspace) -> list[str]:
    """Other workspaces over these records whose ledger a process holds: it may release a token at any moment."""
    found = []
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        lock = lock_path(ledger_path(other.path))
        if not other.is_gone and lock.exists():
            with try_lock(lock) as (_, is_free):
                found += [] if is_free else [f"{other.path} is in use by a process that serves it"]
    return found


def _has_released_half(identifier: str, path: Path) -> bool:
    """Whether tokens were noted, or the ledger has some, cannot be read, is a backup, or is missing."""
    if is_release_noted(identifier):
        return True
    noted = {note.ledger for note in ledgers_noted(identifier)}
    if not ledger_path(path).exists():
        return bool(noted) or SealedFile(path / CURATOR_FOLDER).exists()
    try:
        if is_backup(ledger_path(path)):  # older than what left since
            return True
        contents = newest_contents(ledger_path(path))
    except LedgerError:
        return True
    state = contents.state
    return bool(state.tokens or state.spent_units or state.belief_is_lost or noted - {contents.opened.ledger})


def _servings_of_corpus(workspace: Workspace) -> list[str]:
    """Where `corpus` was served."""
    found = []
    if is_serving_noted(workspace.manifest.id) or DpLog(dp_log_path(workspace.path)).has("served"):
        found.append(str(workspace.path))
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        is_in_log = not other.is_gone and DpLog(dp_log_path(other.path)).has("served")
        if is_in_log or is_serving_noted(other.identifier):
            found.append(str(other))
    return found


@contextmanager
def _ledger_lock(workspace: Workspace) -> Iterator[bool]:
    """Keep curators out, unless one is there already."""
    try:
        lock = WriterLock(lock_path(workspace.ledger_path))
    except LedgerBusy:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
