"""Which promise the records are served under: `half` or `corpus`, and both only where the operator accepts it.

Tokens under `half` say nothing false about which half was used once a DP adapter was served too, but they void (ε, δ):
whether a record is in the corpus is then no longer hidden. So each promise is refused where the other one was served,
from this workspace or from another one of this machine over the same records, deleted ones included. With
`mix_promises` both are served, the log keeps that for good, and nothing is promised about the corpus.

Check and record happen under two locks: the ledger's, which a curator holds while it serves `half`, and the one of
this user's notes. Of a `half` and a `corpus` that start at the same time, one is refused. A ledger in a database also
records what was served, for other hosts with a copy of this workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paclm.config import PromiseName
from paclm.curator.custody import holding_of
from paclm.curator.sealed import SealedFile
from paclm.errors import LedgerBusy, LedgerHeld, PaclmError, PromiseConflict
from paclm.ledger.address import carry_promises, exists, name_of, promises_in, record_promise, refuse_if_held, take_hold
from paclm.ledger.dp_log import DpEventKind, DpLog
from paclm.ledger.head_notes import lock_path
from paclm.ledger.lock import WriterLock
from paclm.ledger.store import Address
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
from paclm.worlds.settings import ledger_config
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


def claim_half(workspace: Workspace, *, mix_promises: bool = False, epoch: int | None = None) -> list[str]:
    """Refuse to serve `half` where `corpus` was served. Called with the ledger's lock or epoch held; returns cautions.

    `epoch`: of a ledger in a database.
    """
    note_releases(workspace)
    with lock_notes():
        return _accept("half", workspace, _servings_of_corpus(workspace), mix_promises, epoch)


def claim_corpus(workspace: Workspace, *, mix_promises: bool = False, epoch: int | None = None) -> list[str]:
    """Refuse to serve `corpus` where tokens left under `half`; else record that it is served. Returns cautions.

    `epoch`: what the caller holds of a ledger in a database; without it, it is taken for as long as this runs.
    """
    with lock_notes() as has_notes, _ledger_held(workspace, epoch) as (is_free, held):
        found = [] if is_free else [f"{workspace.path} is in use by a process that serves it"]
        found += _curators_elsewhere(workspace)
        cautions = _accept("corpus", workspace, [*found, *_releases_of_half(workspace)], mix_promises, held)
        record_promise(workspace.ledger_address, "served", held)
        DpLog(dp_log_path(workspace.path)).append("served")
        remember_serving(workspace.manifest.id)
    return cautions if has_notes else [*cautions, _UNKNOWN]


def note_releases(workspace: Workspace) -> None:
    """Note on this machine whether tokens left under `half`: an older copy of the ledger would not tell."""
    if _has_released_half(workspace.manifest.id, workspace.path, workspace.ledger_address):
        with lock_notes():
            remember_release(workspace.manifest.id)


def is_corpus_promised(workspace: Workspace) -> bool:
    """Whether (ε, δ) holds: promises were never mixed, and no token left under `half`. Reads the files of both."""
    is_mixed = DpLog(dp_log_path(workspace.path)).has("mixed") or bool(_releases_of_half(workspace))
    return not is_mixed and "mixed" not in promises_in(workspace.ledger_address)


def move_promises(folder: Path, source: Address, target: Address) -> None:
    """Know at the target of a move, or beside a backup, what is on record at its source: the log then has it all."""
    log, on_record = DpLog(dp_log_path(folder)), promises_in(source)
    kinds: tuple[DpEventKind, ...] = ("served", "mixed")
    for kind in kinds:
        if kind in on_record and not _is_logged(log, kind):
            log.append(kind)
    carry_promises(target, [kind for kind in kinds if _is_logged(log, kind)])


def _is_logged(log: DpLog, kind: DpEventKind) -> bool:
    """Whether it happened in this workspace: that it was mixed with another's does not accept anything here."""
    return any(event["kind"] == kind and event.get("accepted") != "elsewhere" for event in log.events())


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


