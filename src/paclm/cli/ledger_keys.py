"""Which keys sign a ledger: from the workspace, the environment or files the operator names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.errors import CuratorError, LedgerMissing

if TYPE_CHECKING:
    from paclm.curator.master_key import MasterKeys
    from paclm.ledger.address import Holding

KeyFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        help="File of the master key, if not where the workspace has it; repeat for keys that were replaced.",
        show_default="PACLM_KEY, PACLM_KEY_FILE, PACLM_KEY_COMMAND or curator/key",
    ),
]


def ledger_address(workspace: Path) -> Path | str:
    """Where a workspace keeps its ledger, whether or not it exists yet; raises if there is no workspace."""
    from paclm.worlds import settings
    from paclm.worlds.manifest import load_manifest
    from paclm.worlds.student_folder import refuse_student

    refuse_student(workspace)
    address = settings.ledger_address(workspace)
    if not (address.exists() if isinstance(address, Path) else workspace.is_dir()):
        load_manifest(workspace)
    return address


def find_ledger(place: Path) -> Path | str:
    """The ledger of a workspace, or the file itself, such as a backup: for reading only."""
    return place if place.is_file() else ledger_address(place)


def existing_ledger(workspace: Path) -> Path | str:
    """The address of a ledger that is there."""
    from paclm.ledger.address import exists, name_of

    address = ledger_address(workspace)
    if not exists(address):
        raise LedgerMissing(
            f"There is no ledger at {name_of(address)}. It is made when the workspace first generates a token."
        )
    return address


def holding_for(workspace: Path) -> Holding:
    """How a command takes the right to write: it never takes it from another process."""
    from paclm.ledger.address import Holding
    from paclm.worlds.layout import CURATOR_FOLDER
    from paclm.worlds.settings import ledger_config

    return Holding(workspace / CURATOR_FOLDER, ledger_config(workspace).stale_seconds)


def curator_folder(place: Path) -> Path:
    """Where the key and the copy of the sealed secret are: for a ledger file, beside it."""
    from paclm.worlds.layout import CURATOR_FOLDER

    return place.parent if place.is_file() else place / CURATOR_FOLDER


def mac_keys(place: Path, key_files: list[Path] | None = None) -> list[bytes]:
    """The keys that sign the ledger, the newest first.

    Replaced keys are sealed in the ledger and in secret.json, which also show which key is the newest. A ledger of an
    earlier version without that file has none: the operator must name them all, and the key that signed the newest row
    counts as the newest.
    """
    from paclm.curator.custody import sealings_of
    from paclm.curator.redacted import hide_memory
    from paclm.ledger.events import key_name
    from paclm.ledger.verify import signing_key

    hide_memory()
    address = find_ledger(place)
    newest = signing_key(address)  # raises where nothing was served yet
    given, sealings = _keys_given(place, key_files), sealings_of(address, curator_folder(place))
    candidates = given
    if len(given) > 1:  # a rotation was interrupted, or old keys were named: the ledger shows which is in force
        if not key_files:
            candidates = [keys for keys in given if keys.id in sealings] or given
        replaced = _replaced(given, place)
        candidates.sort(key=lambda keys: (keys.id in replaced, key_name(keys.mac.reveal()) != newest))
    keys = candidates[0]
    retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
    return [key.mac.reveal() for key in (keys, *retired, *(candidates[1:] if key_files else ()))]


def unplaced_keys(place: Path, key_files: list[Path], signers: Sequence[str]) -> list[str]:
    """Names of given keys that signed no row and may be newer than those that did."""
    from paclm.ledger.events import key_name

    given = _keys_given(place, key_files)
    replaced = _replaced(given, place)
    names = [key_name(keys.mac.reveal()) for keys in given if keys.id not in replaced]
    return [name for name in names if name not in signers]


def _replaced(given: Sequence[MasterKeys], place: Path) -> set[str]:
    """Ids of keys that a given key replaced; none while a rotation is under way."""
    from paclm.curator.custody import sealings_of
    from paclm.curator.sealed import SealedFile

    folder = curator_folder(place)
    newest = SealedFile(folder).read() or sealings_of(find_ledger(place), folder)  # a backup may be older than the file
    return {old.id for keys in given if keys.id in newest for old in newest[keys.id].retired_keys(keys)} - newest.keys()


def _keys_given(place: Path, key_files: list[Path] | None) -> list[MasterKeys]:
    from paclm.curator.master_key import KEY_FILE, MasterKeys, keeps_own_key, keys_at_hand, read_key

    if key_files:
        return [MasterKeys.derived(read_key(path.expanduser())) for path in key_files]
    folder = curator_folder(place)
    if place.is_file() and keeps_own_key() and not (folder / KEY_FILE).exists():
        raise CuratorError(
            f"{place} is a ledger without its workspace, and no key was given. Pass --key-file FILE, set "
            "PACLM_KEY_FILE, or check what needs no key: --without-key"
        )
    return keys_at_hand(folder)
