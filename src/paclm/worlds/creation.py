"""Make a workspace: all or nothing, safe to repeat, never over an existing one.

Everything is written into a hidden folder beside the target, synced, and renamed at the end, so a visible workspace is
complete. The next run deletes what a killed one left behind, except for the lengths of tokenized parts: they are found
again by the hash of their texts, so that the slow part of the work is not repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from paclm.config import TrainingConfig
from paclm.errors import InvalidInput, PaclmError, WorkspaceError
from paclm.worlds import layout, storage
from paclm.worlds.assignment import (
    BoolArray,
    IntArray,
    assign_units,
    check_num_worlds,
    check_seed,
    check_whole,
    default_holdout,
    draw_holdout,
    number_units,
)
from paclm.worlds.blocks import TextEncoder, count_tokens, measure_lengths
from paclm.worlds.canaries import Canary, make_canaries
from paclm.worlds.fingerprints import Base
from paclm.worlds.manifest import FORMAT, Manifest, describe_base, installed_versions
from paclm.worlds.records import Corpus, Record, StartTask, to_line
from paclm.worlds.registry import (
    composition_sentence,
    find_overlaps,
    find_workspaces,
    overlap_sentence,
    remember_workspace,
    sketch_texts,
    trainings_noted,
)
from paclm.worlds.settings import render_settings
from paclm.worlds.student_folder import refuse_student
from paclm.worlds.workspace import PARTS, Workspace

_FEW_UNITS = 64
_LENGTHS_FOLDER = ".lengths"  # of finished parts, until the workspace is complete

_MADE_FROM = (
    *("corpus_digest", "base_fingerprint"),
    *("worlds", "seed", "holdout", "canaries", "group_by", "max_record_tokens"),  # options of init
)


@dataclass(frozen=True, slots=True)
class Created:
    """A workspace, whether this call made it, and cautions for its owner."""

    workspace: Workspace
    is_new: bool
    cautions: tuple[str, ...]


def create_workspace(
    path: str | Path,
    *,
    corpus: Corpus,
    base: Base,
    tokenizer: TextEncoder,
    num_worlds: int = 128,
    seed: int = 101,
    holdout: int | None = None,
    num_canaries: int = 0,
    group_by: str | None = None,
    max_record_tokens: int = TrainingConfig().max_record_tokens,
    start_task: StartTask | None = None,
) -> Created:
    """Make a workspace, or open the existing one if it was made from the same arguments."""
    target = check_place(path)
    units = number_units(corpus.records)
    arguments = {
        "corpus": corpus.name,
        "corpus_digest": corpus.digest,
        "base_fingerprint": base.fingerprint,
        "worlds": check_num_worlds(num_worlds),
        "seed": check_seed(seed),
        "holdout": check_whole("holdout", default_holdout(len(corpus.records)) if holdout is None else holdout, 0),
        "canaries": num_canaries,
        "group_by": group_by,
        "max_record_tokens": max_record_tokens,
        "units": len(np.unique(units)) + num_canaries,
        "split": "hash",
    }
    if (target / layout.MANIFEST_FILE).exists():
        workspace = _reopen(target, arguments, corpus)
        _note_in_registry(workspace, corpus)  # the first init may have been killed before this line
        return Created(workspace, False, ())
    _refuse_occupied(target)
    training = replace(TrainingConfig(), max_record_tokens=max_record_tokens)
    with _building_site(target) as site:
        cautions = _build(site, corpus, units, base, tokenizer, arguments, training, start_task)
        _publish(site, target)
    workspace = Workspace.open(target)
    return Created(workspace, True, (*cautions, *_note_in_registry(workspace, corpus)))


def check_place(path: str | Path) -> Path:
    """The absolute path of a new workspace, not that of a student; valid UTF-8, because manifests and output are."""
    place = Path(path).expanduser().absolute()
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise WorkspaceError(
            f"The name of {storage.in_utf8(place)} is not valid UTF-8. Choose another name for the workspace."
        ) from None
    refuse_student(place)
    return place


def _note_in_registry(workspace: Workspace, corpus: Corpus) -> list[str]:
    """Note this workspace on the machine; returns a caution if others with a ledger share its records."""
    if corpus.is_synthetic:
        return []
    identifier = workspace.manifest.id
    sketch = sketch_texts(record.text for record in corpus.records)
    try:
        remember_workspace(identifier, workspace.path, sketch)
        sightings = find_overlaps(sketch, identifier)
        trained = [other for other in find_workspaces(sketch, identifier) if trainings_noted(other.identifier)]
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return [
            f"This workspace could not be noted on this machine ({error}): a second one over the same records will not "
            "be detected. Set PACLM_STATE_DIR to a folder that can be written."
        ]
    cautions = [overlap_sentence(sightings)] if sightings else []
    return [*cautions, composition_sentence(trained)] if trained else cautions


def _reopen(target: Path, arguments: Mapping[str, Any], corpus: Corpus) -> Workspace:
    """Open the existing workspace if it was made from the same arguments; else raise with what differs."""
    workspace = Workspace.open(target)
    made_from = workspace.manifest.arguments
    differences = [name for name in _MADE_FROM if made_from.get(name) != arguments[name]]
    if not differences:
        return workspace
    if {"corpus_digest", "group_by"} <= set(differences):
        had = _hash_in_any_order(chain(workspace.records("train"), workspace.records("heldout")))
        if had == _hash_in_any_order(corpus.records):
            differences.remove("corpus_digest")  # it covers the groups, which --group-by has changed
    if "corpus_digest" in differences and "holdout" in differences:
        differences.remove("holdout")  # its default follows the number of records
    found = []
    for name in differences:
        if name == "corpus_digest":
            before, now = workspace.manifest.summary["records"], len(corpus.records)
            counts = f"{before:,} then, {now:,} now" if before != now else f"{now:,} then and now, but not the same"
            found.append(f"the records ({counts})")
        elif name == "base_fingerprint":
            found.append(f"the base model (was {workspace.base.name}, {made_from[name][:12]}…)")
        else:
            found.append(f"--{name.replace('_', '-')} (was {made_from[name]}, now {arguments[name]})")
    raise WorkspaceError(
        f"The workspace {target} exists and was made from something else: {'; '.join(found)}. Its worlds and budget "
        "belong to that, so it is left unchanged. Choose another folder."
    )


def _hash_in_any_order(records: Iterable[Record]) -> int:
    """A hash of ids and texts, whatever their order and groups."""
    hashes = (hashlib.sha256(json.dumps([record.id, record.text]).encode()).digest() for record in records)
    return sum(map(int.from_bytes, hashes))


def _refuse_occupied(target: Path) -> None:
    if target == Path.cwd():
        raise WorkspaceError("The current folder itself cannot become a workspace. Name a new folder, such as clinic.")
    if target.exists() and not target.is_dir():
        raise WorkspaceError(f"{target} is a file. Choose another path for the workspace.")
    if target.is_dir() and any(target.iterdir()):
        raise WorkspaceError(f"{target} is not empty and not a workspace. Choose another folder, or empty this one.")


@contextmanager
def _building_site(target: Path) -> Iterator[Path]:
    """A hidden private folder beside the target, locked while in use; of an unfinished one the lengths are kept."""
    prefix = f".{target.name}.init-"
    with ExitStack() as held:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            site = _claim_site(target.parent, prefix, held)
        except OSError as error:
            raise WorkspaceError(f"{target} cannot be made: {error.strerror}: {error.filename}.") from None
        try:
            yield site
        except PaclmError:  # refused, so there is nothing to continue
            shutil.rmtree(site, ignore_errors=True)
            raise
        except OSError as error:
            raise WorkspaceError(f"{target} cannot be made: {error.strerror or error}.") from None
        finally:
            with suppress(OSError):
                _clear(site)


def _claim_site(parent: Path, prefix: str, held: ExitStack) -> Path:
    """Take over the folder of a killed run, or make one; other folders of killed runs are deleted."""
    claimed = None
    for left in sorted(path for path in parent.iterdir() if path.name.startswith(prefix)):
        with suppress(OSError), ExitStack() as own:  # OSError: another process has deleted it
            _, is_abandoned = own.enter_context(storage.try_lock(left))
            if is_abandoned:
                _clear(left)
            if is_abandoned and claimed is None and left.exists():
                claimed = left
                held.enter_context(own.pop_all())
            elif is_abandoned:
                shutil.rmtree(left, ignore_errors=True)
    while claimed is None:
        site = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # before it was locked, another process took it for abandoned
            _, is_mine = held.enter_context(storage.try_lock(site))
            claimed = site if is_mine and site.exists() else None
    claimed.chmod(0o700)
    return claimed


def _clear(site: Path) -> None:
    """Delete what a run left behind, which holds private text, except for the lengths of finished parts."""
    if not any(site.glob(f"{_LENGTHS_FOLDER}/*")):
        shutil.rmtree(site, ignore_errors=True)
        return
    for path in [path for path in site.iterdir() if path.name != _LENGTHS_FOLDER]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _build(
    site: Path,
    corpus: Corpus,
    units: IntArray,
    base: Base,
    tokenizer: TextEncoder,
    arguments: dict[str, Any],
    training: TrainingConfig,
    start_task: StartTask | None,
) -> list[str]:
    """Write all files of the workspace; returns cautions for its owner. Whatever refuses comes before the slow part."""
    records, has_groups = corpus.records, arguments["group_by"] is not None
    num_units = len(np.unique(units))
    _refuse_one_group(num_units, len(records), arguments["group_by"])
    held_out = draw_holdout(records, units, min(1.0, arguments["holdout"] / len(records)), arguments["seed"])
    canaries = make_canaries(arguments["canaries"], tokenizer, arguments["seed"])
    _refuse_ids_of_canaries(corpus, canaries)
    trained, number_of = np.unique(units[~held_out], return_inverse=True)  # a unit is on one side, so the order stays
    number_of = np.concatenate([number_of, len(trained) + np.arange(len(canaries))])
    membership = assign_units(number_of, arguments["worlds"], arguments["seed"])
    cautions = _judge_worlds(membership, len(trained) + len(canaries))

    folder = storage.make_private_folder(site / _LENGTHS_FOLDER)
    advance = start_task("tokenizing", len(records)) if start_task else lambda count: None
    name = json.dumps([base.fingerprint, installed_versions()])
    lengths = measure_lengths((record.text for record in records), tokenizer, folder, name, advance)
    counts = count_tokens(lengths[~held_out], training.max_record_tokens)
    spared = count_tokens(lengths[held_out], training.max_record_tokens) if held_out.any() else None

    for name in (layout.CORPUS_FOLDER, layout.ADAPTERS_FOLDER, layout.CURATOR_FOLDER, layout.STUDY_FOLDER):
        storage.make_private_folder(site / name)
    parts: tuple[Iterable[bytes], ...] = (
        (to_line(record) for record, is_out in zip(records, held_out, strict=True) if not is_out),
        (to_line(records[number]) for number in np.flatnonzero(held_out).tolist()),
        ((json.dumps(asdict(canary), ensure_ascii=False) + "\n").encode() for canary in canaries),
    )
    for part, lines in zip(PARTS, parts, strict=True):
        storage.write_private(site / layout.CORPUS_FOLDER / f"{part}.jsonl", lines)
    storage.write_private_arrays(site / layout.MEMBERSHIP_FILE, membership=membership)
    storage.write_private(site / layout.SETTINGS_FILE, render_settings(training).encode())
    files = [*(f"{layout.CORPUS_FOLDER}/{part}.jsonl" for part in PARTS), layout.MEMBERSHIP_FILE]
    summary = {
        "records": len(records),
        "train": len(records) - int(held_out.sum()),
        "held_out": int(held_out.sum()),
        "canaries": len(canaries),
        "groups": num_units if has_groups else None,
        "groups_in_worlds": len(trained) if has_groups else None,
        "left_out": len(corpus.report.problems),
        "duplicates": len(corpus.report.duplicates),
        "worlds": arguments["worlds"],
        "records_per_world": float(membership.sum(axis=0).mean()),
        **asdict(counts),
        "held_out_cut": spared.num_records_cut if spared else 0,
    }
    if spared:  # they are measured as training would see them, so the cap cuts them too
        summary["num_records_cut"] += spared.num_records_cut
        summary["num_tokens_dropped"] += spared.num_tokens_dropped
    manifest = Manifest(
        format=FORMAT,
        id=uuid.uuid4().hex,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=installed_versions(),
        arguments=arguments,
        summary=summary,
        files={name: storage.hash_file(site / name) for name in files},
        base=describe_base(base),
    )
    manifest.write(site)
    shutil.rmtree(site / _LENGTHS_FOLDER)
    return cautions


def _refuse_one_group(num_groups: int, num_records: int, group_by: str | None) -> None:
    """Refuse --group-by where all records have the same value: worlds are drawn from whole groups."""
    if group_by is None or num_groups != 1:
        return
    raise InvalidInput(
        f"All {num_records:,} records are one group by {group_by}, and worlds are drawn from whole groups. "
        "Leave out --group-by, or use one "
        + ("sub-folder per person." if group_by == "folder" else f"value of {group_by} per person.")
    )


def _refuse_ids_of_canaries(corpus: Corpus, canaries: Sequence[Canary]) -> None:
    """Refuse a record that would be one unit with a planted one."""
    planted = {canary.id for canary in canaries}
    shared = {record.id for record in corpus.records if record.group is None and record.id in planted}
    if shared:
        raise InvalidInput(
            f"A record has the id of a canary, {min(shared)}. Name another field with --id-field, or use --canaries 0."
        )


def _judge_worlds(membership: BoolArray, num_units: int) -> list[str]:
    """Refuse worlds without records; returns a caution where units are few."""
    sizes = membership.sum(axis=0)  # (m,)
    if not sizes.all():
        raise InvalidInput(
            f"{num_units} units of privacy are too few for {sizes.size} worlds: {int((sizes == 0).sum())} of them got "
            "no record. Bring more records, or lower --worlds."
        )
    if num_units < _FEW_UNITS:
        return [
            f"There are only {num_units} units of privacy: each weighs much in its worlds, which will dissent often."
        ]
    return []


def _publish(site: Path, target: Path) -> None:
    """The one step that makes the workspace visible."""
    try:
        os.rename(site, target)
    except OSError as error:
        raise WorkspaceError(
            f"{target} was created by another process meanwhile, or cannot be made: {error.strerror}."
        ) from None
    storage.sync_folder(target.parent)