def _accept(
    promise: PromiseName, workspace: Workspace, found: list[str], mix_promises: bool, epoch: int | None = None
) -> list[str]:
    """Refuse, or record that the operator accepts both promises; once accepted, always accepted."""
    log = DpLog(dp_log_path(workspace.path))
    is_mixed = _is_logged(log, "mixed")
    if log.has("mixed") and not found:
        found = [f"{log.path} says so"]
    if "mixed" in promises_in(workspace.ledger_address):
        is_mixed, found = True, found or [f"{name_of(workspace.ledger_address)} says so"]
    if not found:
        return []
    other = "half" if promise == "corpus" else "corpus"
    reason = f"The promise {other} was served from these records: {'; '.join(found)}"
    if not is_mixed and not mix_promises:
        raise PromiseConflict(
            f"{reason}. Served under both promises, nothing is promised about whether a record is in the corpus. Serve "
            f"the promise {other} only, or accept that with --mix-promises (mix_promises=True); it cannot be undone."
        )
    record_promise(workspace.ledger_address, "mixed", epoch)
    if not _is_logged(log, "mixed"):
        log.append("mixed", accepted=promise)
        for sighting in find_workspaces(workspace.sketch, workspace.manifest.id):  # for where they are moved to
            if not sighting.is_gone and (its := DpLog(dp_log_path(sighting.path))).path.exists():
                its.append("mixed", accepted="elsewhere")
    return [f"{NOTHING_PROMISED}: it is served under both promises, half and corpus."]


def _releases_of_half(workspace: Workspace) -> list[str]:
    """Where tokens left, or may have left, under `half`."""
    found = []
    if _has_released_half(workspace.manifest.id, workspace.path, workspace.ledger_address):
        found.append(str(workspace.path))
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        is_noted = bool(ledgers_noted(other.identifier))
        if is_noted if other.is_gone else _has_released_half(other.identifier, other.path, _address_of(other.path)):
            found.append(str(other))
    return found


def _curators_elsewhere(workspace: Workspace) -> list[str]:
    """Other workspaces over these records whose ledger a process holds: it may release a token at any moment."""
    others = find_workspaces(workspace.sketch, workspace.manifest.id)
    return [
        f"{other.path} is in use by a process that serves it"
        for other in others
        if not other.is_gone and _is_in_use(other.path)
    ]


def _is_in_use(path: Path) -> bool:
    """Whether a process may serve `half` there. A database that cannot be asked counts as released anyway."""
    address, lock = _address_of(path), lock_path(ledger_path(path))
    try:
        if "served" not in promises_in(address):  # its holder may serve `corpus`, too
            refuse_if_held(address, ledger_config(path, by_environment=False).stale_seconds)
    except LedgerHeld:
        return True
    except PaclmError:
        return False
    if not lock.exists():
        return False
    with try_lock(lock) as (_, is_free):
        return not is_free


def _address_of(path: Path) -> Address:
    """Where another workspace keeps its ledger, by its own settings; PACLM_LEDGER names this one's."""
    try:
        return ledger_config(path, by_environment=False).url or ledger_path(path)
    except PaclmError:
        return ledger_path(path)


def _has_released_half(identifier: str, path: Path, address: Address) -> bool:
    """Whether tokens were noted, or the ledger has some, cannot be read, is a backup, or is missing."""
    if is_release_noted(identifier):
        return True
    noted = {note.ledger for note in ledgers_noted(identifier)}
    try:
        if not exists(address):
            return bool(noted) or SealedFile(path / CURATOR_FOLDER).exists()
        if is_backup(address):  # older than what left since
            return True
        contents = newest_contents(address, path / CURATOR_FOLDER)
    except PaclmError:
        return True
    state = contents.state
    return bool(state.tokens or state.spent_units or state.belief_is_lost or noted - {contents.opened.ledger})


def _servings_of_corpus(workspace: Workspace) -> list[str]:
    """Where `corpus` was served, or may have been: where a database cannot be asked."""
    found = []
    if (
        is_serving_noted(workspace.manifest.id)
        or DpLog(dp_log_path(workspace.path)).has("served")
        or "served" in promises_in(workspace.ledger_address)
    ):
        found.append(str(workspace.path))
    for other in find_workspaces(workspace.sketch, workspace.manifest.id):
        is_in_log = not other.is_gone and DpLog(dp_log_path(other.path)).has("served")
        if is_in_log or is_serving_noted(other.identifier):
            found.append(str(other))
        elif not other.is_gone:
            try:
                found += [str(other)] if "served" in promises_in(_address_of(other.path)) else []
            except PaclmError:
                found.append(f"{other}, whose ledger cannot be asked now")
    return found


@contextmanager
def _ledger_held(workspace: Workspace, epoch: int | None) -> Iterator[tuple[bool, int | None]]:
    """Keep curators out, unless one is there already; of a ledger in a database yields the epoch, too."""
    hold = take_hold(workspace.ledger_address, holding_of(workspace)) if epoch is None else None
    if hold is not None or epoch is not None:
        try:
            yield True, epoch if hold is None else hold.epoch
        finally:
            if hold is not None:
                hold.release()
        return
    try:
        lock = WriterLock(lock_path(workspace.ledger_path))
    except LedgerBusy:
        yield False, None
        return
    try:
        yield True, None
    finally:
        lock.release()
