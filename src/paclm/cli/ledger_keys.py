"""Where the keys of a ledger come from, and `paclm ledger rotate-key`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paclm.errors import CuratorError, InvalidInput, LedgerMissing

if TYPE_CHECKING:
    from paclm.curator.master_key import MasterKeys
    from paclm.curator.redacted import Redacted
    from paclm.curator.sealed import Sealing

WitnessOption = Annotated[
    Path | None, typer.Option(envvar="PACLM_WITNESS", help="The ledger's witness: a file on another disk.")
]
NO_WITNESS = (
    "a folder that is put back or copied by hand would not be noticed, and a backup that is adopted counts as spent in "
    "full. Name one on another disk: PACLM_WITNESS=/mnt/other-disk/NAME.witness"
)
KeyFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--key-file",
        help="The master key's file, instead of where the workspace has it; again for keys that were replaced.",
        show_default="PACLM_KEY, PACLM_KEY_FILE or curator/key",
    ),
]


def ledger_path(workspace: Path) -> Path:
    """Where a workspace keeps its ledger, whether or not there is one yet."""
    from paclm.worlds import layout
    from paclm.worlds.manifest import load_manifest

    path = layout.ledger_path(workspace)
    if not path.exists():
        load_manifest(workspace)  # says so where there is no workspace at all
    return path


def find_ledger(place: Path) -> Path:
    """The ledger of a workspace, or the file itself where one was named, such as a backup: for reading only."""
    return place if place.is_file() else ledger_path(place)


def mac_keys(place: Path, key_files: list[Path] | None = None) -> list[bytes]:
    """The keys that sign the ledger, the newest first, from where the operator keeps them.

    Those that were replaced lie sealed in secret.json beside the ledger, which then says which is the newest; without
    that file they must be named, and the one counts as the newest that signed the newest row.
    """
    from paclm.curator.sealed import SealedFile
    from paclm.ledger.events import key_name
    from paclm.ledger.verify import signing_key

    path = find_ledger(place)
    if not path.exists():
        signing_key(path)  # raises: nothing was served yet
    given, sealings = _keys_given(path, place.is_file(), key_files), SealedFile(path.parent).read()
    candidates = given
    if len(given) > 1:  # an exchange of keys was cut short, or old keys were named: the ledger knows which is in force
        if not key_files:
            candidates = [keys for keys in given if keys.id in sealings] or given
        newest, replaced = signing_key(path), _replaced(given, sealings)
        candidates.sort(key=lambda keys: (keys.id in replaced, key_name(keys.mac.reveal()) != newest))
    keys = candidates[0]
    retired = sealings[keys.id].retired_keys(keys) if keys.id in sealings else []
    return [key.mac.reveal() for key in (keys, *retired, *(candidates[1:] if key_files else ()))]


def unplaced_keys(place: Path, key_files: list[Path], signers: Sequence[str]) -> list[str]:
    """Names of keys that were named, signed no row and may have replaced those that did: nothing says otherwise."""
    from paclm.curator.sealed import SealedFile
    from paclm.ledger.events import key_name

    path = find_ledger(place)
    given = _keys_given(path, place.is_file(), key_files)
    replaced = _replaced(given, SealedFile(path.parent).read())
    names = [key_name(keys.mac.reveal()) for keys in given if keys.id not in replaced]
    return [name for name in names if name not in signers]


def _replaced(given: Sequence[MasterKeys], sealings: Mapping[str, Sealing]) -> set[str]:
    """Ids of keys of which one at hand says that it replaced them; not while an exchange is under way."""
    return {
        old.id for keys in given if keys.id in sealings for old in sealings[keys.id].retired_keys(keys)
    } - sealings.keys()


def _keys_given(ledger: Path, is_bare: bool, key_files: list[Path] | None) -> list[MasterKeys]:
    from paclm.curator.master_key import KEY_FILE, MasterKeys, keeps_own_key, keys_at_hand, read_key

    if key_files:
        return [MasterKeys.derived(read_key(path.expanduser())) for path in key_files]
    if is_bare and keeps_own_key() and not (ledger.parent / KEY_FILE).exists():
        raise CuratorError(
            f"{ledger} is a ledger without its workspace, and no key was named. Name it with --key-file FILE or "
            "PACLM_KEY_FILE; or check what needs no key: --without-key"
        )
    return keys_at_hand(ledger.parent)


def rotate_key(
    workspace: Annotated[Path, typer.Argument(help="Folder made by paclm init.")],
    new_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where PACLM_KEY or PACLM_KEY_FILE is set: the new key, mode 0600; made there if there is no such "
            "file.",
        ),
    ] = None,
    witness: WitnessOption = None,
) -> None:
    """
    Put a new master key in force

    Nothing may be serving meanwhile. A key in curator/key is replaced there by a fresh one. Secret and belief are
    sealed anew, the ledger is signed with the new key from then on. A crash leaves either key in force and nothing
    lost. Whoever had the old key and an old copy of the workspace knows the secret for good.

    Example usage:

    \b
        paclm ledger rotate-key clinic
        PACLM_KEY_FILE=/safe/old.key paclm ledger rotate-key clinic --new-key-file /safe/new.key
    """
    from paclm.curator.master_key import KEY_FILE, KEY_FILE_VARIABLE, KEY_VARIABLE, keeps_own_key
    from paclm.curator.redacted import disable_core_dumps
    from paclm.curator.rotation import rotate_key as rotate
    from paclm.worlds.workspace import Workspace

    disable_core_dumps()
    opened = Workspace.open(workspace)
    if not ledger_path(workspace).exists():
        raise LedgerMissing(
            f"{workspace} has served nothing yet, so no key is in force. The first token makes one; to keep it "
            f"elsewhere from the start, set {KEY_FILE_VARIABLE}."
        )
    if keeps_own_key():
        if new_key_file is not None:
            raise InvalidInput(
                f"The key is kept in {opened.curator_path / KEY_FILE}, where a fresh one is put: leave --new-key-file "
                f"out. To keep it elsewhere, move that file first and name its new place in {KEY_FILE_VARIABLE}."
            )
        name = rotate(opened, witness=witness)
        typer.echo(f"The key {name} is in force, in {opened.curator_path / KEY_FILE}. Back it up apart from the rest.")
        return
    variable = KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else KEY_FILE_VARIABLE
    if new_key_file is None:
        raise InvalidInput(
            f"The key comes from {variable}, where paclm cannot put a new one. Say where the new one is, or is to be "
            "made: --new-key-file FILE"
        )
    name = rotate(opened, _new_key(new_key_file.expanduser()), witness)
    what = "its content" if variable == KEY_VARIABLE else "the file"
    typer.echo(
        f"The key {name} is in force. From now on {variable} must name {what}: {new_key_file}. Back it up apart from "
        "the rest."
    )


def _new_key(path: Path) -> Redacted[bytes]:
    """The key in a file, on the disk before anything is sealed with it."""
    from paclm.curator.master_key import new_key, read_key, write_key

    if not path.exists():
        write_key(path, new_key())
    return read_key(path)
