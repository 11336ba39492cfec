"""Which keys sign a ledger: from the workspace, the environment or files the operator names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.errors import CuratorError

if TYPE_CHECKING:
    from paclm.curator.master_key import MasterKeys
    from paclm.curator.sealed import Sealing

KeyFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        help="File of the master key, if not where the workspace has it; repeat for keys that were replaced.",
        show_default="PACLM_KEY, PACLM_KEY_FILE, PACLM_KEY_COMMAND or curator/key",
    ),
]


def ledger_path(workspace: Path) -> Path:
    """Where a workspace keeps its ledger, whether or not it exists yet; raises if there is no workspace."""
    from paclm.worlds import layout
    from paclm.worlds.manifest import load_manifest

    path = layout.ledger_path(workspace)
    if not path.exists():
        load_manifest(workspace)
    return path


def find_ledger(place: Path) -> Path:
    """The ledger of a workspace, or the file itself, such as a backup: for reading only."""
    return place if place.is_file() else ledger_path(place)


def mac_keys(place: Path, key_files: list[Path] | None = None) -> list[bytes]:
    """The keys that sign the ledger, the newest first.

    Replaced keys are sealed in secret.json beside the ledger, which also shows which key is the newest. Without that
    file the operator must name them all, and the key that signed the newest row counts as the newest.
    """
    from paclm.curator.redacted import disable_core_dumps
    from paclm.curator.sealed import SealedFile
    from paclm.ledger.events import key_name
    from paclm.ledger.verify import signing_key

    disable_core_dumps()
    path = find_ledger(place)
    if not path.exists():
        signing_key(path)  # raises: nothing was served yet
    given, sealings = _keys_given(path, place.is_file(), key_files), SealedFile(path.parent).read()
    candidates = given
    if len(given) > 1:  # a rotation was interrupted, or old keys were named: the ledger shows which is in force
        if not key_files:
            candidates = [keys for keys in given if keys.id in sealings] or given
        newest, replaced = signing_key(path), _replaced(given, sealings)
        candidates.sort(key=lambda keys: (keys.id in replaced, key_name(keys.mac.reveal()) != newest))
    keys = candidates[0]
    retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
    return [key.mac.reveal() for key in (keys, *retired, *(candidates[1:] if key_files else ()))]


def unplaced_keys(place: Path, key_files: list[Path], signers: Sequence[str]) -> list[str]:
    """Names of given keys that signed no row and may be newer than those that did."""
    from paclm.curator.sealed import SealedFile
    from paclm.ledger.events import key_name

    path = find_ledger(place)
    given = _keys_given(path, place.is_file(), key_files)
    replaced = _replaced(given, SealedFile(path.parent).read())
    names = [key_name(keys.mac.reveal()) for keys in given if keys.id not in replaced]
    return [name for name in names if name not in signers]


def _replaced(given: Sequence[MasterKeys], sealings: Mapping[str, Sealing]) -> set[str]:
    """Ids of keys that a given key replaced; none while a rotation is under way."""
    return {
        old.id for keys in given if keys.id in sealings for old in sealings[keys.id].retired_keys(keys)
    } - sealings.keys()


def _keys_given(ledger: Path, is_bare: bool, key_files: list[Path] | None) -> list[MasterKeys]:
    from paclm.curator.master_key import KEY_FILE, MasterKeys, keeps_own_key, keys_at_hand, read_key

    if key_files:
        return [MasterKeys.derived(read_key(path.expanduser())) for path in key_files]
    if is_bare and keeps_own_key() and not (ledger.parent / KEY_FILE).exists():
        raise CuratorError(
            f"{ledger} is a ledger without its workspace, and no key was given. Pass --key-file FILE, set "
            "PACLM_KEY_FILE, or check what needs no key: --without-key"
        )
    return keys_at_hand(ledger.parent)
