"""Make a workspace: all or nothing, safe to repeat, never over an existing one.

Everything is written into a hidden folder beside the target, synced, and renamed at the end, so a visible workspace is
complete. The next run deletes what a killed one left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paclm.config import TrainingConfig
from paclm.errors import InvalidInput, WorkspaceError
from paclm.worlds import layout, storage
from paclm.worlds.assignment import (
    BoolArray,
    assign_groups,
    check_num_worlds,
    check_seed,
    check_whole,
    default_holdout,
    split_holdout,
    units_of,
)
from paclm.worlds.blocks import TextEncoder, count_tokens
from paclm.worlds.canaries import Canary, make_canaries
from paclm.worlds.fingerprints import Base
from paclm.worlds.manifest import FORMAT, Manifest, describe_base, installed_versions
from paclm.worlds.records import Corpus
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
from paclm.worlds.workspace import PARTS, Workspace

_FEW_UNITS = 64

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
) -> Created:
    """Make a workspace, or open the existing one if it was made from the same arguments."""
    target = check_place(path)
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
        "units": len(set(units_of(corpus.records))) + num_canaries,
        "split": "hash",
    }
    if (target / layout.MANIFEST_FILE).exists():
        workspace = _reopen(target, arguments, corpus)
        _note_in_registry(workspace, corpus)  # the first init may have been killed before this line
        return Created(workspace, False, ())
    _refuse_occupied(target)
    training = replace(TrainingConfig(), max_record_tokens=max_record_tokens)
    with _building_site(target) as site:
        cautions = _build(site, corpus, base, tokenizer, arguments, training)
        _publish(site, target)
    workspace = Workspace.open(target)
    return Created(workspace, True, (*cautions, *_note_in_registry(workspace, corpus)))


def check_place(path: str | Path) -> Path:
    """The absolute path of a new workspace; it must be valid UTF-8, because manifests and output are."""
    place = Path(path).expanduser().absolute()
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise WorkspaceError(
            f"The name of {storage.in_utf8(place)} is not valid UTF-8. Choose another name for the workspace."
        ) from None
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
        had = Counter((record.id, record.text) for part in ("train", "heldout") for record in workspace.records(part))
        if had == Counter((record.id, record.text) for record in corpus.records):
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


def _refuse_occupied(target: Path) -> None:
    if target == Path.cwd():
        raise WorkspaceError("The current folder itself cannot become a workspace. Name a new folder, such as clinic.")
    if target.exists() and not target.is_dir():
        raise WorkspaceError(f"{target} is a file. Choose another path for the workspace.")
    if target.is_dir() and any(target.iterdir()):
        raise WorkspaceError(f"{target} is not empty and not a workspace. Choose another folder, or empty this one.")


@contextmanager
def _building_site(target: Path) -> Iterator[Path]:
    """A hidden private folder beside the target, locked while in use and deleted afterwards unless renamed."""
    prefix = f".{target.name}.init-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(target.parent, prefix)
        site = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise WorkspaceError(f"{target} cannot be made: {error.strerror}: {error.filename}.") from None
    site.chmod(0o700)
    try:
        with storage.try_lock(site):  # so that `_clear_abandoned` of another process leaves it
            yield site
    except OSError as error:
        raise WorkspaceError(f"{target} cannot be made: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(site, ignore_errors=True)


def _clear_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders of killed runs: they hold private text."""
    for site in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError), storage.try_lock(site) as (_, is_abandoned):  # OSError: another process has deleted it
            if is_abandoned:
                shutil.rmtree(site, ignore_errors=True)


def _build(
    site: Path, corpus: Corpus, base: Base, tokenizer: TextEncoder, arguments: dict[str, Any], training: TrainingConfig
) -> list[str]:
    """Write all files of the workspace; returns cautions for its owner."""
    _refuse_one_group(corpus, arguments["group_by"])
    rate = min(1.0, arguments["holdout"] / len(corpus.records))
    train, held_out = split_holdout(corpus.records, rate, arguments["seed"])
    canaries = make_canaries(arguments["canaries"], tokenizer, arguments["seed"])
    _refuse_ids_of_canaries(corpus, canaries)
    units = units_of([*train, *(canary.record for canary in canaries)])
    membership = assign_groups(units, arguments["worlds"], arguments["seed"])
    counts = count_tokens(train, tokenizer, training.max_record_tokens)
    spared = count_tokens(held_out, tokenizer, training.max_record_tokens) if held_out else None
    cautions = _judge_worlds(membership, len(set(units)))

    for folder in (layout.CORPUS_FOLDER, layout.ADAPTERS_FOLDER, layout.CURATOR_FOLDER, layout.STUDY_FOLDER):
        storage.make_private_folder(site / folder)
    parts: tuple[Sequence[Any], ...] = (train, held_out, canaries)
    for name, part in zip(PARTS, parts, strict=True):
        lines = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in part)
        storage.write_private(site / layout.CORPUS_FOLDER / f"{name}.jsonl", lines.encode())
    storage.write_private_arrays(site / layout.MEMBERSHIP_FILE, membership=membership)
    storage.write_private(site / layout.SETTINGS_FILE, render_settings(training).encode())
    files = [*(f"{layout.CORPUS_FOLDER}/{part}.jsonl" for part in PARTS), layout.MEMBERSHIP_FILE]
    summary = {
        "records": len(corpus.records),
        "train": len(train),
        "held_out": len(held_out),
        "canaries": len(canaries),
        "groups": len({record.group for record in corpus.records}) if arguments["group_by"] else None,
        "groups_in_worlds": len({record.group for record in train}) if arguments["group_by"] else None,
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
    return cautions


def _refuse_one_group(corpus: Corpus, group_by: str | None) -> None:
    """Refuse --group-by where all records have the same value: worlds are drawn from whole groups."""
    if group_by is None or len({record.group for record in corpus.records}) != 1:
        return
    raise InvalidInput(
        f"All {len(corpus.records):,} records are one group by {group_by}, and worlds are drawn from whole groups. "
        "Leave out --group-by, or use one "
        + ("sub-folder per person." if group_by == "folder" else f"value of {group_by} per person.")
    )


def _refuse_ids_of_canaries(corpus: Corpus, canaries: Sequence[Canary]) -> None:
    """Refuse a record that would be one unit with a planted one."""
    shared = {canary.id for canary in canaries} & {record.id for record in corpus.records if record.group is None}
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
